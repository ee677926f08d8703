// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/pipeline/sparse_layer_test.cc -- one layer is its stages in order; it reads only what it must, and writes
// nothing on a bad call.
#include <gtest/gtest.h>

#include "pipeline/layer_problem.h"
#include "sievemla/error.h"

namespace sievemla::test {
namespace {

// The stages called one by one, each with a workspace of its own and all scores at once.
LayerProblem::Result by_hand(const LayerProblem& p, const Backend& backend) {
  LayerCall call(p);
  const SparseLayerArgs& a = call.args;
  const std::int64_t n = p.s.tokens();
  write_latent(backend, a.latent);
  write_index_keys(backend, a.indexer->keys);
  index_queries(backend, a.indexer->queries);
  std::vector<float> logits(static_cast<std::size_t>(n * p.s.context), kNan);
  IndexScoreArgs score = a.indexer->select.score;
  score.logits = tensor(logits.data(), {n, p.s.context});
  index_scores(backend, score,
               PoisonedWorkspace(index_scores_workspace_bytes(backend, {n, p.s.index_heads, p.s.context})));
  TopkArgs select;
  select.scores = score.logits;
  select.lengths = score.lengths;
  select.slots = a.indexer->select.slots;
  select.map = a.indexer->select.map;
  topk(backend, select, PoisonedWorkspace(topk_workspace_bytes(backend, {n, p.s.context, p.s.topk})));
  attention(backend, a.attention, PoisonedWorkspace(attention_workspace_bytes(backend, {n, p.s.heads, p.s.topk})));
  return call.result();
}

struct Formats {
  KvFormat kv;
  IndexFormat index;
};
constexpr Formats kFormats[] = {
    {KvFormat::f32, IndexFormat::f32}, {KvFormat::bf16, IndexFormat::bf16}, {KvFormat::fp8_ds_mla, IndexFormat::fp8}};

TEST(SparseLayer, IsTheStagesInOrder) {
  for (const Formats& formats : kFormats)
    for (std::int64_t page : {16, 48, 64, 176}) {
      LayerShape shape{.page_size = page};
      shape.kv_format = formats.kv;
      shape.index_format = formats.index;
      const LayerProblem problem(shape);
      for (const Backend& backend : host_backends()) {
        const LayerProblem::Result want = by_hand(problem, backend);
        for (float x : want.out) ASSERT_TRUE(std::isfinite(x));
        for (std::int64_t budget : {std::int64_t{0}, 4 * shape.context * 4, kScoreBudgetBytes}) {
          LayerCall call(problem);
          call.args.indexer->select.score_budget_bytes = budget;
          call.run(backend);
          EXPECT_TRUE(call.result() == want) << backend.name() << ", page " << page << ", budget " << budget;
        }
      }
    }
}

TEST(SparseLayer, SharedLayersReuseTheSlots) {
  const LayerProblem full({}), shared({}, 2);  // the same tables, other contents
  for (const Backend& backend : host_backends()) {
    LayerCall first(full), second(shared);
    second.args.latent.slots = first.args.latent.slots;
    first.run(backend);
    second.args.indexer.reset();
    std::get<Slots>(second.args.attention.rows).indices = first.args.indexer->select.slots;
    second.kv = full.kv;
    const AttentionBounds bounds{full.s.tokens(), full.s.heads, full.s.topk};
    sparse_layer(backend, second.args, PoisonedWorkspace(sparse_layer_workspace_bytes(backend, {{}, bounds})));
    EXPECT_EQ(second.index, shared.index) << "a shared layer has no keys to write";

    LayerCall hand(shared);
    hand.kv = full.kv;
    hand.args.latent.slots = first.args.latent.slots;
    write_latent(backend, hand.args.latent);
    AttentionArgs args = hand.args.attention;
    args.rows = Slots{first.args.indexer->select.slots, {}};
    attention(backend, args, PoisonedWorkspace(attention_workspace_bytes(backend, bounds)));
    EXPECT_EQ(second.kv, hand.kv);
    EXPECT_TRUE(LayerProblem::Result::same(second.out, hand.out) && LayerProblem::Result::same(second.lse, hand.lse));
  }
}

// Rows that were not selected, keys that are not visible and pages of nobody are NaN, and change no bit.
TEST(SparseLayer, ReadsNoRowThatWasNotSelected) {
  for (const Formats& formats : kFormats) {
    LayerShape shape;
    shape.kv_format = formats.kv;
    shape.index_format = formats.index;
    LayerProblem problem(shape);
    for (const Backend& backend : host_backends()) {
      LayerCall clean(problem);
      clean.run(backend);
      LayerProblem poisoned = problem;
      const std::size_t row_bytes = poisoned.kv.size() / static_cast<std::size_t>(shape.pages() * shape.page_size);
      std::size_t kept = 0;
      for (std::int32_t slot = 0; slot < shape.pages() * shape.page_size; ++slot) {
        if (std::find(clean.slots.begin(), clean.slots.end(), slot) != clean.slots.end()) ++kept;
        else std::memset(poisoned.kv.data() + static_cast<std::size_t>(slot) * row_bytes, 0xFF, row_bytes);
      }
      ASSERT_LT(kept, problem.old_tokens.size());  // else nothing was poisoned
      LayerCall again(poisoned);
      again.run(backend);
      EXPECT_EQ(again.slots, clean.slots);
      EXPECT_TRUE(LayerProblem::Result::same(again.out, clean.out)) << backend.name();
      EXPECT_TRUE(LayerProblem::Result::same(again.lse, clean.lse)) << backend.name();
    }
  }
}

TEST(SparseLayer, WritesNothingOnABadCall) {
  struct Bad {
    const char* words;
    void (*break_it)(SparseLayerArgs&);
  };
  const Bad bads[] = {
      {"write_latent: rope", [](SparseLayerArgs& a) { a.latent.rope = {}; }},
      {"write_index_keys: k", [](SparseLayerArgs& a) { a.indexer->keys.k = {}; }},
      {"write_index_keys: norm_bias", [](SparseLayerArgs& a) { a.indexer->keys.norm_bias = {}; }},
      {"rope style", [](SparseLayerArgs& a) { a.indexer->queries.rope.style = RopeStyle::unset; }},
      {"index_scores: weights", [](SparseLayerArgs& a) { a.indexer->select.score.weights.shape[1] = 1; }},
      {"topk: map.page_size", [](SparseLayerArgs& a) { a.indexer->select.map.page_size = 0; }},
      {"same requests", [](SparseLayerArgs& a) { a.indexer->select.map.block_table.shape[0] = 1; }},
      {"logits must be absent", [](SparseLayerArgs& a) { a.indexer->select.score.logits = a.attention.lse; }},
      {"scale must be positive", [](SparseLayerArgs& a) { a.attention.scale = 0; }},
      {"attention: out", [](SparseLayerArgs& a) { a.attention.out.dtype = DType::i32; }},
  };
  const LayerProblem problem({});
  for (const Backend& backend : host_backends())
    for (const Bad& bad : bads) {
      LayerCall call(problem), untouched(problem);
      bad.break_it(call.args);
      try {
        call.run(backend);
        ADD_FAILURE() << bad.words << " was accepted";
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find(bad.words), std::string::npos) << error.what();
      }
      EXPECT_TRUE(call.result() == untouched.result()) << bad.words;
      EXPECT_EQ(call.out_q, untouched.out_q);
    }
  for (const Backend& backend : host_backends()) {
    LayerCall call(problem), untouched(problem);
    const PoisonedWorkspace workspace(call.workspace_bytes(backend));
    Workspace small = workspace;
    small.bytes = select_workspace_bytes(
                      backend, {problem.s.tokens(), problem.s.index_heads, problem.s.context, problem.s.topk}) -
                  1;
    EXPECT_THROW(sparse_layer(backend, call.args, small), InvalidArgument);
    EXPECT_TRUE(call.result() == untouched.result());
  }
}

}  // namespace
}  // namespace sievemla::test
