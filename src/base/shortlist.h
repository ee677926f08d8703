// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/shortlist.h -- what the scorer hands to the selection where scores are not kept: of each row those that
// reach a threshold.
#pragma once
#include <cstdint>

namespace sievemla::base {

struct Shortlisted {
  float score;
  int position;
};
inline constexpr int kShortlist = 8190;  // of a row, at most

struct alignas(16) Shortlist {
  int count;    // of the scores that reached it; what is beyond kShortlist was not kept
  float least;  // the threshold
  int unused[2];
  Shortlisted of[kShortlist];  // in any order
};
static_assert(sizeof(Shortlist) == 1 << 16);

// The threshold is guessed from some of the keys: 16 side by side of every 16 * stride, somewhere among these. Their
// scores lie in the row, one after the other, where its shortlist will be.
inline constexpr int kSampleKeys = 16;
constexpr std::int64_t sample_stride(std::int64_t width) {
  const std::int64_t samples = width > 1 << 18 ? 8192 - 64 : 4096;
  return (width + samples - 1) / samples;
}
// The first of the 16 keys whose scores are columns column .. column + 15.
constexpr int sample_key(int column, int stride) {
  const unsigned group = static_cast<unsigned>(column / kSampleKeys), wide = static_cast<unsigned>(stride);
  return static_cast<int>((group * wide + ((group * 0x9E3779B1u >> 16) * wide >> 16)) * kSampleKeys);
}
// How many of the samples are of the first `length` keys: the first ones.
constexpr int samples_of(int length, int stride) {
  const int whole = length / (kSampleKeys * stride) * kSampleKeys, rest = length - sample_key(whole, stride);
  return whole + (rest < 0 ? 0 : rest < kSampleKeys ? rest : kSampleKeys);
}

}  // namespace sievemla::base
