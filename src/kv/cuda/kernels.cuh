// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cuda/kernels.cuh -- writers and gatherers of caches on CUDA: a CTA a row.
#pragma once
#include "cuda/latent.cuh"
#include "cuda/ptx/ptx.cuh"
#include "kv/cuda/kernels.h"

namespace sievemla::kv {

template <class Arch>
__global__ void write_latent_kernel(const __grid_constant__ cuda::LatentParams p) {
  cuda::wait_for_kernel();
  const std::int64_t row = blockIdx.x, slot = cuda::slot_at(p.at, row);
  if (slot < 0 || slot >= p.cache.slots) return;
  unsigned char* const out = cuda::row_of_slot(p.cache, slot);
  const int thread = static_cast<int>(threadIdx.x);
  cuda::store_latent(p, out, thread, [&](int i) { return cuda::load_real(p.latents, p.f32, row * p.latents_row + i); });
  for (int i = thread; i < p.rope; i += cuda::kRowThreads)
    cuda::rope_of_row(p, out)[i] = base::to_bf16(cuda::load_real(p.ropes, p.f32, row * p.ropes_row + i));
}

template <class Arch>
__global__ void gather_latent_kernel(const __grid_constant__ cuda::LatentParams p) {
  cuda::wait_for_kernel();
  const std::int64_t row = blockIdx.x, slot = cuda::slot_at(p.at, row);
  const bool there = slot >= 0 && slot < p.cache.slots;
  const unsigned char* const from = cuda::row_of_slot(p.cache, there ? slot : 0);
  for (int i = static_cast<int>(threadIdx.x); i < p.latent + p.rope; i += cuda::kRowThreads) {
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
  cuda::wait_for_kernel();
  const std::int64_t row = blockIdx.x, slot = cuda::slot_at(p.at, row);
  const bool there = slot >= 0 && slot < p.cache.slots;
  const cuda::SlotPlace at(p.cache, there ? slot : 0);
  const unsigned char* const from = at.page + at.offset * p.cache.row_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < p.key_bytes; i += cuda::kRowThreads)
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
