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
  // to[j][i] = from[i][j], 16 x 16 elements of 32 bits; strides in T.
  template <class T>
  static void transpose(const T* from, Index from_stride, T* to, Index to_stride) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * from_stride);
    transpose(x);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_stride, x[i]);
  }
  static void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
      y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 2; ++j) {
        x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
        x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
      }
    for (int i = 0; i < 16; i += 8)
      for (int j = 0; j < 4; ++j) {
        y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0x88);
        y[i + 4 + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0xDD);
      }
    for (int j = 0; j < 8; ++j) {
      x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
      x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xDD);
    }
  }
  static void begin() {}
  static void end() {}
};
