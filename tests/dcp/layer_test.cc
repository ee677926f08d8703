// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/dcp/layer_test.cc -- a layer on ranks that each hold part of both caches: scores, selection, exchange, merge,
// attention over their own slots, combine. It gives what a rank with everything gives.
#include <gtest/gtest.h>

#include <memory>

#include "pipeline/layer_problem.h"
#include "sievemla/combine.h"
#include "sievemla/context_parallel.h"
#include "support/near.h"

namespace sievemla::test {
namespace {

// What sharding adds to a rank's f32 attention: the rounding of each part's out (2^-24) and lse (|lse| <= 16: 2^-21
// absolute, so relative in its weight), another order of the sums of at most 24 rows (24 * 2^-24), and the final
// rounding. Below 2^-18 in all, of sum p |v| <= 0.25; the largest output compared is above 0.1: 1e-5 of it.
constexpr double kTolerance = 1e-5;

// A rank's caches. What holds none of its positions is NaN.
struct Rank {
  Rank(const LayerProblem& problem, const Shard& shard)
      : p(problem),
        table(random_table(p.s, 100 + static_cast<std::uint64_t>(shard.rank))),
        kv(p.kv.size(), std::byte{0xFF}),
        index(p.index.size(), std::byte{0xFF}),
        map{tensor(table.data(), {p.s.requests, p.s.pages_per_request()}), {}, p.s.page_size, shard} {
    std::vector<LayerProblem::Token> tokens = p.old_tokens;
    tokens.insert(tokens.end(), p.new_tokens.begin(), p.new_tokens.end());
    LayerProblem::Tokens all(p, tokens);
    Ids request;
    for (const auto& token : tokens) request.push_back(static_cast<std::int32_t>(token.request));
    SlotMap of_tokens = map;
    of_tokens.row_request = tensor(request.data(), {all.size()});
    // A token of another rank gets slot -1, which the writers skip.
    positions_to_slots(Backend::reference(), tensor(all.positions.data(), {all.size(), 1}), of_tokens,
                       tensor(all.slots.data(), {all.size(), 1}));
    write_latent(Backend::reference(), all.write_latent_args(p, kv));
    write_index_keys(Backend::reference(), all.write_index_keys_args(p, index));
    for (const std::int32_t length : p.lengths) {
      lengths.push_back(0);
      for (std::int32_t i = 0; i < length; ++i) lengths.back() += i / shard.interleave % shard.ranks == shard.rank;
    }
  }
  Rank(const Rank&) = delete;

  const LayerProblem& p;
  Ids table;
  Bytes kv, index;
  SlotMap map;
  Ids lengths;  // of its own
};

void expect_unsharded(const Backend& backend, const LayerProblem& problem, int ranks, int interleave) {
  SCOPED_TRACE(testing::Message() << backend.name() << ", " << ranks << " ranks by " << interleave);
  const LayerShape& s = problem.s;
  const std::int64_t rows = s.tokens(), k = s.topk, heads = s.heads;
  LayerCall whole(problem);
  Ids want(static_cast<std::size_t>(rows * k), kUnwritten);
  whole.args.indexer->select.positions = tensor(want.data(), {rows, k});
  whole.run(backend);

  std::vector<float> scores(static_cast<std::size_t>(ranks * rows * k), kNan);
  Ids positions(scores.size(), kUnwritten);
  std::vector<std::unique_ptr<Rank>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const Shard shard{rank, ranks, interleave};
    const Rank& mine = *all.emplace_back(std::make_unique<Rank>(problem, shard));
    SelectArgs args = whole.args.indexer->select;
    args.score.paged = {problem.index_cache(all.back()->index), mine.map.block_table, {}};
    args.score.lengths = tensor(mine.lengths.data(), {rows});
    args.slots = {};
    args.positions = tensor(positions.data() + rank * rows * k, {rows, k});
    args.selected_scores = tensor(scores.data() + rank * rows * k, {rows, k});
    args.shard = shard;
    args.score_budget_bytes = rank % 2 ? 1 : kScoreBudgetBytes;
    select(backend, args,
           PoisonedWorkspace(
               select_workspace_bytes(backend, {rows, s.index_heads, args.width, k, args.score_budget_bytes})));
  }

  std::vector<float> part_out(static_cast<std::size_t>(ranks * rows * heads * 512), kNan);
  std::vector<float> part_lse(static_cast<std::size_t>(ranks * rows * heads), kNan);
  for (int rank = 0; rank < ranks; ++rank) {
    Ids selected(want.size(), kUnwritten), slots(want.size(), kUnwritten), counts(static_cast<std::size_t>(rows), -1);
    MergeTopkArgs merge;
    merge.scores = tensor(scores.data(), {ranks, rows, k}),
    merge.positions = tensor(positions.data(), {ranks, rows, k});
    merge.selected = tensor(selected.data(), {rows, k}), merge.slots = tensor(slots.data(), {rows, k});
    merge.counts = tensor(counts.data(), {rows}), merge.map = all[static_cast<std::size_t>(rank)]->map;
    merge_topk(backend, merge, PoisonedWorkspace(merge_topk_workspace_bytes(backend, {ranks, rows, k, k})));
    ASSERT_EQ(selected, want) << "rank " << rank;

    AttentionArgs args = whole.args.attention;
    args.kv = problem.kv_cache(all[static_cast<std::size_t>(rank)]->kv);
    args.rows = Slots{merge.slots, merge.counts};
    args.out = tensor(part_out.data() + rank * rows * heads * 512, {rows, heads, 512});
    args.lse = tensor(part_lse.data() + rank * rows * heads, {rows, heads});
    attention(backend, args, PoisonedWorkspace(attention_workspace_bytes(backend, {rows, heads, k})));
  }
  for (std::size_t i = 0; i < part_lse.size(); ++i)  // an empty part's rows are never read
    if (part_lse[i] == -kInf) std::fill_n(part_out.begin() + static_cast<std::int64_t>(i) * 512, 512, kNan);
  std::vector<float> out(whole.out.size(), kNan), lse(whole.lse.size(), kNan);
  combine(backend, {tensor(part_out.data(), {ranks, rows, heads, 512}),
                    tensor(part_lse.data(), {ranks, rows, heads}),
                    {},
                    tensor(out.data(), {rows, heads, 512}),
                    tensor(lse.data(), {rows, heads})});
  EXPECT_LE(relative_error(out, whole.out), kTolerance);
  EXPECT_LE(relative_error(lse, whole.lse), kTolerance);
}

TEST(DcpLayer, EqualsARankWithEverything) {
  for (std::int64_t page : {16, 64}) {
    const LayerProblem problem({.page_size = page});
    for (const Backend& backend : host_backends())
      for (int ranks : {2, 4, 8})
        for (std::int64_t interleave : {std::int64_t{1}, page})
          expect_unsharded(backend, problem, ranks, static_cast<int>(interleave));
  }
}

// Requests of 5 and fewer positions on eight ranks: most hold nothing of them.
TEST(DcpLayer, RequestsShorterThanTheRanks) {
  const LayerProblem problem({.requests = 1, .per = 5, .context = 5, .topk = 3});
  for (const Backend& backend : host_backends())
    for (int interleave : {1, 16}) expect_unsharded(backend, problem, 8, interleave);
}

// Keys that are all alike: every score of a row is tied.
TEST(DcpLayer, TiesGoToTheLowestPosition) {
  LayerProblem problem({.context = 90});
  std::fill(problem.norm_weight.begin(), problem.norm_weight.end(), 0.f);
  problem.cos_sin.assign(problem.cos_sin.size(), 0.f);
  for (std::size_t i = 0; i < problem.cos_sin.size(); ++i) problem.cos_sin[i] = i % 64 < 32 ? 1.f : 0.f;
  LayerProblem::Tokens history(problem, problem.old_tokens);
  write_index_keys(Backend::reference(), history.write_index_keys_args(problem, problem.index));
  for (const Backend& backend : host_backends())
    for (int interleave : {1, 16}) expect_unsharded(backend, problem, 4, interleave);
}

}  // namespace
}  // namespace sievemla::test
