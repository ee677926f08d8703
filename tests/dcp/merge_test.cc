// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/dcp/merge_test.cc -- the merged selection of ranks is the one of a rank with everything: whatever the scores,
// however the positions are dealt.
#include <gtest/gtest.h>

#include <bit>

#include "dcp/ranks.h"
#include "support/property.h"

namespace sievemla::test {
namespace {

TEST(Merge, EqualsTheUnshardedSelection) {
  constexpr std::int64_t kPage = 64;
  Random random(3);
  for (int kind = 0; kind < kKinds; ++kind)
    for (std::int64_t k : {1, 40, 130}) {
      const std::vector<Scores> rows = rows_of_kind(kind, k, random);
      for (int ranks : {1, 2, 4, 8})
        for (std::int64_t interleave : {std::int64_t{1}, kPage})
          for (const Backend& backend : host_backends())
            expect_unsharded<OnHost>(backend, rows, k, ranks, static_cast<int>(interleave), kind % 2 == 0);
    }
}

TEST(Merge, WhateverTheThreads) {
  Random random(4);
  const std::vector<Scores> rows = rows_of_kind(1, 50, random);
  for (const Backend& backend : host_backends(kThreads)) expect_unsharded<OnHost>(backend, rows, 50, 3, 5, true);
}

// 600 rows of 8 * 2048 candidates: more than are laid out at a time.
TEST(Merge, RowsGoThroughInChunks) {
  constexpr std::int64_t kRows = 600, kK = 2048, kRanks = 8;
  Exchange all{kRanks, kRows, kK, Ids(kRanks * 2 * kRows * kK, -1), {}};
  for (std::int64_t rank = 0; rank < kRanks; ++rank)
    for (std::int64_t t = 0; t < kRows; ++t)
      for (std::int64_t i = 0; i < t; ++i) {  // row t: t candidates of each rank, the later the better
        all.at(rank, 1, t)[i] = static_cast<std::int32_t>(i * kRanks + rank);
        all.at(rank, 0, t)[i] = std::bit_cast<std::int32_t>(static_cast<float>(i * kRanks + rank));
      }
  const Backend backend = Backend::cpu();
  const Merged got = merge<OnHost>(backend, all, kK, {0, kRanks, 1});
  for (std::int64_t t = 0; t < kRows; ++t) {
    const std::int64_t n = std::min(kRanks * t, kK);
    for (std::int64_t lane = 0; lane < kK; ++lane)
      ASSERT_EQ(got.selected[static_cast<std::size_t>(t * kK + lane)],
                lane < n ? static_cast<std::int32_t>(kRanks * t - n + lane) : -1)
          << "row " << t << ", lane " << lane;
  }
}

// What a call of fewer rows, ranks or lanes needs is never more.
TEST(Merge, WorkspaceGrowsWithEveryBound) {
  const std::int64_t sizes[] = {0, 1, 7, 300, 5000};
  for (const Backend& backend : host_backends())
    for (std::int64_t rows : sizes)
      for (std::int64_t n : sizes) {
        const std::int64_t bytes = merge_topk_workspace_bytes(backend, {4, rows, n, 2048});
        EXPECT_LE(bytes, merge_topk_workspace_bytes(backend, {5, rows, n, 2048}));
        EXPECT_LE(bytes, merge_topk_workspace_bytes(backend, {4, rows + 1, n, 2048}));
        EXPECT_LE(bytes, merge_topk_workspace_bytes(backend, {4, rows, n + 1, 2048}));
        EXPECT_LE(bytes, merge_topk_workspace_bytes(backend, {4, rows, n, 2049}));
      }
}

TEST(Merge, NothingToDo) {
  for (const Backend& backend : host_backends()) {
    for (std::int64_t n : {0, 4})
      EXPECT_EQ(merge<OnHost>(backend, {2, 1, n, Ids(static_cast<std::size_t>(4 * n), -1), {}}, 3, {}).selected,
                (Ids{-1, -1, -1}));
    EXPECT_TRUE(merge<OnHost>(backend, {2, 1, 4, Ids(16, -1), {}}, 0, {}).selected.empty());
    EXPECT_TRUE(merge<OnHost>(backend, {2, 0, 4, {}, {}}, 3, {}).selected.empty());
  }
}

// Positions without a column have no score, and are sent as no position.
TEST(Candidates, AreNamedInTheWholeSequence) {
  const Scores scores = {1, 2, 3, 4, 5, 6, 7, 8};
  const Ids starts = {2}, local = {0, 1, 4, 5, 6, INT32_MAX, -1, INT32_MIN};
  for (const Backend& backend : host_backends()) {
    Guarded<float> selected(8, kNan);
    Guarded<std::int32_t> positions(8, kUnwritten);
    topk_candidates(backend, {tensor(scores.data(), {1, 8}),
                              tensor(starts.data(), {1}),
                              tensor(local.data(), {1, 8}),
                              {1, 3, 4},
                              tensor(selected.data(), {1, 8}),
                              tensor(positions.data(), {1, 8})});
    EXPECT_TRUE(selected.intact() && positions.intact());
    EXPECT_EQ(Scores(selected.begin(), selected.end()), (Scores{3, 4, 7, 8, -kInf, -kInf, -kInf, -kInf}));
    EXPECT_EQ(Ids(positions.begin(), positions.end()), (Ids{4, 5, 16, 17, -1, -1, -1, -1}));
  }
}

RC_GTEST_PROP(ShardSlotsProperty, AreTheSlotsWithoutTheGaps, ()) {
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  Random random(seed);
  const std::int64_t per = 1 + random.below(3), requests = 1 + random.below(3), rows = per * requests;
  const std::int64_t k = random.below(40), pages = 1 + random.below(9);
  Ids table, positions;
  for (std::int64_t i = 0; i < requests * pages; ++i) table.push_back(static_cast<std::int32_t>(random.below(12) - 1));
  for (std::int64_t i = 0; i < rows * k; ++i) positions.push_back(static_cast<std::int32_t>(random.below(200) - 1));
  const int ranks = 1 + static_cast<int>(random.below(4));
  const SlotMap map{tensor(table.data(), {requests, pages}),
                    {},
                    1 + random.below(20),
                    {static_cast<int>(random.below(ranks)), ranks, 1 + static_cast<int>(random.below(5))}};
  const TensorView given = tensor(positions.data(), {rows, k});
  for (const Backend& backend : host_backends(kThreads)) {
    std::vector<std::int64_t> gaps(positions.size()), want, got(positions.size(), kUnwritten);
    Ids counts(static_cast<std::size_t>(rows), kUnwritten), want_counts;
    positions_to_slots(backend, given, map, tensor(gaps.data(), {rows, k}));
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t i = t * k; i < (t + 1) * k; ++i)
        if (gaps[static_cast<std::size_t>(i)] >= 0) want.push_back(gaps[static_cast<std::size_t>(i)]);
      want_counts.push_back(static_cast<std::int32_t>(static_cast<std::int64_t>(want.size()) - t * k));
      want.resize(static_cast<std::size_t>((t + 1) * k), -1);
    }
    shard_slots(backend, {given, map, tensor(got.data(), {rows, k}), tensor(counts.data(), {rows})});
    RC_ASSERT(got == want);
    RC_ASSERT(counts == want_counts);
  }
}

}  // namespace
}  // namespace sievemla::test
