// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/rope.h -- rotary embedding of a model: the table of cosines and sines, and the softmax scale that yarn changes.
#pragma once
#include <vector>

#include "model/config.h"

namespace sievemla::model {

// [positions, rope]: rope / 2 cosines, then rope / 2 sines; yarn's attention factor included. Source: Hugging Face
// transformers, modeling_rope_utils ("default" and "yarn").
std::vector<float> cos_sin_table(const Config& config, std::int64_t positions);

// (nope + rope)^-0.5, under yarn with mscale_all_dim times (0.1 * mscale_all_dim * ln(factor) + 1)^2.
double softmax_scale(const Config& config);

// Turns x[0, width) in place; `row` is one row of the table. style: interleaved or half_split.
void rotate(float* x, const float* row, std::int64_t width, RopeStyle style);

}  // namespace sievemla::model
