// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/tier.h -- what the kernel of an instruction set is to the loop that drives it (attention.cc).
//
// Plain data and pointers to functions: files of different instruction sets include this, so nothing here may become
// code (docs/kernels/attention-cpu.md).
#pragma once
#include <cstddef>
#include <cstdint>

namespace sievemla::stage::attention {

enum class Element : std::uint8_t { f32, bf16, e4m3 };  // of a row's latent. e4m3: 512, then 4 f32 scales, bf16 rope

struct TierShape {
  std::int64_t heads, latent, rope;
  std::int64_t value_stride;  // of TierState::value, in elements
  Element query, row;
  float scale;
};

inline constexpr std::int64_t kHeadPad = 16;   // arrays over heads hold a multiple of this
inline constexpr std::int64_t kWidthPad = 64;  // latent and rope are computed in multiples of this
inline constexpr std::int64_t kSlices = 4;     // of a packed row's latent, each with its scale

// A softmax under way over some rows. Heads are written up to a multiple of kHeadPad, columns up to one of kWidthPad.
struct TierState {
  float* value;       // [heads, value_stride] sum of exp(score - peak) * row; not read if `empty`
  float *peak, *sum;  // [heads], as in base/softmax.h
  float* gain;  // [kSlices, heads] by which the values of a slice are to be multiplied; of plain rows there is one
  bool empty;   // no row so far
};

struct Tier {
  // Of a worker, aligned to 64.
  std::int64_t (*scratch_bytes)(const TierShape& shape);
  // Packs a token's queries, latent[h][0, shape.latent) and rope[h][0, shape.rope), into the scratch, where they stay.
  void (*load_queries)(const TierShape& shape, std::byte* scratch, const void* const* latent, const void* const* rope);
  // Attends to n rows at these addresses. `ahead`: n_ahead rows that follow in another call; they are fetched early.
  void (*attend)(const TierShape& shape, std::byte* scratch, const std::byte* const* rows, std::int64_t n,
                 const std::byte* const* ahead, std::int64_t n_ahead, TierState* state);
  // sum = sum * keep + value * weight, of [0, columns), a multiple of kWidthPad.
  void (*fold)(float* sum, float keep, const float* value, float weight, std::int64_t columns);
};

extern const Tier kPortable;
#if defined(__x86_64__)
extern const Tier kAvx2, kAvx512, kAvx512Bf16, kAmx;
#endif

}  // namespace sievemla::stage::attention
