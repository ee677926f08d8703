// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/quantise.h -- one scaled group of e4m3 values. value = e4m3 * scale.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/number.h"
#include "kv/e4m3.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

// The scale for a group whose largest magnitude is `amax` (> 0, finite).
constexpr float group_scale(float amax, ScaleRule rule) {
  // The least normal f32 at least: a subnormal would flush to 0 elsewhere.
  float scale = std::max(amax / kE4m3Max, std::numeric_limits<float>::min());
  if (rule == ScaleRule::power_of_two) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(scale);
    scale = std::bit_cast<float>((u + 0x7FFFFFu) & 0x7F800000u);  // up to the next power of two, itself if it is one
  }
  return scale;
}

// The scale for a group whose largest magnitude has these bits: raised to `floor`; 1 for a group of zeros with floor 0,
// or the least normal f32 by an engine's rule; NaN where the group holds a NaN or an infinity.
constexpr float scale_of(std::uint32_t largest, ScaleRule rule, float floor) {
  if (largest >= 0x7F800000u) return std::numeric_limits<float>::quiet_NaN();
  const float amax = std::max(std::bit_cast<float>(largest), floor);
  return amax > 0.f || rule == ScaleRule::engine ? group_scale(amax, rule) : 1.f;
}

// x / scale, rounded to f32 by engines, and else exact: double has 53 bits of it, and a quotient of two f32 lies either
// on a tie of e4m3 or at least 2^-30 (relative) beside it. An f32 quotient is rounded onto such a tie in one value of a
// thousand. By a power of two both are the same.
constexpr std::uint8_t code_of(float x, float scale, ScaleRule rule) {
  if (rule == ScaleRule::arbitrary) return to_e4m3(static_cast<double>(x) / static_cast<double>(scale));
  return to_e4m3(x / scale);
}

// Quantises x[0, n), f32 or bf16, into codes and returns the scale. Where that is NaN, so that whatever reads the group
// is NaN, codes are 0.
template <class T>
float quantise_group(const T* x, int n, ScaleRule rule, float floor, std::uint8_t* codes) {
  std::uint32_t largest = 0;  // magnitudes compare as integers, with infinity and NaN above all numbers
  for (int i = 0; i < n; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(base::to_f32(x[i])) & 0x7FFFFFFFu);
  const float scale = scale_of(largest, rule, floor);
  if (std::isnan(scale)) {
    std::fill_n(codes, n, std::uint8_t{0});
    return scale;
  }
  for (int i = 0; i < n; ++i) codes[i] = code_of(base::to_f32(x[i]), scale, rule);
  return scale;
}

}  // namespace sievemla::kv
