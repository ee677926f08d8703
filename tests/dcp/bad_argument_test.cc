// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/dcp/bad_argument_test.cc -- each rule of context_parallel.h refuses with its words, and nothing is written.
#include <gtest/gtest.h>

#include <initializer_list>

#include "sievemla/context_parallel.h"
#include "sievemla/error.h"
#include "topk/problem.h"
#include "topk/refused.h"

namespace sievemla::test {
namespace {

// Right calls: 2 ranks, 4 rows of 2 requests, 3 candidates each, 5 lanes.
struct Call {
  std::vector<float> scores = std::vector<float>(4 * 10, 1.f), sent = std::vector<float>(2 * 4 * 3, 1.f);
  std::vector<float> selected_scores = std::vector<float>(4 * 3, 7.f);
  Ids starts = {0, 1, 2, 3}, local = Ids(4 * 3, 1), table = Ids(2 * 3, 1), lengths = Ids(8, 3), candidates;
  Ids whole = Ids(4 * 3, kUnwritten), selected = Ids(4 * 5, kUnwritten), slots = Ids(4 * 5, kUnwritten),
      counts = Ids(4, kUnwritten);
  Call() {
    for (int i = 0; i < 8; ++i) candidates.insert(candidates.end(), {0, 4, 9});
    to_send = {tensor(scores.data(), {4, 10}),         tensor(starts.data(), {4}),
               tensor(local.data(), {4, 3}),           {1, 2, 4},
               tensor(selected_scores.data(), {4, 3}), tensor(whole.data(), {4, 3})};
    merge = {tensor(sent.data(), {2, 4, 3}),
             tensor(candidates.data(), {2, 4, 3}),
             tensor(lengths.data(), {2, 4}),
             tensor(selected.data(), {4, 5}),
             tensor(slots.data(), {4, 5}),
             tensor(counts.data(), {4}),
             {tensor(table.data(), {2, 3}), {}, 8, {1, 2, 4}}};
    shard = {merge.selected, merge.map, merge.slots, merge.counts};
    shard.positions = tensor(candidates.data(), {4, 5});
  }
  Call(const Call&) = delete;
  CandidatesArgs to_send;
  MergeTopkArgs merge;
  ShardSlotsArgs shard;
  std::int64_t workspace_short = 0;

  bool untouched() const {
    auto same = [](const Ids& ids) {
      return std::all_of(ids.begin(), ids.end(), [](std::int32_t id) { return id == kUnwritten; });
    };
    return same(whole) && same(selected) && same(slots) && same(counts) &&
           std::all_of(selected_scores.begin(), selected_scores.end(), [](float x) { return x == 7.f; });
  }
};

template <class Run>
void expect_refused(std::initializer_list<Refusal<Call>> bads, Run&& run) {
  for (const Refusal<Call>& bad : bads) test::expect_refused<InvalidArgument>(host_backends(), bad, run);
}

TEST(BadArgument, TopkCandidates) {
  expect_refused(
      {{"scores absent", "topk_candidates: scores", [](Call& c) { c.to_send.scores = {}; }},
       {"scores not contiguous", "contiguous", [](Call& c) { c.to_send.scores.stride[1] = 2; }},
       {"positions of other rows", "topk_candidates: local", [](Call& c) { c.to_send.local.shape[0] = 3; }},
       {"starts of other rows", "topk_candidates: starts", [](Call& c) { c.to_send.starts.shape[0] = 3; }},
       {"no scores out", "topk_candidates: selected_scores", [](Call& c) { c.to_send.selected_scores = {}; }},
       {"positions i64", "topk_candidates: positions", [](Call& c) { c.to_send.positions.dtype = DType::i64; }},
       {"rank outside", "0 <= rank < ranks", [](Call& c) { c.to_send.shard = {2, 2, 1}; }},
       {"a sequence past 32 bits", "must fit 32 bits", [](Call& c) { c.to_send.shard = {0, 1 << 29, 1}; }}},
      [](const Backend& backend, Call& call) { topk_candidates(backend, call.to_send); });
}

TEST(BadArgument, MergeTopk) {
  expect_refused(
      {{"scores absent", "merge_topk: scores", [](Call& c) { c.merge.scores = {}; }},
       {"no rank", "at least 1 rank",
        [](Call& c) { c.merge.scores.shape[0] = c.merge.positions.shape[0] = c.merge.lengths.shape[0] = 0; }},
       {"scores not contiguous", "contiguous", [](Call& c) { c.merge.scores.stride[2] = 2; }},
       {"positions of another shape", "merge_topk: positions", [](Call& c) { c.merge.positions.shape[2] = 2; }},
       {"positions not contiguous", "contiguous", [](Call& c) { c.merge.positions.stride[2] = 2; }},
       {"positions that fall", "must ascend: got 4 before 3 in row 2 of rank 1",
        [](Call& c) { c.candidates[(4 + 2) * 3 + 2] = 3; }},
       {"a position twice", "must ascend", [](Call& c) { c.candidates[1] = 0; }},
       {"lengths of other ranks", "merge_topk: lengths", [](Call& c) { c.merge.lengths.shape[0] = 1; }},
       {"no output", "selected or slots", [](Call& c) { c.merge.selected = c.merge.slots = {}; }},
       {"counts alone", "counts go with slots", [](Call& c) { c.merge.slots = {}; }},
       {"selected i64", "merge_topk: selected", [](Call& c) { c.merge.selected.dtype = DType::i64; }},
       {"outputs of different width", "merge_topk: slots", [](Call& c) { c.merge.slots.shape[1] = 4; }},
       {"counts of other rows", "merge_topk: counts", [](Call& c) { c.merge.counts.shape[0] = 3; }},
       {"no block table", "merge_topk: map.block_table", [](Call& c) { c.merge.map.block_table = {}; }},
       {"interleave 0", "interleave >= 1", [](Call& c) { c.merge.map.shard = {0, 2, 0}; }},
       {"too many candidates", "must fit 32 bits",
        [](Call& c) { c.merge.scores.shape[2] = c.merge.positions.shape[2] = std::int64_t{1} << 31; }},
       {"workspace too small", "workspace must be large enough", [](Call& c) { c.workspace_short = 1; }}},
      [](const Backend& backend, Call& call) {
        const PoisonedWorkspace workspace(merge_topk_workspace_bytes(backend, {2, 4, 3, 5}));
        Workspace given = workspace;
        given.bytes -= call.workspace_short;
        merge_topk(backend, call.merge, given);
      });
}

TEST(BadArgument, ShardSlots) {
  expect_refused({{"positions i64", "shard_slots: positions", [](Call& c) { c.shard.positions.dtype = DType::i64; }},
                  {"slots of another shape", "shard_slots: slots", [](Call& c) { c.shard.slots.shape[1] = 2; }},
                  {"counts i64", "shard_slots: counts", [](Call& c) { c.shard.counts.dtype = DType::i64; }},
                  {"page size 0", "shard_slots: map.page_size", [](Call& c) { c.shard.map.page_size = 0; }}},
                 [](const Backend& backend, Call& call) { shard_slots(backend, call.shard); });
}

TEST(BadArgument, MergeTopkWorkspaceBytes) {
  for (const Backend& backend : host_backends()) {
    EXPECT_THROW(merge_topk_workspace_bytes(backend, {-1, 4, 3, 5}), InvalidArgument);
    EXPECT_THROW(merge_topk_workspace_bytes(backend, {1 << 20, 4, 1 << 12, 5}), InvalidArgument);
    EXPECT_EQ(merge_topk_workspace_bytes(backend, {2, 0, 3, 5}), 0);
    EXPECT_EQ(merge_topk_workspace_bytes(backend, {2, 4, 3, 0}), 0);
  }
}

}  // namespace
}  // namespace sievemla::test
