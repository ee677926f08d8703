// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/avx512.cc -- f32 in vectors of sixteen.
#include <immintrin.h>

#include "indexer/cpu/tier.h"

namespace sievemla::stage::indexer {
namespace {

#include "cpu/simd/avx512-inl.h"

#include "indexer/cpu/avx512-inl.h"
#include "indexer/cpu/f32-inl.h"

struct Ops : F32, Avx512Words {
  static constexpr Index kVecs = 2;
  static constexpr int kHeads = 8;  // 16 sums in 32 registers

  template <Element kKey, int kPart>
  static Vec part(Words x) {
    if constexpr (kKey != Element::e4m3) return F32::part<kKey, kPart>(x);
    const Words pairs = bf16_pairs<kPart & 1>(x);  // in 16-bit lanes it is half the work
    return (Vec)(kPart < 2 ? pairs << 16 : pairs & 0xFFFF0000u);
  }
};

#include "indexer/cpu/scores-inl.h"

}  // namespace

const Tier kAvx512 = kTier;

}  // namespace sievemla::stage::indexer
