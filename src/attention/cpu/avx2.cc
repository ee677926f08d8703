// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/avx2.cc -- f32 in vectors of eight, with FMA.
#include <immintrin.h>

#include "attention/cpu/tier.h"

namespace sievemla::stage::attention {
namespace {

#include "cpu/simd/avx2-inl.h"

struct Ops : Simd {
  using Operand = float;
  using Right = __m256;
  static constexpr Index kPair = 1, kVecs = 3, kBlock = 64, kRowPad = 8;
  static constexpr bool kTiles = false, kHasNarrow = false;
  static constexpr int rows(int vectors) { return vectors == 1 ? 8 : 4; }  // at most 12 sums in 16 registers

  static Vec right(const float* x) { return load(x); }
  static Vec left(const float* x) { return _mm256_broadcast_ss(x); }
  static Vec dot(Vec sum, Vec a, Vec b) { return _mm256_fmadd_ps(a, b, sum); }
  static void store_operands(float* to, const Vec* p, Vec*) { store(to, *p); }

  static Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec times_power(Vec x, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static Vec zero_below(Vec x, float limit, Vec y) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(limit), _CMP_LT_OQ), y);
  }
  static Vec zero_where_equal(Vec a, Vec b, Vec x) { return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ), x); }

  static void load_f32(const void* from, Index n, float* to) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  }
  static void load_bf16(const void* from, Index n, float* to) {
    const char* x = static_cast<const char*>(from);
    Index i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 2 * i));
      store(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
    }
    for (; i < n; ++i) {
      std::uint16_t half;
      __builtin_memcpy(&half, x + 2 * i, sizeof half);
      to[i] = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(half << 16)));
    }
  }
  // By way of f16, whose exponent is 8 larger: exact, subnormals too. n is a multiple of 16.
  static bool load_e4m3(const std::byte* from, Index n, float* to) {
    const __m256i magnitude = _mm256_set1_epi16(0x7F), sign = _mm256_set1_epi16(static_cast<short>(0x8000));
    const Vec rebias = set1(256.f);
    __m128i nan = _mm_setzero_si128();
    for (Index i = 0; i < n; i += 16) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      nan = _mm_or_si128(nan, _mm_cmpeq_epi8(_mm_and_si128(codes, _mm_set1_epi8(0x7F)), _mm_set1_epi8(0x7F)));
      const __m256i wide = _mm256_cvtepu8_epi16(codes);
      const __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(wide, magnitude), 7),
                                           _mm256_and_si256(_mm256_slli_epi16(wide, 8), sign));
      store(to + i, mul(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), rebias));
      store(to + i + 8, mul(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), rebias));
    }
    return _mm_movemask_epi8(nan) != 0;
  }
  static void begin() {}
  static void end() {}
};

#include "attention/cpu/attention-inl.h"

}  // namespace

const Tier kAvx2 = kTier;

}  // namespace sievemla::stage::attention
