// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/id_kernels.cuh -- positions_to_slots and expand_pools on CUDA: a CTA a row.
#pragma once
#include "topk/cuda/ids.cuh"

namespace sievemla::stage::topk {

template <class Arch>
__global__ void slots_kernel(const int* positions, std::int64_t positions_row, int k,
                             const __grid_constant__ CudaIds out) {
  const int row = static_cast<int>(blockIdx.x);
  const IdRow ids(out, row);
  const int* from = positions + row * positions_row;
  for (int i = static_cast<int>(threadIdx.x); i < k; i += static_cast<int>(blockDim.x)) ids.store(out, i, from[i]);
}

// Selected pools are few: each thread counts those before its own, so that a dropped one leaves no gap.
template <class Arch>
__global__ void pools_kernel(const __grid_constant__ PoolParams p) {
  const int row = static_cast<int>(blockIdx.x), length = p.lengths[row];
  const int whole = length > 0 ? length / p.kpool : 0, lane = static_cast<int>(threadIdx.x % 32);
  const int* pools = p.pools + row * p.pools_row;
  int* out = p.positions + row * p.positions_row;
  // A warp expands pools [first, first + 32) of every (warps * 32); it counts what lies before by itself.
  const int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
  int before = 0, kept = 0;
  for (int first = 0; first < p.n; first += 32) {
    const int pool = first + lane < p.n ? pools[first + lane] : -1;
    const unsigned good = __ballot_sync(~0u, pool >= 0 && pool < whole);
    if (first / 32 % warps == warp && (good >> lane & 1)) {
      const std::int64_t at = static_cast<std::int64_t>(before + __popc(good & ((1u << lane) - 1))) * p.kpool;
      for (int i = 0; i < p.kpool; ++i) out[at + i] = pool * p.kpool + i;
    }
    before += __popc(good);
  }
  kept = before;
  const std::int64_t tail = static_cast<std::int64_t>(kept) * p.kpool;
  const int visible = length > 0 ? length - whole * p.kpool : 0;
  for (std::int64_t i = tail + threadIdx.x; i < p.width; i += blockDim.x)
    out[i] = i - tail < visible ? whole * p.kpool + static_cast<int>(i - tail) : -1;
}

}  // namespace sievemla::stage::topk
