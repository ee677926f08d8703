// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/portable.cc -- vectors of four f32, in the compiler's own terms.
#include "indexer/cpu/tier.h"

namespace sievemla::stage::indexer {
namespace {

#include "cpu/simd/portable-inl.h"

#include "indexer/cpu/f32-inl.h"

struct Ops : F32 {
  static constexpr Index kVecs = 2;
  static constexpr int kHeads = 4;

  static Words load_quads(const std::byte* const* keys, Index offset) {
    Words x;
    __builtin_memcpy(&x, *keys + offset, sizeof x);
    return x;
  }
  static Words low_words(Words a, Words b) { return Words{a[0], b[0], a[1], b[1]}; }
  static Words high_words(Words a, Words b) { return Words{a[2], b[2], a[3], b[3]}; }
  static Words low_pairs(Words a, Words b) { return Words{a[0], a[1], b[0], b[1]}; }
  static Words high_pairs(Words a, Words b) { return Words{a[2], a[3], b[2], b[3]}; }
};

#include "indexer/cpu/scores-inl.h"

}  // namespace

const Tier kPortable = kTier;

}  // namespace sievemla::stage::indexer
