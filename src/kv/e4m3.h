// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/e4m3.h -- OCP e4m3fn in software.
//
//   sign 1 | exponent 4 (bias 7) | mantissa 3; exponent 0 is subnormal, m * 2^-9; no infinity; 0x7F and 0xFF are NaN;
//   the largest value is 448. Source: OCP 8-bit floating point specification, revision 1.0.
#pragma once
#include <array>
#include <bit>
#include <cstdint>

#include "base/number.h"

namespace sievemla::kv {

inline constexpr float kE4m3Max = 448.f;

constexpr float from_e4m3(std::uint8_t code) {
  const std::uint32_t sign = (code & 0x80u) << 24, exponent = (code >> 3) & 15u, mantissa = code & 7u;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return sign ? -magnitude : magnitude;
}

// Round to nearest even, saturating at +-448 (infinities too), -0 kept, NaN -> NaN with its sign.
constexpr std::uint8_t to_e4m3(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (u >> 24) & 0x80u;
  std::uint32_t magnitude = u & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint8_t>(sign | 0x7Fu);
  if (magnitude >= 0x43E00000u) return static_cast<std::uint8_t>(sign | 0x7Eu);  // >= 448
  if (magnitude < 0x3C800000u) {  // < 2^-6: subnormal codes are multiples of 2^-9. Adding 2^14 leaves an f32 ulp of
                                  // 2^-9, so the addition itself rounds to nearest even.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) & 0xFu));
  }
  magnitude += 0x7FFFFu + ((magnitude >> 20) & 1u);  // round at bit 20, the last kept mantissa bit
  magnitude = (magnitude >> 20) - (120u << 3);       // rebias 127 -> 7
  return static_cast<std::uint8_t>(sign | magnitude);
}

constexpr std::uint8_t to_e4m3(double x) { return to_e4m3(base::to_f32_odd(x)); }

// All 256 values.
inline constexpr std::array<float, 256> kE4m3Value = [] {
  std::array<float, 256> table{};
  for (unsigned code = 0; code < 256; ++code) table[code] = from_e4m3(static_cast<std::uint8_t>(code));
  return table;
}();

}  // namespace sievemla::kv
