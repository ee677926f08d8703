// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/bf16-inl.h -- operands in bf16 pairs, sums in f32: what the bf16 tiers share. Included inside a
// tier's unnamed namespace, after cpu/simd/avx512bf16-inl.h and avx512-inl.h.
#pragma once

struct Bf16 : Simd, SimdBf16, Avx512Words {
  template <Element kKey, int kPart>
  static Right part(Words x) {
    return (Right)(kKey == Element::e4m3 ? bf16_pairs<kPart>(x) : x);
  }
};
