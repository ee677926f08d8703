// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/avx512bf16.cc -- dpbf16: two products of bf16 a lane, summed in f32.
#include <immintrin.h>

#include "indexer/cpu/tier.h"

namespace sievemla::stage::indexer {
namespace {

#include "cpu/simd/avx512-inl.h"
#include "cpu/simd/avx512bf16-inl.h"

#include "indexer/cpu/avx512-inl.h"
#include "indexer/cpu/bf16-inl.h"

struct Ops : Bf16 {
  static constexpr Index kVecs = 2;
  static constexpr int kHeads = 8;  // 16 sums in 32 registers
  static constexpr bool kTiles = false;
};

#include "indexer/cpu/scores-inl.h"

}  // namespace

const Tier kAvx512Bf16 = kTier;

}  // namespace sievemla::stage::indexer
