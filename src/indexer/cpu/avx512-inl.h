// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/avx512-inl.h -- what the AVX-512 tiers share. Included inside a tier's unnamed namespace, after
// cpu/simd/avx512-inl.h.
#pragma once

// Words of 16 keys. A vector's quarter i is of key 4 i + j.
struct Avx512Words {
  static Simd::Words load_quads(const std::byte* const* keys, Index offset) {
    const auto quad = [&](Index i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys[4 * i] + offset)); };
    const __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(quad(0)), quad(1), 1);
    return (Simd::Words)_mm512_inserti32x4(_mm512_inserti32x4(x, quad(2), 2), quad(3), 3);
  }
  static Simd::Words low_words(Simd::Words a, Simd::Words b) {
    return (Simd::Words)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b);
  }
  static Simd::Words high_words(Simd::Words a, Simd::Words b) {
    return (Simd::Words)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
  }
  static Simd::Words low_pairs(Simd::Words a, Simd::Words b) {
    return (Simd::Words)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
  }
  static Simd::Words high_pairs(Simd::Words a, Simd::Words b) {
    return (Simd::Words)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
  }

  // Four e4m3 of a lane: bytes 0 and 2, or 1 and 3, as bf16.
  template <int kOdd>
  static Simd::Words bf16_pairs(Simd::Words x) {
    // Exponent and mantissa fall into place, 120 added to the exponent.
    // Subnormals, 0 to 7 times 2^-9, come from a table: the products take subnormal bf16 for 0.
    const Simd::Words magnitude = (kOdd == 0 ? x : x >> 8) & 0x007F007Fu;
    const Simd::Words sign = (kOdd == 0 ? x << 8 : x) & 0x80008000u;
    const __m512i subnormal = _mm512_set4_epi64(0, 0, 0x3C60'3C40'3C20'3C00, 0x3BC0'3B80'3B00'0000);
    const __mmask32 small = _mm512_cmplt_epu16_mask((__m512i)magnitude, _mm512_set1_epi16(8));
    const __m512i value =
        _mm512_mask_permutexvar_epi16((__m512i)((magnitude << 4) + 0x3C003C00u), small, (__m512i)magnitude, subnormal);
    return (Simd::Words)value | sign;
  }
};
