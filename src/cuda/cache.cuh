// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/cache.cuh -- what writers share on the device: slots, tensors of reals, one scaled group.
#pragma once
#include <cstdint>

#include "base/number.h"
#include "cuda/cache.h"
#include "kv/quantise.h"

namespace sievemla::cuda {

__device__ inline std::int64_t slot_at(const SlotList& s, std::int64_t i) {
  return s.wide ? static_cast<const std::int64_t*>(s.slots)[i * s.step] : static_cast<const int*>(s.slots)[i * s.step];
}

// Where a page's slot starts: its page, and its number there.
struct SlotPlace {
  unsigned char* page;
  int offset;
  __device__ SlotPlace(const Pages& cache, std::int64_t slot)
      : page(cache.pages + slot / cache.page_size * cache.page_bytes),
        offset(static_cast<int>(slot % cache.page_size)) {}
};

__device__ inline float load_real(const void* data, bool f32, std::int64_t i) {
  return f32 ? static_cast<const float*>(data)[i] : base::to_f32(static_cast<const bf16*>(data)[i]);
}

// The scale of the group of which this lane has some values; as quantise_group. By a warp.
template <int N>
__device__ inline float scale_of_group(const float (&x)[N], ScaleRule rule, float floor) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7FFFFFFFu);
  return kv::scale_of(__reduce_max_sync(~0u, largest), rule, floor);
}
// A code of a group: 0 where its scale is NaN.
__device__ inline std::uint8_t code_of(float x, float scale, ScaleRule rule) {
  return scale == scale ? kv::code_of(x, scale, rule) : std::uint8_t{0};
}

}  // namespace sievemla::cuda
