// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/pipeline/launch_test.cc -- no stage allocates once it is called, in any form of a call.
//
// Counted is every plain operator new of this program, the library's included: neither malloc, nor what OpenMP takes
// for its threads, nor the aligned operator new that workspaces in tests come from.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "sievemla/sievemla.h"
#include "support/allocations.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

// Everything a layer with its own indexer reads and writes, made before the count starts.
struct Layer {
  static constexpr int kTokens = 3, kHeads = 4, kIndexHeads = 4, kPages = 4, kPage = 16, kTopk = 20;
  Random random{7};
  std::vector<float> latent = random.f32s(kTokens * 512), rope = random.f32s(kTokens * 64),
                     k = random.f32s(kTokens * 128), norm = random.f32s(128),
                     index_q = random.f32s(kTokens * kIndexHeads * 128),
                     index_weights = random.f32s(kTokens * kIndexHeads), cos_sin = random.f32s(64 * 64),
                     q = random.f32s(kTokens * kHeads * 576), out = std::vector<float>(kTokens * kHeads * 512),
                     lse = std::vector<float>(kTokens * kHeads),
                     out_weights = std::vector<float>(kTokens * kIndexHeads);
  std::vector<std::uint8_t> rows = std::vector<std::uint8_t>(kPages * kPage * 656),
                            keys = std::vector<std::uint8_t>(kPages * kPage * 132),
                            out_q = std::vector<std::uint8_t>(kTokens * kIndexHeads * 128);
  std::vector<std::int32_t> slots{30, 31, 0}, positions{30, 31, 32}, lengths{31, 32, 33}, table{3, 1, 0, 2},
      selected_positions = std::vector<std::int32_t>(kTokens * kTopk),
      selected_slots = std::vector<std::int32_t>(kTokens * kTopk), pools{1, 0, -1, 7, 2, 3},
      expanded = std::vector<std::int32_t>(kTokens * 11),
      sent_positions = std::vector<std::int32_t>(kTokens * kTopk, -1);
  std::vector<std::int64_t> wide_slots = std::vector<std::int64_t>(kTokens * kTopk), wide_new{30, 31, 0};
  std::vector<float> key_scales = std::vector<float>(kTokens), side_by_side = random.f32s(40 * 128),
                     sent = std::vector<float>(kTokens * kTopk), parts = random.f32s(2 * kTokens * kHeads * 512),
                     part_lse = random.f32s(2 * kTokens * kHeads);
  std::vector<std::uint8_t> raw_keys = std::vector<std::uint8_t>(kTokens * 128);

  SparseLayerArgs args() {
    const KvCache cache{KvFormat::fp8_ds_mla, 512, 64, tensor(rows.data(), {kPages, kPage, 656})};
    const IndexCache index{IndexFormat::fp8, tensor(keys.data(), {kPages, kPage, 132})};
    const Rope turn{RopeStyle::interleaved, tensor(positions.data(), {kTokens}), tensor(cos_sin.data(), {64, 64})};
    const TensorView block_table = tensor(table.data(), {1, kPages});
    SparseLayerArgs layer;
    layer.latent = {.latent = tensor(latent.data(), {kTokens, 512}),
                    .rope = tensor(rope.data(), {kTokens, 64}),
                    .slots = tensor(slots.data(), {kTokens}),
                    .cache = cache};
    SparseLayerArgs::Indexer& indexer = layer.indexer.emplace();
    indexer.keys = {.k = tensor(k.data(), {kTokens, 128}),
                    .norm_weight = tensor(norm.data(), {128}),
                    .norm_bias = tensor(norm.data(), {128}),
                    .rope = turn,
                    .slots = tensor(slots.data(), {kTokens}),
                    .cache = index};
    indexer.queries = {.q = tensor(index_q.data(), {kTokens, kIndexHeads, 128}),
                       .weights = tensor(index_weights.data(), {kTokens, kIndexHeads}),
                       .weight_scale = 0.1f,
                       .rope = turn,
                       .out_q = tensor(out_q.data(), {kTokens, kIndexHeads, 128}),
                       .out_weights = tensor(out_weights.data(), {kTokens, kIndexHeads})};
    SelectArgs& select = indexer.select;
    select.score.q = indexer.queries.out_q;
    select.score.weights = indexer.queries.out_weights;
    select.score.paged = {.cache = index, .block_table = block_table, .row_request = {}};
    select.score.lengths = tensor(lengths.data(), {kTokens});
    select.width = 33;
    select.positions = tensor(selected_positions.data(), {kTokens, kTopk});
    select.slots = tensor(selected_slots.data(), {kTokens, kTopk});
    select.map = {.block_table = block_table, .row_request = {}, .page_size = kPage};
    layer.attention.q = tensor(q.data(), {kTokens, kHeads, 576});
    layer.attention.kv = cache;
    layer.attention.rows = Slots{select.slots, {}};
    layer.attention.scale = 0.06f;
    layer.attention.out = tensor(out.data(), {kTokens, kHeads, 512});
    layer.attention.lse = tensor(lse.data(), {kTokens, kHeads});
    return layer;
  }
};

// One form of a call on a layer's memory. Changing the arguments takes no memory either.
struct Form {
  const char* name;
  void (*run)(const Backend&, Layer&, const SparseLayerArgs&, Workspace);
};
constexpr Form kForms[] = {
    {"SparseLayer", [](const Backend& backend, Layer&, const SparseLayerArgs& args,
                       Workspace workspace) { sparse_layer(backend, args, workspace); }},
    {"SparseLayerI64Slots",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& given, Workspace workspace) {
       SparseLayerArgs args = given;
       args.latent.slots = args.indexer->keys.slots = tensor(layer.wide_new.data(), {Layer::kTokens});
       args.indexer->select.slots = tensor(layer.wide_slots.data(), {Layer::kTokens, Layer::kTopk});
       args.attention.rows = Slots{args.indexer->select.slots, {}};
       sparse_layer(backend, args, workspace);
     }},
    {"SparseLayerSharedSelection",
     [](const Backend& backend, Layer&, const SparseLayerArgs& given, Workspace workspace) {
       SparseLayerArgs args = given;
       args.indexer.reset();
       sparse_layer(backend, args, workspace);
     }},
    {"SelectInChunks",  // a budget of one byte: every row is a chunk
     [](const Backend& backend, Layer&, const SparseLayerArgs& args, Workspace workspace) {
       SelectArgs select_args = args.indexer->select;
       select_args.score_budget_bytes = 1;
       select(backend, select_args, workspace);
     }},
    {"SelectFromContiguousKeys",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace workspace) {
       SelectArgs select_args = args.indexer->select;
       select_args.score.q = tensor(layer.index_q.data(), {Layer::kTokens, Layer::kIndexHeads, 128});
       select_args.score.paged = {};
       select_args.score.contiguous = {
           .keys = tensor(layer.side_by_side.data(), {40, 128}), .scales = {}, .starts = {}};
       select(backend, select_args, workspace);
     }},
    {"AttentionOfABlockTable",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace workspace) {
       AttentionArgs attention_args = args.attention;
       attention_args.rows =
           BlockTable{tensor(layer.table.data(), {1, Layer::kPages}), tensor(layer.lengths.data() + 2, {1})};
       attention(backend, attention_args, workspace);
     }},
    {"WriteLatent", [](const Backend& backend, Layer&, const SparseLayerArgs& args,
                       Workspace) { write_latent(backend, args.latent); }},
    {"WriteIndexKeys", [](const Backend& backend, Layer&, const SparseLayerArgs& args,
                          Workspace) { write_index_keys(backend, args.indexer->keys); }},
    {"IndexQueries", [](const Backend& backend, Layer&, const SparseLayerArgs& args,
                        Workspace) { index_queries(backend, args.indexer->queries); }},
    {"GatherLatent",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace) {
       gather_latent(backend, {.cache = args.latent.cache,
                               .slots = args.latent.slots,
                               .out = tensor(layer.q.data(), {Layer::kTokens, 576})});
     }},
    {"GatherIndexKeys",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace) {
       gather_index_keys(backend, {.cache = args.indexer->keys.cache,
                                   .slots = args.latent.slots,
                                   .keys = tensor(layer.raw_keys.data(), {Layer::kTokens, 128}),
                                   .scales = tensor(layer.key_scales.data(), {Layer::kTokens})});
     }},
    {"PositionsToSlots",
     [](const Backend& backend, Layer&, const SparseLayerArgs& args, Workspace) {
       const SelectArgs& select_args = args.indexer->select;
       positions_to_slots(backend, select_args.positions, select_args.map, select_args.slots);
     }},
    {"ExpandPools",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace) {
       expand_pools(backend, {.pools = tensor(layer.pools.data(), {Layer::kTokens, 2}),
                              .lengths = args.indexer->select.score.lengths,
                              .kpool = 4,
                              .positions = tensor(layer.expanded.data(), {Layer::kTokens, 11})});
     }},
    {"SelectToSend",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace workspace) {
       SelectArgs select_args = args.indexer->select;
       select_args.selected_scores = tensor(layer.sent.data(), {Layer::kTokens, Layer::kTopk});
       select_args.shard = {1, 2, 1};
       select(backend, select_args, workspace);
     }},
    {"MergeTopk",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace workspace) {
       const SelectArgs& select_args = args.indexer->select;
       MergeTopkArgs merge;
       merge.scores = tensor(layer.sent.data(), {1, Layer::kTokens, Layer::kTopk});
       merge.positions = tensor(layer.sent_positions.data(), {1, Layer::kTokens, Layer::kTopk});
       merge.selected = select_args.positions, merge.slots = select_args.slots, merge.map = select_args.map;
       merge_topk(backend, merge, workspace);
     }},
    {"ShardSlots",
     [](const Backend& backend, Layer&, const SparseLayerArgs& args, Workspace) {
       const SelectArgs& select_args = args.indexer->select;
       shard_slots(backend, {select_args.positions, select_args.map, select_args.slots, {}});
     }},
    {"Combine",
     [](const Backend& backend, Layer& layer, const SparseLayerArgs& args, Workspace) {
       CombineArgs merge;
       merge.partial_out = tensor(layer.parts.data(), {2, Layer::kTokens, Layer::kHeads, 512});
       merge.partial_lse = tensor(layer.part_lse.data(), {2, Layer::kTokens, Layer::kHeads});
       merge.out = args.attention.out;
       combine(backend, merge);
     }},
};

class Launch : public testing::TestWithParam<const char*> {};

TEST_P(Launch, NeverAllocates) {
  const Backend backend = Backend::by_name(GetParam());
  Layer layer;
  const SparseLayerArgs args = layer.args();
  // The dense form attends to 33 rows.
  const SparseLayerBounds bounds{.select = {Layer::kTokens, Layer::kIndexHeads, 33, Layer::kTopk},
                                 .attention = {Layer::kTokens, Layer::kHeads, 33, 512, 64}};
  const std::int64_t bytes =
      std::max(sparse_layer_workspace_bytes(backend, bounds),
               merge_topk_workspace_bytes(backend, {1, Layer::kTokens, Layer::kTopk, Layer::kTopk}));
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes + kWorkspaceAlign));
  void* start = memory.data();
  std::size_t space = memory.size();
  const Workspace workspace{std::align(kWorkspaceAlign, static_cast<std::size_t>(bytes), start, space), bytes};

  for (const Form& form : kForms) {
    const long before = allocations();
    form.run(backend, layer, args, workspace);
    const long made = allocations() - before;
    EXPECT_EQ(made, 0) << form.name;
  }

  const long before = allocations();
  const float* one = new float(1);  // the counter counts
  EXPECT_EQ(allocations() - before, 1);
  delete one;
}

INSTANTIATE_TEST_SUITE_P(Backends, Launch, testing::Values("reference", "cpu"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace sievemla::test
