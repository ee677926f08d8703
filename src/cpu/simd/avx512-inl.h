// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/simd/avx512-inl.h -- vectors of sixteen f32.
#pragma once

using Index = std::int64_t;

struct Simd {
  using Vec = __m512;
  using Words = std::uint32_t __attribute__((vector_size(64)));
  static constexpr Index kLanes = 16;

  static Vec load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* x, Vec v) { _mm512_storeu_ps(x, v); }
  static Vec set1(float x) { return _mm512_set1_ps(x); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }  // the same
};
