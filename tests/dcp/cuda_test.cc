// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/dcp/cuda_test.cc -- ranks of decode context parallel on a CUDA device: the merged selection is that of a rank
// with everything, and the merge of their outputs is the definition's.
#include <bit>

#include "dcp/ranks.h"
#include "sievemla/combine.h"
#include "support/near.h"
#include "support/on_cuda.h"

namespace sievemla::test {
namespace {

struct OnGpu : OnDevice {
  explicit OnGpu(const Backend& backend) : OnDevice(backend.device()) {}
  struct Space : CudaWorkspace {
    Space(const Backend& backend, std::int64_t bytes) : CudaWorkspace(backend, bytes) {}
  };
};

using DcpOnCuda = OnCuda;

TEST_F(DcpOnCuda, MergeEqualsTheUnshardedSelection) {
  Random random(3);
  for (int kind = 0; kind < kKinds; ++kind)
    for (std::int64_t k : {1, 40, 300, 2048}) {
      const std::vector<Scores> rows = rows_of_kind(kind, k, random);
      for (int ranks : {1, 2, 4, 8, 11})
        for (int interleave : {1, 64})
          expect_unsharded<OnGpu>(backend(), rows, k, ranks, interleave, (kind + ranks) % 2 == 0);
    }
}

// One row of 128K scores and many of 4K: rows whose candidates are shared by CTAs, and rows that are not.
TEST_F(DcpOnCuda, LongRows) {
  Random random(5);
  for (int kind : {0, 1, 2}) {
    expect_unsharded<OnGpu>(backend(), {row_of_kind(kind, 131072, random)}, 2048, 8, 64, false);
    std::vector<Scores> rows;
    for (int t = 0; t < 40; ++t) rows.push_back(row_of_kind(kind, 4096 + t, random));
    expect_unsharded<OnGpu>(backend(), rows, 2048, 4, 1, true);
  }
}

// More rows than are laid out at a time, against the reference.
TEST_F(DcpOnCuda, RowsGoThroughInChunks) {
  constexpr std::int64_t kRows = 600, kK = 2048, kRanks = 8;
  Exchange all{kRanks, kRows, kK, Ids(kRanks * 2 * kRows * kK, -1), {}};
  for (std::int64_t rank = 0; rank < kRanks; ++rank)
    for (std::int64_t t = 0; t < kRows; ++t)
      for (std::int64_t i = 0; i < t; ++i) {
        all.at(rank, 1, t)[i] = static_cast<std::int32_t>(i * kRanks + rank);
        all.at(rank, 0, t)[i] = std::bit_cast<std::int32_t>(static_cast<float>((i * kRanks + rank) % 1000));
      }
  const Merged want = merge<OnHost>(Backend::cpu(), all, kK, {3, kRanks, 1});
  const Merged got = merge<OnGpu>(backend(), all, kK, {3, kRanks, 1});
  EXPECT_EQ(got.selected, want.selected);
  EXPECT_EQ(got.slots, want.slots);
  EXPECT_EQ(got.counts, want.counts);
}

TEST_F(DcpOnCuda, NothingToDo) {
  for (std::int64_t n : {0, 4})
    EXPECT_EQ(merge<OnGpu>(backend(), {2, 1, n, Ids(static_cast<std::size_t>(4 * n), -1), {}}, 3, {}).selected,
              (Ids{-1, -1, -1}));
  EXPECT_TRUE(merge<OnGpu>(backend(), {2, 1, 4, Ids(16, -1), {}}, 0, {}).selected.empty());
  EXPECT_TRUE(merge<OnGpu>(backend(), {2, 0, 4, {}, {}}, 3, {}).selected.empty());
}

TEST_F(DcpOnCuda, CandidatesAndSlotsEqualTheReference) {
  const Backend reference = Backend::reference(), cuda = backend();
  Random random(9);
  constexpr std::int64_t kRows = 6, kK = 700, kWidth = 900;
  const std::vector<float> scores = random.f32s(kRows * kWidth);
  Ids local, starts, table;
  for (std::int64_t i = 0; i < kRows * kK; ++i)
    local.push_back(static_cast<std::int32_t>(random.below(kWidth + 40) - 20));
  for (std::int64_t i = 0; i < kRows; ++i) starts.push_back(static_cast<std::int32_t>(random.below(50)));
  for (std::int64_t i = 0; i < 2 * 20; ++i) table.push_back(static_cast<std::int32_t>(random.below(30) - 2));
  auto run = [&](const Backend& on, Scores& selected, Ids& positions, std::vector<std::int64_t>& slots, Ids& counts) {
    selected.assign(kRows * kK, kNan), positions.assign(kRows * kK, kUnwritten);
    slots.assign(kRows * kK, kUnwritten), counts.assign(kRows, kUnwritten);
    const Shard shard{1, 3, 16};
    const CandidatesArgs sent{tensor(scores.data(), {kRows, kWidth}), tensor(starts.data(), {kRows}),
                              tensor(local.data(), {kRows, kK}),      shard,
                              tensor(selected.data(), {kRows, kK}),   tensor(positions.data(), {kRows, kK})};
    const ShardSlotsArgs kept{tensor(local.data(), {kRows, kK}),
                              {tensor(table.data(), {2, 20}), {}, 48, shard},
                              tensor(slots.data(), {kRows, kK}),
                              tensor(counts.data(), {kRows})};
    if (on.kind() == BackendKind::reference) return topk_candidates(on, sent), shard_slots(on, kept);
    OnDevice device(on.device());
    topk_candidates(on, device.put(sent)), shard_slots(on, device.put(kept));
    for (const TensorView& view : {sent.selected_scores, sent.positions, kept.slots, kept.counts})
      device.take_back(view);
  };
  Scores want_scores, scores_got;
  Ids want_positions, positions, want_counts, counts;
  std::vector<std::int64_t> want_slots, slots;
  run(reference, want_scores, want_positions, want_slots, want_counts);
  run(cuda, scores_got, positions, slots, counts);
  EXPECT_EQ(scores_got, want_scores);
  EXPECT_EQ(positions, want_positions);
  EXPECT_EQ(slots, want_slots);
  EXPECT_EQ(counts, want_counts);
  EXPECT_GT(counts[0], 0);
}

// f32 parts of 2, 4 and 8 ranks, one of them empty. The device adds in f32: at most 8 terms, each with a weight whose
// exponential is good to a few 2^-23.
TEST_F(DcpOnCuda, CombineEqualsTheReference) {
  for (std::int64_t ranks : {2, 4, 8}) {
    Random random(static_cast<std::uint64_t>(ranks));
    constexpr std::int64_t kRows = 5, kHeads = 64;
    const std::int64_t cells = kRows * kHeads;
    std::vector<float> parts = random.f32s(ranks * cells * 512), lses = random.f32s(ranks * cells, 8.f);
    std::fill_n(lses.begin() + cells, cells, -kInf);
    std::fill_n(parts.begin() + cells * 512, cells * 512, kNan);  // not to be read
    std::vector<float> want(static_cast<std::size_t>(cells * 512), kNan), got = want;
    std::vector<float> want_lse(static_cast<std::size_t>(cells), kNan), got_lse = want_lse;
    auto args = [&](std::vector<float>& out, std::vector<float>& lse) {
      return CombineArgs{tensor(parts.data(), {ranks, kRows, kHeads, 512}),
                         tensor(lses.data(), {ranks, kRows, kHeads}),
                         {},
                         tensor(out.data(), {kRows, kHeads, 512}),
                         tensor(lse.data(), {kRows, kHeads})};
    };
    combine(Backend::reference(), args(want, want_lse));
    const Backend cuda = backend();
    OnDevice device(cuda.device());
    const CombineArgs given = args(got, got_lse);
    combine(cuda, device.put(given));
    device.take_back(given.out), device.take_back(given.lse);
    EXPECT_LE(relative_error(got, want), 1e-5);
    EXPECT_LE(relative_error(got_lse, want_lse), 1e-5);
  }
}

}  // namespace
}  // namespace sievemla::test
