// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/config.h -- config.json of glm_moe_dsa (GLM-5, 5.1, 5.2) and deepseek_v32, every key that the maths needs.
//
// Source: Hugging Face transformers, configuration classes of the two model types; defaults are theirs.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "sievemla/indexer.h"

namespace sievemla::model {

// Rotary embedding: inverse frequencies theta^(-2i/d), under yarn blended with their `factor`th part.
struct RopeConfig {
  double theta = 10000;
  bool yarn = false;
  // yarn only
  double factor = 1, beta_fast = 32, beta_slow = 1;
  double mscale = 0, mscale_all_dim = 0;  // 0: the key is absent
  double attention_factor = 0;            // 0: follows from the two above
  bool truncate = true;                   // the blend's ends are whole numbers
  std::int64_t original_max_position = 0;
};

struct Config {
  std::string model_type;  // glm_moe_dsa | deepseek_v32

  std::int64_t vocab, hidden, layers, heads;
  std::int64_t intermediate, moe_intermediate;  // widths of a dense MLP and of one expert
  std::int64_t experts, shared_experts, experts_per_token, expert_groups, topk_groups;
  std::int64_t q_lora, latent, nope, rope, v;  // latent = kv_lora_rank; the rest per head
  std::int64_t index_heads, index_dim, index_topk;
  std::int64_t max_position;

  double rms_norm_eps, routed_scaling_factor;
  bool norm_topk_prob, tie_word_embeddings;

  RopeConfig rope_config;
  RopeStyle index_rope = RopeStyle::unset;  // of the indexer; the attention rope is always interleaved
  std::vector<bool> full_indexer;  // [layers] false: shares the selection of the layer before. Layer 0 is full.
  std::vector<bool> moe;           // [layers] false: dense MLP
  std::vector<std::int64_t> eos_token_ids;  // empty: none is defined
};

// Both throw BadFile("<rule>: got <value> (config.json: <key>)"). `where` is the file's name in messages.
Config parse_config(std::string_view json, const std::string& where = "config.json");
Config load_config(const std::filesystem::path& file_or_directory);

}  // namespace sievemla::model
