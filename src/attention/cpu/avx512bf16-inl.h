// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/avx512bf16-inl.h -- operands in bf16 pairs, sums in f32: what the bf16 tiers share. Included inside
// a tier's unnamed namespace, after the other -inl.h of both rooms.
#pragma once

struct Avx512Bf16 : Avx512, SimdBf16 {
  static Right left_two(const Operand* x) {
    long long two;
    __builtin_memcpy(&two, x, sizeof two);
    return (__m512bh)_mm512_set1_epi64(two);
  }

  // Lane i: the weights of two rows, the first in the low half. `more`: by how much rounding made them larger.
  static void store_operands(Operand* to, const Vec* p, Vec* more) {
    const __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(p[0]));
    const __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(p[1])), 16);
    _mm512_storeu_si512(to, _mm512_or_si512(first, second));
    more[0] = sub(_mm512_castsi512_ps(_mm512_slli_epi32(first, 16)), p[0]);
    more[1] = sub(_mm512_castsi512_ps(second), p[1]);
  }
  // to[2 i] = a[i], to[2 i + 1] = b[i]; n is a multiple of 32.
  static void interleave(const Operand* a, const Operand* b, Index n, Operand* to) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (Index i = 0; i < n; i += 32) {
      const __m512i x = _mm512_loadu_si512(a + i), y = _mm512_loadu_si512(b + i);
      _mm512_storeu_si512(to + 2 * i, _mm512_permutex2var_epi16(x, low, y));
      _mm512_storeu_si512(to + 2 * i + 32, _mm512_permutex2var_epi16(x, high, y));
    }
  }

  static void load_f32(const void*, Index, Operand*) {}  // such calls go to a tier of f32
  static void load_bf16(const void* from, Index n, Operand* to) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(n) * sizeof(Operand));
  }
  // Exponent and mantissa fall into place, 120 added to the exponent. Subnormals, 0 to 7 times 2^-9, come from a table:
  // dpbf16 takes subnormal bf16 for 0. n is a multiple of 32.
  static bool load_e4m3(const std::byte* from, Index n, Operand* to) {
    const __m512i magnitude = _mm512_set1_epi16(0x7F), sign = _mm512_set1_epi16(static_cast<short>(0x8000));
    const __m512i subnormal = _mm512_set4_epi64(0, 0, 0x3C60'3C40'3C20'3C00, 0x3BC0'3B80'3B00'0000);
    __mmask32 nan = 0;
    for (Index i = 0; i < n; i += 32) {
      const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      const __m512i exact = _mm512_and_si512(wide, magnitude);
      nan |= _mm512_cmpeq_epi16_mask(exact, magnitude);
      const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(exact, 4), _mm512_set1_epi16(120 << 7));
      const __m512i value =
          _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(exact, _mm512_set1_epi16(8)), exact, subnormal);
      _mm512_storeu_si512(to + i, _mm512_or_si512(value, _mm512_and_si512(_mm512_slli_epi16(wide, 8), sign)));
    }
    return nan != 0;
  }
};
