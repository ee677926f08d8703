// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/number.h -- bf16 and f16 to and from f32, in software, exact, usable at compile time. (e4m3: src/kv/e4m3.h)
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

#include "sievemla/tensor.h"

namespace sievemla::base {

constexpr float to_f32(float x) { return x; }
constexpr float to_f32(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

// Round to nearest even; overflow goes to infinity; a NaN stays a NaN (its payload may change).
constexpr bf16 to_bf16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}

// Rounds to odd: truncates, and sets the last bit if that lost anything. Rounding the result once more, to a shorter
// type, then gives what one rounding of x would give: it cannot fall on a tie which x did not lie on.
constexpr float to_f32_odd(double x) {
  const float nearest = static_cast<float>(x);
  std::uint32_t u = std::bit_cast<std::uint32_t>(nearest);
  const double excess = (x < 0 ? -1.0 : 1.0) * (static_cast<double>(nearest) - x);
  if (excess > 0) --u;
  if (excess > 0 || excess < 0) u |= 1u;
  return std::bit_cast<float>(u);
}
constexpr bf16 to_bf16(double x) { return to_bf16(to_f32_odd(x)); }

// x as a T, rounded once.
template <class T, class Real>
constexpr T round_to(Real x) {
  if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
  else return static_cast<T>(x);
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
