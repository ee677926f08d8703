// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/rope.cc -- in double, rounded once.
#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/fault.h"

namespace sievemla::model {
namespace {

using base::Fault;

double magnitude(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

std::vector<double> inverse_frequencies(const RopeConfig& rope, std::int64_t width, bool yarn) {
  const double d = static_cast<double>(width);
  std::vector<double> frequency;
  for (std::int64_t i = 0; i < width / 2; ++i) frequency.push_back(std::pow(rope.theta, -2.0 * double(i) / d));
  if (!yarn) return frequency;

  // The pair that turns `turns` times over the original context.
  const auto pair_of = [&](double turns) {
    const double span = static_cast<double>(rope.original_max_position) / (turns * 2 * std::numbers::pi);
    return d * std::log(span) / (2 * std::log(rope.theta));
  };
  double low = pair_of(rope.beta_fast), high = pair_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, d - 1);
  if (low == high) high += 0.001;  // as transformers does
  for (std::size_t i = 0; i < frequency.size(); ++i) {
    const double slow = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequency[i] *= slow / rope.factor + (1 - slow);
  }
  return frequency;
}

}  // namespace

std::vector<float> cos_sin_table(const Config& config, std::int64_t positions) {
  const RopeConfig& rope = config.rope_config;
  const bool yarn = rope.yarn && !base::fault(Fault::no_yarn);
  const std::vector<double> frequency = inverse_frequencies(rope, config.rope, yarn);
  double factor = 1;
  if (yarn) {
    factor = rope.attention_factor > 0 ? rope.attention_factor
             : rope.mscale > 0 && rope.mscale_all_dim > 0
                 ? magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
                 : magnitude(rope.factor, 1);
  }
  std::vector<float> table(static_cast<std::size_t>(positions * config.rope));
  float* row = table.data();
  for (std::int64_t p = 0; p < positions; ++p, row += config.rope)
    for (std::size_t i = 0; i < frequency.size(); ++i) {
      const double angle = static_cast<double>(p) * frequency[i];
      row[i] = static_cast<float>(std::cos(angle) * factor);
      row[frequency.size() + i] = static_cast<float>(std::sin(angle) * factor);
    }
  return table;
}

double softmax_scale(const Config& config) {
  const RopeConfig& rope = config.rope_config;
  const double plain = 1 / std::sqrt(static_cast<double>(config.nope + config.rope));
  if (!rope.yarn || rope.mscale_all_dim == 0 || base::fault(Fault::no_yarn) || base::fault(Fault::no_mscale))
    return plain;
  const double m = magnitude(rope.factor, rope.mscale_all_dim);
  return plain * m * m;
}

void rotate(float* x, const float* row, std::int64_t width, RopeStyle style) {
  const std::int64_t half = width / 2;
  const std::int64_t step = style == RopeStyle::interleaved ? 2 : 1, apart = style == RopeStyle::interleaved ? 1 : half;
  for (std::int64_t i = 0; i < half; ++i) {
    float &a = x[i * step], &b = x[i * step + apart];
    const double re = a, im = b, cos = row[i], sin = row[half + i];
    a = static_cast<float>(re * cos - im * sin);
    b = static_cast<float>(im * cos + re * sin);
  }
}

}  // namespace sievemla::model
