// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/avx512.cc -- f32 in vectors of sixteen.
#include <immintrin.h>

#include "attention/cpu/tier.h"

namespace sievemla::stage::attention {
namespace {

#include "cpu/simd/avx512-inl.h"

#include "attention/cpu/avx512-inl.h"

struct Ops : Avx512 {
  using Operand = float;
  using Right = __m512;
  static constexpr Index kPair = 1, kBlock = 64, kRowPad = 8;
  static constexpr bool kTiles = false, kHasNarrow = true;
  static constexpr int rows(int vectors) { return vectors <= 2 ? 8 : 4; }  // at most 16 sums in 32 registers

  static Vec right(const float* x) { return load(x); }
  static Vec left(const float* x) { return set1(*x); }
  static Vec left_two(const float* x) {
    double two;
    __builtin_memcpy(&two, x, sizeof two);
    return _mm512_castpd_ps(_mm512_set1_pd(two));
  }
  static Vec dot(Vec sum, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, sum); }
  static void store_operands(float* to, const Vec* p, Vec*) { store(to, *p); }

  static void load_f32(const void* from, Index n, float* to) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  }
  static void load_bf16(const void* from, Index n, float* to) {
    const char* x = static_cast<const char*>(from);
    for (Index i = 0; i < n; i += kLanes) {
      const __mmask16 mask = static_cast<__mmask16>(n - i >= kLanes ? 0xFFFF : (1 << (n - i)) - 1);
      const __m256i halves = _mm256_maskz_loadu_epi16(mask, x + 2 * i);
      _mm512_mask_storeu_epi32(to + i, mask, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
  }
  // By way of f16, whose exponent is 8 larger: exact, subnormals too. n is a multiple of 32.
  static bool load_e4m3(const std::byte* from, Index n, float* to) {
    const __m512i magnitude = _mm512_set1_epi16(0x7F), sign = _mm512_set1_epi16(static_cast<short>(0x8000));
    const Vec rebias = set1(256.f);
    __mmask32 nan = 0;
    for (Index i = 0; i < n; i += 32) {
      const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      const __m512i exact = _mm512_and_si512(wide, magnitude);
      nan |= _mm512_cmpeq_epi16_mask(exact, magnitude);
      const __m512i half =
          _mm512_or_si512(_mm512_slli_epi16(exact, 7), _mm512_and_si512(_mm512_slli_epi16(wide, 8), sign));
      store(to + i, mul(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), rebias));
      store(to + i + 16, mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), rebias));
    }
    return nan != 0;
  }
};

#include "attention/cpu/attention-inl.h"

}  // namespace

const Tier kAvx512 = kTier;

}  // namespace sievemla::stage::attention
