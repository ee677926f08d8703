// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/avx512-inl.h -- what the AVX-512 tiers share. Included inside a tier's unnamed namespace, after
// cpu/simd/avx512-inl.h.
#pragma once

struct Avx512 : Simd {
  static constexpr Index kVecs = 4;

  static Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec times_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
  static Vec zero_below(Vec x, float limit, Vec y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(limit), _CMP_NLT_UQ), y);
  }
  static Vec zero_where_equal(Vec a, Vec b, Vec x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ), x);
  }
  // Lane i: lanes 2 i and 2 i + 1; zeros in the upper half.
  static Vec add_pairs(Vec x) { return _mm512_maskz_compress_ps(0x5555, add(x, _mm512_permute_ps(x, 0xB1))); }
  static void begin() {}
  static void end() {}
};
