// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/number.h -- bf16 and f16 to and from f32, in software, exact, usable at compile time. (e4m3: src/kv/e4m3.h)
#pragma once
#include <bit>
#include <cstdint>

#include "sievemla/tensor.h"

namespace sievemla::base {

constexpr float to_f32(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

// Round to nearest even; overflow goes to infinity; a NaN stays a NaN (its payload may change).
constexpr bf16 to_bf16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}

// Rounds once. By way of f32 it would round twice: where f32 lands on the middle between two bf16, x says which side it
// came from.
constexpr bf16 to_bf16(double x) {
  const float near = static_cast<float>(x);
  const std::uint32_t u = std::bit_cast<std::uint32_t>(near);
  const double back = static_cast<double>(near);
  if ((u & 0xFFFFu) != 0x8000u || back == x || back != back) return to_bf16(near);
  const bool outward = (back < x) == (back > 0);  // x is farther from zero than the middle
  return to_bf16(std::bit_cast<float>(outward ? u + 1 : u - 1));
}

constexpr float to_f32(f16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000u} << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal, exact
  return sign ? -magnitude : magnitude;
}

}  // namespace sievemla::base
