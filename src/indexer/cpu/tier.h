// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/tier.h -- what the kernel of an instruction set is to the loop that drives it (scores.cc).
//
// Plain data and pointers to functions: files of different instruction sets include this, so nothing here may become
// code (docs/kernels/attention-cpu.md).
#pragma once
#include <cstddef>
#include <cstdint>

namespace sievemla::stage::indexer {

enum class Element : std::uint8_t { f32, bf16, e4m3 };

struct TierShape {
  std::int64_t heads;
  Element query, key;
  float least;  // a dot product below this counts as this much: 0 (relu)
};

inline constexpr std::int64_t kQueryRows = 4;  // rows whose queries are packed at a time
inline constexpr std::int64_t kKeyPad = 64;    // keys come in multiples of this
inline constexpr std::int64_t kAhead = 64;     // so many keys early memory is asked for a key

struct Tier {
  // Of a worker, aligned to 64.
  std::int64_t (*scratch_bytes)(std::int64_t heads);
  // Packs the heads of a row, each 128 elements at heads[h], and their weights as row `row` < kQueryRows of the
  // scratch, where they stay.
  void (*load_query)(const TierShape& shape, std::byte* scratch, std::int64_t row, const void* const* heads,
                     const float* weights);
  // out[i][0, n) = scales[j] * sum over heads of weight * max(query . key[j], least), for packed row rows[i]. n is a
  // multiple of kKeyPad. keys[n, n + kAhead) are what another call will want: addresses, not read.
  void (*score)(const TierShape& shape, std::byte* scratch, const std::byte* const* keys, const float* scales,
                std::int64_t n, const std::int64_t* rows, float* const* out, std::int64_t n_rows);
};

extern const Tier kPortable;
#if defined(__x86_64__)
extern const Tier kAvx2, kAvx512, kAvx512Bf16, kAmx;
#endif

}  // namespace sievemla::stage::indexer
