// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/avx512bf16.cc -- dpbf16: two products of bf16 a lane, summed in f32.
#include <immintrin.h>

#include "attention/cpu/tier.h"

namespace sievemla::stage::attention {
namespace {

#include "cpu/simd/avx512-inl.h"
#include "cpu/simd/avx512bf16-inl.h"

#include "attention/cpu/avx512-inl.h"
#include "attention/cpu/avx512bf16-inl.h"

struct Ops : Avx512Bf16 {
  static constexpr Index kBlock = 64, kRowPad = 8;
  static constexpr bool kTiles = false, kHasNarrow = true;
  static constexpr int rows(int vectors) { return vectors <= 2 ? 8 : 4; }  // at most 16 sums in 32 registers
};

#include "attention/cpu/attention-inl.h"

}  // namespace

const Tier kAvx512Bf16 = kTier;

}  // namespace sievemla::stage::attention
