// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/weights.h -- the tensors of a checkpoint by their Hugging Face names, each checked: present, right shape, f32,
// bf16 or f16, finite; and none beside them.
#pragma once
#include <optional>
#include <vector>

#include "model/config.h"
#include "model/safetensors.h"
#include "sievemla/backend.h"

namespace sievemla::model {

struct MlpWeights {
  TensorView gate, up;  // [inner, hidden]
  TensorView down;      // [hidden, inner]
};

struct IndexerWeights {
  TensorView wq_b;          // [index_heads * index_dim, q_lora]
  TensorView wk;            // [index_dim, hidden]
  TensorView weights_proj;  // [index_heads, hidden]
  std::vector<float> k_norm_weight, k_norm_bias;
};

struct ExpertsWeights {
  TensorView router;               // [experts, hidden]
  std::vector<float> router_bias;  // [experts]: takes part in choosing, not in weighting
  std::vector<MlpWeights> experts;
};

struct LayerWeights {
  std::vector<float> input_norm, post_norm;  // [hidden]
  TensorView q_a;                            // [q_lora, hidden]
  std::vector<float> q_a_norm;
  TensorView q_b;   // [heads * (nope + rope), q_lora]
  TensorView kv_a;  // [latent + rope, hidden]
  std::vector<float> kv_a_norm;
  TensorView kv_b;                        // [heads * (nope + v), latent], per head: nope rows, then v rows
  TensorView o;                           // [hidden, heads * v]
  std::optional<IndexerWeights> indexer;  // absent: shares the selection of the layer before
  std::optional<MlpWeights> mlp;          // the dense MLP, or the shared expert
  std::optional<ExpertsWeights> experts;
};

struct Weights {
  TensorView embed, lm_head;  // [vocab, hidden]; one and the same if tied
  std::vector<float> norm;
  std::vector<LayerWeights> layers;
};

// Views into the checkpoint, which must outlive them. BadFile as said above; Unsupported for FP8 weights.
Weights bind_weights(const Config& config, const Checkpoint& checkpoint, const Backend& backend);

}  // namespace sievemla::model
