// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/simd/avx512bf16-inl.h -- operands in bf16 pairs, sums in sixteen f32. After avx512-inl.h.
#pragma once

struct SimdBf16 {
  using Operand = std::uint16_t;  // bf16
  using Right = __m512bh;
  static constexpr Index kPair = 2;

  static Right right(const Operand* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static Right left(const Operand* x) {
    std::int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Simd::Vec dot(Simd::Vec sum, Right a, Right b) { return _mm512_dpbf16_ps(sum, a, b); }
};
