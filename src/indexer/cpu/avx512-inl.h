// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/avx512-inl.h -- what the AVX-512 tiers share. Included inside a tier's unnamed namespace, after
// cpu/simd/avx512-inl.h.
#pragma once

// Words of 16 keys. A vector's quarter i is of key 4 i + j.
struct Avx512Words {
  static Simd::Words load_quads(const std::byte* const* keys, Index offset) {
    const auto quad = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys[4 * i] + offset)); };
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
};
