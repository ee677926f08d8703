// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/weights.cc -- every name stands here once, with its shape.
#include "model/weights.h"

#include <charconv>
#include <set>

#include "base/view.h"
#include "cpu/threads.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

bool finite(const TensorView& view) {
  const std::int64_t n = view.elements();
  const auto none_with = [n](const auto* data, auto exponent) {
    bool good = true;
    for (std::int64_t i = 0; i < n; ++i) good &= (data[i] & exponent) != exponent;
    return good;
  };
  if (view.dtype == DType::f32) return none_with(static_cast<const std::uint32_t*>(view.data), 0x7F800000u);
  return none_with(static_cast<const std::uint16_t*>(view.data),
                   static_cast<std::uint16_t>(view.dtype == DType::bf16 ? 0x7F80 : 0x7C00));
}

class Binder {
 public:
  explicit Binder(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  TensorView matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    return take(name, {rows, columns});
  }
  std::vector<float> vector(const std::string& name, std::int64_t n) {
    const TensorView view = take(name, {n});
    std::vector<float> out;
    for (std::int64_t i = 0; i < n; ++i) out.push_back(base::load_f32(view, i));
    return out;
  }
  bool used(const std::string& name) const { return used_.count(name) > 0; }

  void check_finite(const Backend& backend) const {
    const std::vector<std::string> names(used_.begin(), used_.end());
    std::vector<char> good(names.size());
    cpu::parallel_for(backend, static_cast<std::int64_t>(names.size()), [&](std::int64_t i, int) {
      const std::size_t at = static_cast<std::size_t>(i);
      good[at] = finite(checkpoint_.find(names[at])->view);
    });
    for (std::size_t i = 0; i < names.size(); ++i)
      if (!good[i])
        throw BadFile(error_message("weights must be finite", checkpoint_.where(names[i]), "a NaN or an infinity"));
  }

 private:
  TensorView take(const std::string& name, std::initializer_list<std::int64_t> shape) {
    const StoredTensor* found = checkpoint_.find(name);
    if (!found) throw BadFile(error_message("the model needs this tensor", checkpoint_.where(name), "none"));
    const DType dtype = found->view.dtype;
    if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16)
      throw BadFile(error_message("weights are F32, BF16 or F16", checkpoint_.where(name), found->dtype));
    check_tensor(found->view, {}, shape, checkpoint_.where(name));
    used_.insert(name);
    return found->view;
  }

  const Checkpoint& checkpoint_;
  std::set<std::string> used_;
};

// Tensors that real checkpoints carry and the model does not use.
bool ignored(const std::string& name, const Config& c) {
  if (name.ends_with("rotary_emb.inv_freq") || (name == "lm_head.weight" && c.tie_word_embeddings)) return true;
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return false;
  std::int64_t layer = -1;
  const auto [end, error] = std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
  if (error != std::errc() || layer < 0 || *end != '.') return false;
  if (layer >= c.layers) return true;  // multi-token prediction
  return !c.full_indexer[static_cast<std::size_t>(layer)] && std::string_view(end).starts_with(".self_attn.indexer.");
}

}  // namespace

Weights bind_weights(const Config& c, const Checkpoint& checkpoint, const Backend& backend) {
  for (const std::string& name : checkpoint.names())
    if (name.ends_with("weight_scale_inv") && !ignored(name, c))
      throw Unsupported(
          error_message("FP8 weights are not supported by run", checkpoint.where(name), "weight_scale_inv"));
  Binder binder(checkpoint);
  const auto mlp = [&](const std::string& at, std::int64_t inner) {
    return MlpWeights{.gate = binder.matrix(at + "gate_proj.weight", inner, c.hidden),
                      .up = binder.matrix(at + "up_proj.weight", inner, c.hidden),
                      .down = binder.matrix(at + "down_proj.weight", c.hidden, inner)};
  };

  Weights w;
  w.embed = binder.matrix("model.embed_tokens.weight", c.vocab, c.hidden);
  w.lm_head = c.tie_word_embeddings ? w.embed : binder.matrix("lm_head.weight", c.vocab, c.hidden);
  w.norm = binder.vector("model.norm.weight", c.hidden);
  for (std::int64_t l = 0; l < c.layers; ++l) {
    const std::string at = "model.layers." + std::to_string(l) + ".", attn = at + "self_attn.";
    LayerWeights layer;
    layer.input_norm = binder.vector(at + "input_layernorm.weight", c.hidden);
    layer.post_norm = binder.vector(at + "post_attention_layernorm.weight", c.hidden);
    layer.q_a = binder.matrix(attn + "q_a_proj.weight", c.q_lora, c.hidden);
    layer.q_a_norm = binder.vector(attn + "q_a_layernorm.weight", c.q_lora);
    layer.q_b = binder.matrix(attn + "q_b_proj.weight", c.heads * (c.nope + c.rope), c.q_lora);
    layer.kv_a = binder.matrix(attn + "kv_a_proj_with_mqa.weight", c.latent + c.rope, c.hidden);
    layer.kv_a_norm = binder.vector(attn + "kv_a_layernorm.weight", c.latent);
    layer.kv_b = binder.matrix(attn + "kv_b_proj.weight", c.heads * (c.nope + c.v), c.latent);
    layer.o = binder.matrix(attn + "o_proj.weight", c.hidden, c.heads * c.v);
    if (c.full_indexer[static_cast<std::size_t>(l)]) {
      const std::string index = attn + "indexer.";
      layer.indexer =
          IndexerWeights{.wq_b = binder.matrix(index + "wq_b.weight", c.index_heads * c.index_dim, c.q_lora),
                         .wk = binder.matrix(index + "wk.weight", c.index_dim, c.hidden),
                         .weights_proj = binder.matrix(index + "weights_proj.weight", c.index_heads, c.hidden),
                         .k_norm_weight = binder.vector(index + "k_norm.weight", c.index_dim),
                         .k_norm_bias = binder.vector(index + "k_norm.bias", c.index_dim)};
    }
    if (!c.moe[static_cast<std::size_t>(l)]) {
      layer.mlp = mlp(at + "mlp.", c.intermediate);
    } else {
      ExpertsWeights experts{.router = binder.matrix(at + "mlp.gate.weight", c.experts, c.hidden),
                             .router_bias = binder.vector(at + "mlp.gate.e_score_correction_bias", c.experts),
                             .experts = {}};
      for (std::int64_t e = 0; e < c.experts; ++e)
        experts.experts.push_back(mlp(at + "mlp.experts." + std::to_string(e) + ".", c.moe_intermediate));
      layer.experts = std::move(experts);
      if (c.shared_experts > 0) layer.mlp = mlp(at + "mlp.shared_experts.", c.moe_intermediate * c.shared_experts);
    }
    w.layers.push_back(std::move(layer));
  }

  for (const std::string& name : checkpoint.names())
    if (!binder.used(name) && !ignored(name, c))
      throw BadFile(error_message("the model has no such tensor", checkpoint.where(name), "an extra tensor"));
  binder.check_finite(backend);
  return w;
}

}  // namespace sievemla::model
