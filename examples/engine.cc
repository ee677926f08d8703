// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// examples/engine.cc -- one layer of GLM-5 in an engine: caches and workspace once, then a prefill and a decode step.
#include <sievemla/sievemla.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

namespace {

using namespace sievemla;

// --8<-- [start:integration]
// What an engine keeps of a layer, and the call that a step makes. Nothing in step() allocates or waits.
class SparseAttention {
 public:
  SparseAttention(Backend backend, const Geometry& model, KvCache cache, IndexCache keys, std::int64_t most_tokens,
                  std::int64_t most_context)
      : backend_(backend), model_(model), cache_(cache), keys_(keys) {
    backend_.prepare();  // loads every kernel: nothing is loaded or compiled later, in a graph capture say
    bounds_.select = {most_tokens, model.index_heads, most_context, model.index_topk};
    bounds_.attention = {most_tokens, model.heads, model.index_topk, model.latent, model.rope};
  }
  std::int64_t workspace_bytes() const { return sparse_layer_workspace_bytes(backend_, bounds_); }

  // `batch` has the step's projections; q is absorbed: [tokens, heads, latent + rope].
  struct Batch {
    TensorView latent, rope, slots;                         // of the new tokens, and where they go
    TensorView index_k, norm_weight, norm_bias;             // the indexer's key
    TensorView index_q, index_weights, out_q, out_weights;  // its queries, and room for them as the kernels read them
    TensorView positions, cos_sin, block_table, lengths;    // lengths[t]: keys that token t sees, itself included
    TensorView q, selected, out;                            // selected: [tokens, topk] i32, for layers that share it
  };
  void step(const Batch& b, std::int64_t context, Workspace workspace, Stream stream) const {
    const Rope rope{model_.index_rope, b.positions, b.cos_sin};
    SparseLayerArgs args;
    args.latent = {b.latent, b.rope, b.slots, cache_};
    SparseLayerArgs::Indexer& indexer = args.indexer.emplace();
    indexer.keys = {b.index_k, b.norm_weight, b.norm_bias, 1e-6f, rope, b.slots, keys_};
    const float factor = 1.f / std::sqrt(static_cast<float>(model_.index_heads * kIndexDim));
    indexer.queries = {b.index_q, b.index_weights, factor, rope, ScaleRule::power_of_two, b.out_q, b.out_weights};
    indexer.select.score = {b.out_q, b.out_weights, {keys_, b.block_table, {}}, {}, b.lengths, {}};
    indexer.select.width = context;
    indexer.select.slots = b.selected;
    indexer.select.map = {b.block_table, {}, cache_.page_size(), {}};
    args.attention.q = b.q;
    args.attention.kv = cache_;
    args.attention.rows = Slots{b.selected, {}};
    args.attention.scale = 1.f / std::sqrt(static_cast<float>(model_.nope + model_.rope));
    args.attention.out = b.out;
    sparse_layer(backend_, args, workspace, stream);
  }

 private:
  Backend backend_;
  const Geometry& model_;
  KvCache cache_;
  IndexCache keys_;
  SparseLayerBounds bounds_;
};
// --8<-- [end:integration]

// Stands in for the model's projections: any numbers.
std::vector<float> numbers(std::int64_t n) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i * i % 9973));
  return values;
}

void run() {
  constexpr std::int64_t kPages = 8, kPage = 16, kPrompt = 100;
  const Geometry& glm5 = geometry_by_name("glm-5");
  const std::int64_t width = glm5.latent + glm5.rope;
  std::vector<float> cache(static_cast<std::size_t>(kPages * kPage * width)), keys(kPages * kPage * kIndexDim);
  const SparseAttention layer(Backend::cpu(), glm5,
                              {KvFormat::f32, glm5.latent, glm5.rope, tensor(cache.data(), {kPages, kPage, width})},
                              {IndexFormat::f32, tensor(keys.data(), {kPages, kPage, kIndexDim})}, kPrompt, 128);
  struct alignas(kWorkspaceAlign) Block {
    std::byte bytes[kWorkspaceAlign];
  };
  std::vector<Block> scratch(static_cast<std::size_t>(layer.workspace_bytes() / kWorkspaceAlign + 1));
  const Workspace workspace{scratch.data(), layer.workspace_bytes()};

  const std::vector<std::int32_t> table = {5, 2, 7, 0, 3, 6, 1, 4};  // the request's pages, in order
  const std::vector<float> cos_sin(std::size_t{128} * kIndexRope, 0.70710678f);
  for (const auto& [first, tokens] : {std::pair<std::int64_t, std::int64_t>{0, kPrompt}, {kPrompt, 1}}) {
    std::vector<std::int32_t> slots, positions, lengths;
    for (std::int64_t p = first; p < first + tokens; ++p) {
      slots.push_back(table[static_cast<std::size_t>(p / kPage)] * static_cast<std::int32_t>(kPage) +
                      static_cast<std::int32_t>(p % kPage));
      positions.push_back(static_cast<std::int32_t>(p));
      lengths.push_back(static_cast<std::int32_t>(p + 1));
    }
    const std::int64_t n = tokens, ih = glm5.index_heads, topk = glm5.index_topk;
    const auto latent = numbers(n * glm5.latent), rope = numbers(n * glm5.rope), k = numbers(n * kIndexDim),
               norm = numbers(kIndexDim), index_q = numbers(n * ih * kIndexDim), weights = numbers(n * ih),
               q = numbers(n * glm5.heads * width);
    std::vector<float> out_q(index_q.size()), out_weights(weights.size());
    std::vector<float> out(static_cast<std::size_t>(n * glm5.heads * glm5.latent));
    std::vector<std::int32_t> selected(static_cast<std::size_t>(n * topk));
    SparseAttention::Batch b;
    b.latent = tensor(latent.data(), {n, glm5.latent}), b.rope = tensor(rope.data(), {n, glm5.rope});
    b.slots = tensor(slots.data(), {n});
    b.index_k = tensor(k.data(), {n, kIndexDim});
    b.norm_weight = b.norm_bias = tensor(norm.data(), {kIndexDim});
    b.index_q = tensor(index_q.data(), {n, ih, kIndexDim}), b.index_weights = tensor(weights.data(), {n, ih});
    b.out_q = tensor(out_q.data(), {n, ih, kIndexDim}), b.out_weights = tensor(out_weights.data(), {n, ih});
    b.positions = tensor(positions.data(), {n}), b.cos_sin = tensor(cos_sin.data(), {128, kIndexRope});
    b.block_table = tensor(table.data(), {1, kPages}), b.lengths = tensor(lengths.data(), {n});
    b.q = tensor(q.data(), {n, glm5.heads, width}), b.selected = tensor(selected.data(), {n, topk});
    b.out = tensor(out.data(), {n, glm5.heads, glm5.latent});
    layer.step(b, first + tokens, workspace, {});

    std::int64_t rows = 0;
    for (std::int64_t i = (n - 1) * topk; i < n * topk; ++i) rows += selected[static_cast<std::size_t>(i)] >= 0;
    std::printf("%lld tokens: the last one attends to %lld rows, out[0] = %.3g\n", static_cast<long long>(n),
                static_cast<long long>(rows),
                static_cast<double>(out[out.size() - static_cast<std::size_t>(glm5.heads * glm5.latent)]));
  }
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
