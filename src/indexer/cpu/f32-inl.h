// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/f32-inl.h -- f32 operands: what the tiers without bf16 products share. Included inside a tier's
// unnamed namespace, after its cpu/simd/*-inl.h.
#pragma once

struct F32 : Simd {
  using Operand = float;
  using Right = Vec;
  static constexpr Index kPair = 1;
  static constexpr bool kTiles = false;

  static Right right(const float* x) { return load(x); }
  static Vec left(const float* x) { return set1(*x); }
  static Vec dot(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }

  template <int kBy>
  static Words shifted(Words x) {
    return kBy >= 0 ? x << (kBy & 31) : x >> (-kBy & 31);
  }
  template <Element kKey, int kPart>
  static Vec part(Words x) {
    if constexpr (kKey == Element::f32) return (Vec)x;
    if constexpr (kKey == Element::bf16) return (Vec)(kPart == 0 ? x << 16 : x & 0xFFFF0000u);
    // e4m3: exponent and mantissa fall into place, 120 added to the exponent.
    const Words magnitude = shifted<20 - 8 * kPart>(x) & 0x07F00000u, sign = shifted<24 - 8 * kPart>(x) & 0x80000000u;
    const Vec normal = (Vec)(magnitude + (120u << 23));
    // Of a subnormal it is 2^-7 + m 2^-10, where 2^-9 m is meant; from 2^-6 on the other is the larger.
    const Vec value = min(fma(normal, set1(2.f), set1(-0x1p-6f)), normal);
    return (Vec)((Words)value | sign);
  }
};
