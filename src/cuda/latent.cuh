// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/latent.cuh -- one latent row as kRowThreads threads store it.
#pragma once
#include "cuda/cache.cuh"
#include "cuda/latent.h"
#include "kv/fp8_rows.h"

namespace sievemla::cuda {

__device__ inline unsigned char* row_of_slot(const Pages& cache, std::int64_t slot) {
  const SlotPlace at(cache, slot);
  return at.page + at.offset * cache.row_bytes;
}
__device__ inline bf16* rope_of_row(const LatentParams& p, unsigned char* row) {
  return reinterpret_cast<bf16*>(row + (p.format == KvFormat::bf16 ? 2 * p.latent : kv::Fp8DsMlaRow::kRopeOffset));
}

// latent(i) is f32. Warps 0 .. 3 quantise a group of 128 each.
template <class Latent>
__device__ inline void store_latent(const LatentParams& p, unsigned char* row, int thread, Latent&& latent) {
  if (p.format == KvFormat::bf16) {
    for (int i = thread; i < p.latent; i += kRowThreads) reinterpret_cast<bf16*>(row)[i] = base::to_bf16(latent(i));
    return;
  }
  static_assert(kRowThreads == 32 * kv::Fp8DsMlaRow::kGroups);
  const int first = 4 * thread;
  const float x[4] = {latent(first), latent(first + 1), latent(first + 2), latent(first + 3)};
  const float scale = scale_of_group(x, p.rule, 0.f);
  std::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= static_cast<std::uint32_t>(code_of(x[i], scale, p.rule)) << (8 * i);
  *reinterpret_cast<std::uint32_t*>(row + first) = codes;
  if (thread % 32 == 0) reinterpret_cast<float*>(row + kv::Fp8DsMlaRow::kScaleOffset)[thread / 32] = scale;
}

}  // namespace sievemla::cuda
