// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/amx.cc -- products in tiles of 16 heads x 16 keys: a row of a left tile holds 32 bf16 of a head, a
// row of a right tile one pair of 16 keys. Two by two tiles of sums are under way at a time.
#include <immintrin.h>

#include "indexer/cpu/tier.h"

namespace sievemla::stage::indexer {
namespace {

#include "cpu/simd/avx512-inl.h"
#include "cpu/simd/avx512bf16-inl.h"
#include "cpu/simd/tiles-inl.h"

#include "indexer/cpu/avx512-inl.h"
#include "indexer/cpu/bf16-inl.h"

struct Ops : Bf16 {
  static constexpr Index kVecs = 2;
  static constexpr bool kTiles = true;
  static constexpr int kHeads = 1;

  static void begin() { configure_tiles(); }
  static void end() { _tile_release(); }

  static void add_all_heads(const TierShape& shape, const Operand* q, const float* weights, const Operand* tile,
                            float* sum) {
    alignas(64) float dots[2 * kSide][kKeys];
    const Vec floor = set1(shape.least);
    Vec total[kVecs];
    for (Vec& x : total) x = set1(0.f);
    for (Index head = 0; head < shape.heads; head += 2 * kSide) {
      const Index n = shape.heads - head < 2 * kSide ? shape.heads - head : 2 * kSide;
      for (Index k = 0; k < kKeys; k += 2 * kSide)
        if (n > kSide) multiply<true>(q + head * kWidth, tile + k * kPair, dots[0] + k);
        else multiply<false>(q + head * kWidth, tile + k * kPair, dots[0] + k);
      for (Index h = 0; h < n; ++h) {
        const Vec weight = set1(weights[head + h]);
        for (Index v = 0; v < kVecs; ++v)
          total[v] = fma(weight, max(floor, load(dots[h] + v * kLanes)), total[v]);  // a NaN stays one
      }
    }
    for (Index v = 0; v < kVecs; ++v) store(sum + v * kLanes, total[v]);
  }

 private:
  static constexpr Index kSide = 16, kWidth = 128, kKeys = kVecs * kLanes;

  // dots[16 or 32 heads, 32 keys].
  template <bool kTwo>
  static void multiply(const Operand* q, const Operand* tile, float* dots) {
    constexpr Index kQ = kWidth * 2, kTile = kKeys * kPair * 2, kDots = kKeys * 4;  // strides in bytes
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) _tile_zero(2);
    if (kTwo) _tile_zero(3);
    for (Index i = 0; i < kWidth / (kSide * kPair); ++i, q += kSide * kPair, tile += kSide * kKeys * kPair) {
      _tile_loadd(4, q, kQ);
      _tile_loadd(6, tile, kTile);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, tile + kSide * kPair, kTile);
      _tile_dpbf16ps(1, 4, 7);
      if (!kTwo) continue;
      _tile_loadd(5, q + kSide * kWidth, kQ);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, dots, kDots);
    _tile_stored(1, dots + kSide, kDots);
    if (kTwo) _tile_stored(2, dots + kSide * kKeys, kDots);
    if (kTwo) _tile_stored(3, dots + kSide * kKeys + kSide, kDots);
  }
};

#include "indexer/cpu/scores-inl.h"

}  // namespace

const Tier kAmx = kTier;

}  // namespace sievemla::stage::indexer
