// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/simd/portable-inl.h -- vectors of four f32, in the compiler's own terms: SSE2 on x86-64, NEON on Arm. Like
// all of this folder: included inside the unnamed namespace of a file of a tier (docs/kernels/attention-cpu.md).
#pragma once

using Index = std::int64_t;

struct Simd {
  using Vec = float __attribute__((vector_size(16)));
  using Words = std::uint32_t __attribute__((vector_size(16)));
  static constexpr Index kLanes = 4;

  static Vec load(const float* x) {
    Vec v;
    __builtin_memcpy(&v, x, sizeof v);
    return v;
  }
  static void store(float* x, Vec v) { __builtin_memcpy(x, &v, sizeof v); }
  static Vec set1(float x) { return Vec{x, x, x, x}; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN
  static Vec min(Vec a, Vec b) { return a < b ? a : b; }  // the same
};
