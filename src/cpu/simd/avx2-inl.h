// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/simd/avx2-inl.h -- vectors of eight f32, with FMA.
#pragma once

using Index = std::int64_t;

struct Simd {
  using Vec = __m256;
  using Words = std::uint32_t __attribute__((vector_size(32)));
  static constexpr Index kLanes = 8;

  static Vec load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* x, Vec v) { _mm256_storeu_ps(x, v); }
  static Vec set1(float x) { return _mm256_set1_ps(x); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }  // the same
};
