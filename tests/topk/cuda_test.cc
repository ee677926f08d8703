// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/cuda_test.cc -- stage 2 on a CUDA device gives the ids of the definition, whatever the rows and however
// they are cut up.
#include <algorithm>
#include <bit>
#include <functional>
#include <random>

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
  args.positions = host;
  topk(cuda, device.put(args), workspace);
  cuda_good(cudaDeviceSynchronize());
  device.take_back(host);
  return positions;
}
void check(const Backend& cuda, const std::vector<Scores>& rows, std::int64_t k, Starts starts = Starts::drawn) {
  const TopkProblem problem(rows, 1, starts);
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

TEST_F(TopkOnCuda, Case16MassTies) {
  const Backend cuda = backend();
  Scores ties(8320, 0.f);
  for (std::size_t i = 0; i < 100; ++i) ties[83 * i] = 1 + static_cast<float>(i);
  Scores signs(8320);
  for (std::size_t i = 0; i < signs.size(); ++i) signs[i] = i % 3 ? 0.f : -0.f;
  check(cuda, {ties, Scores(8320, 7.f), signs}, 2048);
  check(cuda, {Scores(200000, -1.f), Scores(131072, kInf)}, 2048);
}

TEST_F(TopkOnCuda, Case17SameCoarseBin) {
  const Backend cuda = backend();
  Scores row(4096), negated(4096), embedded(131072, -1.f);
  for (std::uint32_t j = 0; j < 4096; ++j) {
    row[j] = 1 + static_cast<float>(1667 * j % 4096) * 0x1p-23f;
    negated[j] = -row[j];
    embedded[j * 31 + 5] = row[j];
  }
  check(cuda, {row, negated}, 512);
  check(cuda, {embedded}, 512);
}

TEST_F(TopkOnCuda, Case18NanAndInfinities) {
  const Backend cuda = backend();
  Scores row(4096);
  for (std::uint32_t j = 0; j < 4096; ++j)
    row[j] = std::bit_cast<float>((j % 2 ? 0xFF800001u : 0x7FC00000u) + j % 1000);
  for (std::size_t i = 0; i < 96; ++i) row[40 * i + 3] = static_cast<float>(i) - 50;
  Scores infinite = row;
  for (const std::size_t j : {7u, 1000u, 4095u}) infinite[j] = kInf, infinite[j - 1] = -kInf;
  for (int repeat = 0; repeat < 20; ++repeat) check(cuda, {row, infinite}, 2048);
}

// Lengths of 0 and less, and outputs that were something else.
TEST_F(TopkOnCuda, Case19BadLengths) {
  const Backend cuda = backend();
  Random random(8);
  const std::vector<float> scores = random.f32s(8 * 16);
  const Ids lengths = {10, -1, 0, 3, 9, INT32_MIN, -2, 2};
  Ids want, got(8 * 4, kUnwritten);
  for (std::size_t t = 0; t < 8; ++t) {
    const auto n = static_cast<std::ptrdiff_t>(std::max(lengths[t], 0));
    const auto first = scores.begin() + static_cast<std::ptrdiff_t>(16 * t);
    const Ids ids = brute_force({first, first + n}, 4);
    want.insert(want.end(), ids.begin(), ids.end());
  }
  TopkArgs args;
  args.scores = tensor(scores.data(), {8, 16}), args.lengths = tensor(lengths.data(), {8});
  args.positions = tensor(got.data(), {8, 4});
  OnDevice device(cuda.device());
  topk(cuda, device.put(args), CudaWorkspace(cuda, topk_workspace_bytes(cuda, {8, 16, 4})));
  device.take_back(args.positions);
  EXPECT_EQ(got, want);
}

// Rows whose offset fits neither 32 bits of elements nor of bytes.
TEST_F(TopkOnCuda, RowsBeyond32Bits) {
  const Backend cuda = backend();
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64, kWidth = 20000, kK = 300;
  std::size_t free = 0, total = 0;
  cuda_good(cudaMemGetInfo(&free, &total));
  const std::int64_t bytes = (kStride + kWidth) * 4;
  if (free < static_cast<std::size_t>(bytes)) GTEST_SKIP() << "too little memory";
  const cuda::Memory memory = cuda::Memory::on(cuda.device(), bytes);
  auto* const scores = static_cast<float*>(memory.data());
  Random random(11);
  Ids want, got(2 * kK, kUnwritten);
  for (std::int64_t t = 0; t < 2; ++t) {
    const Scores row = random_row(kWidth, random, 0);
    cuda_copy(scores + t * kStride, row.data(), kWidth * 4);
    const Ids ids = brute_force(row, kK);
    want.insert(want.end(), ids.begin(), ids.end());
  }
  const Ids lengths(2, kWidth);
  TopkArgs args;
  args.scores = tensor(scores, {2, kWidth}, cuda.device()), args.scores.stride[0] = kStride;
  args.lengths = tensor(lengths.data(), {2}), args.positions = tensor(got.data(), {2, kK});
  OnDevice device(cuda.device());
  topk(cuda, device.put(args), CudaWorkspace(cuda, topk_workspace_bytes(cuda, {2, kWidth, kK})));
  device.take_back(args.positions);
  EXPECT_EQ(got, want);
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

// Rows at multiples of 16 bytes, few and up to 131,072 long: the CTAs of one are a cluster where there are clusters.
TEST_F(TopkOnCuda, RowsTogether) {
  const Backend cuda = backend();
  Random random(7);
  for (int kind = 0; kind <= 6; ++kind) {
    SCOPED_TRACE(kind);
    check(cuda, {random_row(131072, random, kind)}, 2048, Starts::none);
    for (std::int64_t k : {1, 300, 2051, 6144, 7000}) {
      std::vector<Scores> rows;
      for (std::int64_t n : {0, 8191, 8192, 8193, 20001, 65536, 100002, 131071})
        rows.push_back(random_row(n, random, kind));
      check(cuda, rows, k, Starts::none);
    }
  }
}
// What is wanted lies in one CTA's part, or ends in a bin that many share: 64 scores, which are ranked, and more.
TEST_F(TopkOnCuda, RowsTogetherUnevenly) {
  const Backend cuda = backend();
  Random random(8);
  std::vector<Scores> rows;
  for (std::size_t from : {0u, 16384u, 50001u, 129000u}) {
    Scores row = random_row(131072, random, 0);
    for (std::size_t i = 0; i < 2072; ++i) row[from + i] += 3.f;
    rows.push_back(row);
  }
  for (std::size_t same : {30u, 64u, 65u, 1500u}) {
    Scores row = random_row(131072, random, 0);
    std::nth_element(row.begin(), row.begin() + 2000, row.end(), std::greater<>());
    const float edge = row[2000];
    std::shuffle(row.begin(), row.end(), std::minstd_rand(static_cast<unsigned>(same)));
    for (std::size_t i = 0; i < same; ++i) row[i * 80 + 7] = edge;
    rows.push_back(row);
  }
  for (std::int64_t k : {2000, 2020, 2048}) check(cuda, rows, k, Starts::none);
}

// Each way that a cluster goes, in few scores: the last bin's are ranked, are too many; the guess is bad; the row is
// short.
TEST_F(TopkOnCuda, OneRowTogether) {
  const Backend cuda = backend();
  Random random(9);
  const Scores row = random_row(8300, random, 0);
  Scores sorted = row, tied = row;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  for (std::size_t i = 0; i < 100; ++i) tied[i * 80 + 7] = sorted[250];
  check(cuda, {row}, 300, Starts::none);
  check(cuda, {tied}, 300, Starts::none);
  check(cuda, {Scores(8300, 7.f), Scores(row.begin(), row.begin() + 3000)}, 300, Starts::none);
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
      together({random_row(131072, random, 0)}, 1, Starts::none),
      many(std::vector<Scores>(20, random_row(40000, random, 0))),
      tied({random_row(100000, random, 2), random_row(9000, random, 3)});
  for (int round = 0; round < 3; ++round)
    for (const TopkProblem* problem : {&long_row, &together, &many, &tied})
      EXPECT_EQ(select(cuda, *problem, 2048, workspace), problem->expected(2048));
}

TEST_F(TopkOnCuda, SlotsOfEveryShard) {
  const Backend cuda = backend();
  Random random(6);
  const std::vector<Scores> rows = {random_row(20000, random, 0), random_row(500, random, 0),
                                    random_row(9000, random, 0)};
  const TopkProblem drawn(rows), together(rows, 1, Starts::none);
  constexpr std::int64_t kPages = 700, kK = 300;
  Ids table;
  for (int i = 0; i < 2 * kPages; ++i) table.push_back(i % 37 ? static_cast<std::int32_t>(random.below(1 << 20)) : -1);
  const Ids requests = {1, 0, 5};
  for (std::int64_t page_size : {16, 48, 64})
    for (int turn = 0; turn < 6; ++turn) {
      const TopkProblem& problem = turn < 3 ? drawn : together;
      const int rank = turn % 3;
      TopkArgs args = problem.args();
      args.map.block_table = tensor(table.data(), {2, kPages});
      args.map.row_request = tensor(requests.data(), {3});
      args.map.page_size = page_size;
      args.map.shard = {rank, rank == 0 ? 1 : 3, rank == 0 ? 1 : 16};
      std::vector<std::int64_t> want(3 * kK), got(3 * kK);
      std::vector<std::int32_t> ids(3 * kK), narrow(3 * kK), chosen(3 * kK);
      TopkArgs host = args;
      host.slots = tensor(want.data(), {3, kK});
      const Ids known = {1, 0, 1};  // host backends refuse a request that is not there
      host.map.row_request = tensor(known.data(), {3});
      const Backend reference = Backend::reference();
      topk(reference, host, PoisonedWorkspace(topk_workspace_bytes(reference, {3, problem.width(), kK})));
      std::fill(want.begin() + 2 * kK, want.end(), -1);  // a request outside the table has no slots

      OnDevice device(cuda.device());
      const TensorView slots = tensor(got.data(), {3, kK}), positions = tensor(ids.data(), {3, kK});
      args.slots = slots, args.positions = positions;
      args = device.put(args);
      const CudaWorkspace workspace(cuda, topk_workspace_bytes(cuda, {3, problem.width(), kK}));
      topk(cuda, args, workspace);
      const TensorView narrows = tensor(narrow.data(), {3, kK}), chosens = tensor(chosen.data(), {3, kK});
      positions_to_slots(cuda, args.positions, args.map, device.put(narrows));
      args.slots = device.put(chosens);
      topk(cuda, args, workspace);
      cuda_good(cudaDeviceSynchronize());
      device.take_back(slots), device.take_back(positions), device.take_back(narrows), device.take_back(chosens);
      EXPECT_EQ(ids, problem.expected(kK));
      EXPECT_EQ(got, want) << "page size " << page_size << ", rank " << rank;
      EXPECT_EQ(chosen, narrow) << "page size " << page_size << ", rank " << rank;
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
