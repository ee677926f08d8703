// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cuda/kernels.cuh -- writers and gatherers of caches on CUDA: a CTA a row.
#pragma once
#include "cuda/cache.cuh"
#include "kv/cuda/kernels.h"
#include "kv/fp8_rows.h"

namespace sievemla::kv {

// Warps 0 .. 3 quantise a group of 128 latent values each, all threads copy what is not quantised.
template <class Arch>
__global__ void write_latent_kernel(const __grid_constant__ LatentParams p) {
  const std::int64_t row = blockIdx.x, slot = cuda::slot_at(p.at, row);
  if (slot < 0 || slot >= p.cache.slots) return;
  const cuda::SlotPlace at(p.cache, slot);
  unsigned char* const out = at.page + at.offset * p.cache.row_bytes;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  auto latent = [&](int i) { return cuda::load_real(p.latents, p.f32, row * p.latents_row + i); };
  auto rope = [&](int i) { return cuda::load_real(p.ropes, p.f32, row * p.ropes_row + i); };
  if (p.format == KvFormat::bf16) {
    for (int i = thread; i < p.latent + p.rope; i += kRowThreads)
      reinterpret_cast<bf16*>(out)[i] = base::to_bf16(i < p.latent ? latent(i) : rope(i - p.latent));
    return;
  }
  static_assert(kRowThreads == 32 * Fp8DsMlaRow::kGroups);
  const int first = warp * Fp8DsMlaRow::kScaleGroup + lane * 4;
  const float x[4] = {latent(first), latent(first + 1), latent(first + 2), latent(first + 3)};
  const float scale = cuda::scale_of_group(x, p.rule, 0.f);
  std::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= static_cast<std::uint32_t>(cuda::code_of(x[i], scale, p.rule)) << (8 * i);
  *reinterpret_cast<std::uint32_t*>(out + first) = codes;
  if (lane == 0) reinterpret_cast<float*>(out + Fp8DsMlaRow::kScaleOffset)[warp] = scale;
  for (int i = thread; i < p.rope; i += kRowThreads)
    reinterpret_cast<bf16*>(out + Fp8DsMlaRow::kRopeOffset)[i] = base::to_bf16(rope(i));
}

template <class Arch>
__global__ void gather_latent_kernel(const __grid_constant__ LatentParams p) {
  const std::int64_t row = blockIdx.x, slot = cuda::slot_at(p.at, row);
  const bool there = slot >= 0 && slot < p.cache.slots;
  const cuda::SlotPlace at(p.cache, there ? slot : 0);
  const unsigned char* const from = at.page + at.offset * p.cache.row_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < p.latent + p.rope; i += kRowThreads) {
    double x = 0;  // holds every format exactly, so that one rounding follows
    if (there && p.format == KvFormat::bf16) {
      x = base::to_f32(reinterpret_cast<const bf16*>(from)[i]);
    } else if (there && i < p.latent) {
      const float scale =
          reinterpret_cast<const float*>(from + Fp8DsMlaRow::kScaleOffset)[i / Fp8DsMlaRow::kScaleGroup];
      x = static_cast<double>(from_e4m3(from[i])) * static_cast<double>(scale);
    } else if (there) {
      x = base::to_f32(reinterpret_cast<const bf16*>(from + Fp8DsMlaRow::kRopeOffset)[i - p.latent]);
    }
    if (p.f32) static_cast<float*>(p.latents)[row * p.latents_row + i] = static_cast<float>(x);
    else static_cast<bf16*>(p.latents)[row * p.latents_row + i] = base::to_bf16(x);
  }
}

template <class Arch>
__global__ void gather_index_keys_kernel(const __grid_constant__ IndexGatherParams p) {
  const std::int64_t row = blockIdx.x, slot = cuda::slot_at(p.at, row);
  const bool there = slot >= 0 && slot < p.cache.slots;
  const cuda::SlotPlace at(p.cache, there ? slot : 0);
  const unsigned char* const from = at.page + at.offset * p.cache.row_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < p.key_bytes; i += kRowThreads)
    p.keys[row * p.keys_row + i] = there ? from[i] : std::uint8_t{0};
  if (p.scaled && threadIdx.x == 0)
    p.scales[row * p.scales_step] =
        there ? reinterpret_cast<const float*>(at.page + static_cast<std::int64_t>(p.cache.page_size) * 128)[at.offset]
              : 0.f;
}

template <class Arch>
ConfigKernels make_kernels() {
  return {Arch::kSm, reinterpret_cast<const void*>(&write_latent_kernel<Arch>),
          reinterpret_cast<const void*>(&gather_latent_kernel<Arch>),
          reinterpret_cast<const void*>(&gather_index_keys_kernel<Arch>)};
}

}  // namespace sievemla::kv
