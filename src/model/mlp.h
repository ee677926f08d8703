// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/mlp.h -- the second half of a layer: a dense MLP, or routed experts beside a shared one.
//
//   mlp(x)     = down (silu(gate x) * up x)
//   experts(x) = shared(x) + factor * sum_e w_e mlp_e(x)      w = sigmoid(router x) of the chosen experts
//
// Choosing: scores = sigmoid(router x) + bias. With groups, a group counts the sum of its best two and only the best
// topk_groups groups take part. The bias has no part in w.
#pragma once
#include <vector>

#include "model/config.h"
#include "model/weights.h"

namespace sievemla::model {

struct Choice {
  std::int64_t expert;
  double weight;  // routed_scaling_factor included
};
// Of one token, by its router logits; ascending by expert. Ties go to the lower expert and group.
std::vector<Choice> route(const Config& config, const std::vector<float>& bias, const float* logits);

// y += what the layer adds for x. x, y: [tokens, hidden] f32, not the same memory.
void add_mlp(const Backend& backend, const Config& config, const LayerWeights& layer, const TensorView& x,
             const TensorView& y);

}  // namespace sievemla::model
