// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/portable.cc -- vectors of four f32, in the compiler's own terms: SSE2 on x86-64, NEON on Arm.
#include "attention/cpu/tier.h"

namespace sievemla::stage::attention {
namespace {

#include "cpu/simd/portable-inl.h"

struct Ops : Simd {
  using Operand = float;
  using Int = std::int32_t __attribute__((vector_size(16)));
  using Right = Vec;
  static constexpr Index kPair = 1, kVecs = 2, kBlock = 64, kRowPad = 8;
  static constexpr bool kTiles = false, kHasNarrow = false;
  static constexpr int rows(int) { return 4; }

  static Vec right(const float* x) { return load(x); }
  static Vec left(const float* x) { return set1(*x); }
  static Vec dot(Vec sum, Vec a, Vec b) { return sum + a * b; }
  static void store_operands(float* to, const Vec* p, Vec*) { store(to, *p); }

  static constexpr float kRounder = 0x1.8p23f;  // its ulp is 1
  static Vec round(Vec x) { return (x + kRounder) - kRounder; }
  // x * 2^n, n whole: the low bits of n + kRounder are n.
  static Vec times_power(Vec x, Vec n) { return x * (Vec)((((Int)(n + kRounder) & 0x1FF) + 127) << 23); }
  static Vec zero_below(Vec x, float limit, Vec y) { return x < limit ? Vec{} : y; }
  static Vec zero_where_equal(Vec a, Vec b, Vec x) { return a == b ? Vec{} : x; }

  static void load_f32(const void* from, Index n, float* to) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  }
  static void load_bf16(const void* from, Index n, float* to) {
    for (Index i = 0; i < n; ++i) {
      std::uint16_t half;
      __builtin_memcpy(&half, static_cast<const char*>(from) + 2 * i, sizeof half);
      const std::uint32_t bits = std::uint32_t{half} << 16;
      __builtin_memcpy(to + i, &bits, sizeof bits);
    }
  }
  // Exponent and mantissa fall into place, 120 added to the exponent. Of a subnormal that is 2^-7 + m 2^-10, where
  // 2^-9 m is meant; from 2^-6 on the other is the larger. Compilers vectorise the loop.
  static bool load_e4m3(const std::byte* from, Index n, float* to) {
    std::uint32_t nan = 0;
    for (Index i = 0; i < n; ++i) {
      const std::uint32_t code = static_cast<std::uint8_t>(from[i]), magnitude = code & 0x7F;
      float normal;
      std::uint32_t bits = (magnitude << 20) + (120u << 23);
      __builtin_memcpy(&normal, &bits, sizeof normal);
      const float other = normal + normal - 0x1p-6f, value = other < normal ? other : normal;
      __builtin_memcpy(&bits, &value, sizeof bits);
      bits |= (code & 0x80) << 24;
      __builtin_memcpy(to + i, &bits, sizeof bits);
      nan |= magnitude + 1;  // 0x80
    }
    return (nan & 0x80) != 0;
  }
  static void begin() {}
  static void end() {}
};

#include "attention/cpu/attention-inl.h"

}  // namespace

const Tier kPortable = kTier;

}  // namespace sievemla::stage::attention
