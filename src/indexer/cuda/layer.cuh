// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/layer.cuh -- all that a layer writes for a token, by a CTA: warps 0 .. 3 its latent, then a warp its
// rope and a warp its indexer key; all of them a row of indices.
#pragma once
#include "cuda/latent.cuh"
#include "cuda/ptx/ptx.cuh"
#include "indexer/cuda/heads.cuh"
#include "indexer/cuda/kernels.h"

namespace sievemla::stage::indexer {

// To what the separate steps would leave in memory.
__device__ inline float rounded_as(double x, bool f32) {
  return f32 ? static_cast<float>(x) : base::to_f32(base::to_bf16(x));
}

// One over the root mean square of a token's latent; by kRowThreads threads, that share `part`.
__device__ inline double norm_scale(const WriteLayerParams& p, std::int64_t token, int thread, double* part) {
  const cuda::LatentParams& l = p.latent;
  double squares = 0;
  for (int i = thread; i < l.latent; i += cuda::kRowThreads) {
    const double x = static_cast<double>(cuda::load_real(l.latents, l.f32, token * l.latents_row + i));
    squares += x * x;
  }
  squares = sum_of_warp(squares);
  if (thread % 32 == 0) part[thread / 32] = squares;
  cuda::barrier_sync(1, cuda::kRowThreads);
  return 1 / sqrt(((part[0] + part[1]) + (part[2] + part[3])) / l.latent + static_cast<double>(p.eps));
}

__device__ inline void write_rope(const WriteLayerParams& p, unsigned char* row, std::int64_t token, int lane) {
  const cuda::LatentParams& l = p.latent;
  const auto value = [&](int i) { return cuda::load_real(l.ropes, l.f32, token * l.ropes_row + i); };
  bf16* const out = cuda::rope_of_row(l, row);
  if (p.rope.style == RopeStyle::none) {
    for (int i = lane; i < l.rope; i += 32) out[i] = base::to_bf16(value(i));
    return;
  }
  HeadValues x = {static_cast<double>(value(lane)), static_cast<double>(value(lane + 32)), 0, 0};
  rotate(x, p.rope, token, lane);
  out[lane] = base::to_bf16(rounded_as(x[0], l.f32)), out[lane + 32] = base::to_bf16(rounded_as(x[1], l.f32));
}

// Six CTAs a multiprocessor: told nothing, ptxas keeps to 40 registers on sm_120 and spills.
template <class Arch>
__global__ __launch_bounds__(kLayerThreads, 6) void write_layer_kernel(const __grid_constant__ WriteLayerParams p) {
  __shared__ double part[cuda::kRowThreads / 32];
  const cuda::LatentParams& l = p.latent;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const std::int64_t token = blockIdx.x;
#pragma unroll 1
  for (std::int64_t row = token; row < p.index_rows; row += gridDim.x)
    for (int i = thread; i < p.index_width; i += kLayerThreads) p.indices[row * p.index_row + i] = -1;
  if (token >= p.tokens) return;
  if (warp == kLayerThreads / 32 - 1) {
    if (p.keys.k) write_key(p.keys, token, lane);
    return;
  }
  const std::int64_t slot = cuda::slot_at(l.at, token);
  if (slot < 0 || slot >= l.cache.slots) return;
  unsigned char* const row = cuda::row_of_slot(l.cache, slot);
  if (thread >= cuda::kRowThreads) {
    if (l.rope > 0) write_rope(p, row, token, lane);
    return;
  }
  const double scale = norm_scale(p, token, thread, part);
  cuda::store_latent(l, row, thread, [&](int i) {
    const double x = static_cast<double>(cuda::load_real(l.latents, l.f32, token * l.latents_row + i));
    return rounded_as(x * scale * static_cast<double>(cuda::load_real(p.weight, p.weight_f32, i * p.weight_step)),
                      l.f32);
  });
}

}  // namespace sievemla::stage::indexer
