// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/cuda_test.cc -- stage 2 on a CUDA device gives the ids of the definition, whatever the rows and however
// they are cut up.
#include <bit>

#include "support/on_cuda.h"
#include "topk/problem.h"

namespace sievemla::test {
namespace {

using TopkOnCuda = OnCuda;

// The call's positions; `workspace` may be shared by calls of any shape.
Ids select(const Backend& cuda, const TopkProblem& problem, std::int64_t k, Workspace workspace) {
  OnDevice device(cuda.device());
  Ids positions(static_cast<std::size_t>(problem.rows() * k), kUnwritten);
  const TensorView host = tensor(positions.data(), {problem.rows(), k});
  TopkArgs args = problem.args();
  args.scores = device.put(args.scores), args.starts = device.put(args.starts), args.lengths = device.put(args.lengths);
  args.positions = device.put(host);
  topk(cuda, args, workspace);
  cuda_good(cudaDeviceSynchronize());
  device.take_back(host);
  return positions;
}
void check(const Backend& cuda, const std::vector<Scores>& rows, std::int64_t k) {
  const TopkProblem problem(rows);
  const CudaWorkspace workspace(cuda, topk_workspace_bytes(cuda, {problem.rows(), problem.width(), k}));
  EXPECT_EQ(select(cuda, problem, k, workspace), problem.expected(k)) << "k = " << k;
}

Scores random_row(std::int64_t n, Random& random, int kind) {
  Scores row(static_cast<std::size_t>(n));
  for (float& x : row) {
    const auto bits = static_cast<std::uint32_t>(random.bits());
    switch (kind) {
      case 0: x = random.uniform_f32(1.f); break;
      case 1: x = static_cast<float>(random.below(5) - 2); break;                         // ties, +0 and -0 below
      case 2: x = bits % 16 ? (bits & 64 ? 0.f : -0.f) : random.uniform_f32(1.f); break;  // mostly zero
      case 3: x = std::bit_cast<float>(0x3F800000u | (bits & 1023u)); break;              // near ties
      case 4: x = bits % 3 ? random.uniform_f32(1.f) : std::bit_cast<float>(0x7F800001u | (bits & 0x807FFFFFu)); break;
      case 5: x = bits % 8 ? random.uniform_f32(1.f) : (bits & 64 ? kInf : -kInf); break;
      default: x = std::bit_cast<float>(bits); break;  // any bits
    }
  }
  return row;
}

TEST_F(TopkOnCuda, RowsOfAllKindsAndLengths) {
  const Backend cuda = backend();
  Random random(1);
  for (int kind = 0; kind <= 6; ++kind)
    for (std::int64_t k : {1, 100, 2048, 2051, 4096}) {
      SCOPED_TRACE(kind);
      std::vector<Scores> rows;
      for (std::int64_t n : {std::int64_t{0}, std::int64_t{1}, k - 1, k, k + 1, std::int64_t{8191}, std::int64_t{8192},
                             std::int64_t{8193}, std::int64_t{30000}})
        rows.push_back(random_row(n, random, kind));
      check(cuda, rows, k);
    }
}

TEST_F(TopkOnCuda, LongRows) {
  const Backend cuda = backend();
  Random random(2);
  for (int kind = 0; kind <= 6; ++kind) {
    SCOPED_TRACE(kind);
    check(cuda, {random_row(131072, random, kind)}, 2048);
    check(cuda, {random_row(70000, random, kind), random_row(65537, random, kind)}, 100);
  }
  check(cuda, {random_row(1 << 20, random, 0)}, 2048);
}

TEST_F(TopkOnCuda, MoreRowsThanParts) {
  const Backend cuda = backend();
  Random random(3);
  std::vector<Scores> rows;
  for (int t = 0; t < 300; ++t) rows.push_back(random_row(9000 + t, random, t % 7));
  check(cuda, rows, 64);
  for (Scores& row : rows) row.resize(777);
  check(cuda, rows, 64);
}

TEST_F(TopkOnCuda, MoreIdsThanAListHolds) {
  const Backend cuda = backend();
  Random random(4);
  check(cuda, {random_row(20000, random, 0), random_row(5000, random, 0)}, 10000);
  check(cuda, {random_row(20000, random, 1), random_row(20000, random, 4)}, 19999);
}

// Shapes alternate on one workspace: each call leaves its tickets as it found them.
TEST_F(TopkOnCuda, Tickets) {
  const Backend cuda = backend();
  Random random(5);
  const CudaWorkspace workspace(cuda, topk_workspace_bytes(cuda, {64, 131072 + 9, 2048}));
  const TopkProblem long_row({random_row(131072, random, 0)}),
      many(std::vector<Scores>(20, random_row(40000, random, 0))),
      tied({random_row(100000, random, 2), random_row(9000, random, 3)});
  for (int round = 0; round < 3; ++round)
    for (const TopkProblem* problem : {&long_row, &many, &tied})
      EXPECT_EQ(select(cuda, *problem, 2048, workspace), problem->expected(2048));
}

TEST_F(TopkOnCuda, SlotsOfEveryShard) {
  const Backend cuda = backend();
  Random random(6);
  const TopkProblem problem({random_row(20000, random, 0), random_row(500, random, 0), random_row(9000, random, 0)});
  constexpr std::int64_t kPages = 700, kK = 300;
  Ids table;
  for (int i = 0; i < 2 * kPages; ++i) table.push_back(i % 37 ? static_cast<std::int32_t>(random.below(1 << 20)) : -1);
  const Ids requests = {1, 0, 5};
  for (std::int64_t page_size : {16, 48, 64})
    for (int rank = 0; rank < 3; ++rank) {
      TopkArgs args = problem.args();
      args.map.block_table = tensor(table.data(), {2, kPages});
      args.map.row_request = tensor(requests.data(), {3});
      args.map.page_size = page_size;
      args.map.shard = {rank, rank == 0 ? 1 : 3, rank == 0 ? 1 : 16};
      std::vector<std::int64_t> want(3 * kK), got(3 * kK);
      std::vector<std::int32_t> ids(3 * kK), narrow(3 * kK);
      TopkArgs host = args;
      host.slots = tensor(want.data(), {3, kK});
      const Ids known = {1, 0, 1};  // host backends refuse a request that is not there
      host.map.row_request = tensor(known.data(), {3});
      const Backend reference = Backend::reference();
      topk(reference, host, PoisonedWorkspace(topk_workspace_bytes(reference, {3, problem.width(), kK})));
      std::fill(want.begin() + 2 * kK, want.end(), -1);  // a request outside the table has no slots

      OnDevice device(cuda.device());
      const TensorView slots = tensor(got.data(), {3, kK}), positions = tensor(ids.data(), {3, kK});
      args.scores = device.put(args.scores), args.starts = device.put(args.starts);
      args.lengths = device.put(args.lengths);
      args.map.block_table = device.put(args.map.block_table), args.map.row_request = device.put(args.map.row_request);
      args.slots = device.put(slots), args.positions = device.put(positions);
      const CudaWorkspace workspace(cuda, topk_workspace_bytes(cuda, {3, problem.width(), kK}));
      topk(cuda, args, workspace);
      const TensorView narrows = tensor(narrow.data(), {3, kK});
      positions_to_slots(cuda, args.positions, args.map, device.put(narrows));
      cuda_good(cudaDeviceSynchronize());
      device.take_back(slots), device.take_back(positions), device.take_back(narrows);
      EXPECT_EQ(ids, problem.expected(kK));
      EXPECT_EQ(got, want) << "page size " << page_size << ", rank " << rank;
      for (std::size_t i = 0; i < want.size(); ++i)
        ASSERT_EQ(narrow[i], want[i] > INT32_MAX ? -1 : static_cast<std::int32_t>(want[i])) << i;
    }
}

TEST_F(TopkOnCuda, ExpandPools) {
  const Backend cuda = backend();
  const Backend reference = Backend::reference();
  Random random(7);
  for (int kpool : {1, 4, 16}) {
    constexpr std::int64_t kRows = 5, kPools = 130;
    const std::int64_t width = kPools * kpool + kpool + 3;
    Ids pools, lengths = {2000, 0, -1, 77, 100000};
    for (int i = 0; i < kRows * kPools; ++i) pools.push_back(static_cast<std::int32_t>(random.below(200)) - 5);
    std::vector<std::int32_t> want(static_cast<std::size_t>(kRows * width)), got = want;
    ExpandPoolsArgs args{tensor(pools.data(), {kRows, kPools}), tensor(lengths.data(), {kRows}), kpool,
                         tensor(want.data(), {kRows, width})};
    expand_pools(reference, args);
    OnDevice device(cuda.device());
    const TensorView out = tensor(got.data(), {kRows, width});
    args.pools = device.put(args.pools), args.lengths = device.put(args.lengths), args.positions = device.put(out);
    expand_pools(cuda, args);
    cuda_good(cudaDeviceSynchronize());
    device.take_back(out);
    EXPECT_EQ(got, want) << "kpool " << kpool;
  }
}

}  // namespace
}  // namespace sievemla::test
