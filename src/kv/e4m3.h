// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/e4m3.h -- OCP e4m3fn in software.
//
//   sign 1 | exponent 4 (bias 7) | mantissa 3; exponent 0 is subnormal, m * 2^-9; no infinity; 0x7F and 0xFF are NaN;
//   the largest value is 448. Source: OCP 8-bit floating point specification, revision 1.0.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace sievemla::kv {

inline constexpr float kE4m3Max = 448.f;

constexpr float from_e4m3(std::uint8_t code) {
  const std::uint32_t sign = (code & 0x80u) << 24, exponent = (code >> 3) & 15u, mantissa = code & 7u;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return sign ? -magnitude : magnitude;
}

// Round to nearest even, saturating at +-448 (infinities too), -0 kept, NaN -> NaN with its sign. From float or double:
// one rounding either way. Both candidates are computed and one is selected, so that a loop over values has no branches.
template <std::floating_point Real>
constexpr std::uint8_t to_e4m3(Real x) {
  using Bits = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;
  constexpr int kWidth = 8 * sizeof(Real), kMantissa = std::numeric_limits<Real>::digits - 1;
  constexpr int kDropped = kMantissa - 3;  // bits that e4m3 has no room for
  constexpr Bits kBias = std::numeric_limits<Real>::max_exponent - 1;
  constexpr auto bits_of = [](Real y) { return std::bit_cast<Bits>(y); };

  const Bits sign = (bits_of(x) >> (kWidth - 8)) & 0x80u;
  const Bits exact = bits_of(x) & ~(Bits{1} << (kWidth - 1));
  const Bits magnitude = std::min(exact, bits_of(Real{448}));
  const Bits half = (Bits{1} << (kDropped - 1)) - 1 + ((magnitude >> kDropped) & 1u);
  const Bits normal = ((magnitude + half) >> kDropped) - ((kBias - 7) << 3);
  // Below 2^-6 codes are multiples of 2^-9. That is the ulp of a Real at 2^(mantissa - 9), so adding this number rounds.
  constexpr Real kShift = static_cast<Real>(std::uint64_t{1} << (kMantissa - 9));
  const Bits subnormal = bits_of(std::bit_cast<Real>(magnitude) + kShift) & 0xFu;
  const Bits code = magnitude < bits_of(Real{0x1p-6f}) ? subnormal : normal;
  return static_cast<std::uint8_t>(sign | (exact > bits_of(std::numeric_limits<Real>::infinity()) ? 0x7Fu : code));
}

// All 256 values.
inline constexpr std::array<float, 256> kE4m3Value = [] {
  std::array<float, 256> table{};
  for (unsigned code = 0; code < 256; ++code) table[code] = from_e4m3(static_cast<std::uint8_t>(code));
  return table;
}();

}  // namespace sievemla::kv
