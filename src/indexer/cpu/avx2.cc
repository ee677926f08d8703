// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/avx2.cc -- f32 in vectors of eight, with FMA.
#include <immintrin.h>

#include "indexer/cpu/tier.h"

namespace sievemla::stage::indexer {
namespace {

#include "cpu/simd/avx2-inl.h"

#include "indexer/cpu/f32-inl.h"

struct Ops : F32 {
  static constexpr Index kVecs = 4;
  static constexpr int kHeads = 3;  // 12 sums in 16 registers

  // Half i of the vector is of key 4 i.
  static Words load_quads(const std::byte* const* keys, Index offset) {
    return (Words)_mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(keys[4] + offset),
                                      reinterpret_cast<const __m128i*>(keys[0] + offset));
  }
  static Words low_words(Words a, Words b) { return (Words)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
  static Words high_words(Words a, Words b) { return (Words)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
  static Words low_pairs(Words a, Words b) { return (Words)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
  static Words high_pairs(Words a, Words b) { return (Words)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
};

#include "indexer/cpu/scores-inl.h"

}  // namespace

const Tier kAvx2 = kTier;

}  // namespace sievemla::stage::indexer
