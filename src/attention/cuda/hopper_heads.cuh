// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper_heads.cuh -- what the loops for 64 heads on sm_90 share: weights that are rounded, results
// on their way out.
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/rows.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/ptx/sm90a.cuh"

namespace sievemla::stage::attention {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The shares of this CTA, or of its cluster, to where they belong. `barrier` joins the threads that call.
template <int AtOnce, class Barrier>
__device__ inline void write_shares(const CudaParams& p, const Place& place, int groups, const float* s_log2,
                                    const float* s_shares, unsigned& s_todo, int thread, int threads, Barrier barrier) {
  constexpr int kHeads = 64;
  const Part& part = place.part;
  const int first_head = place.group * kHeads, heads = min(kHeads, p.fold * p.heads - first_head);
  const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
  const bool cluster = part.parts > 1 && p.merge == Merge::cluster;
  if (cluster) cuda::cluster_sync();
  else barrier();
  if (part.parts == 1 || cluster) {
    add_shares<4>(p, part.unit, part.parts, part.index, s_log2, s_shares, first_head, kHeads * part.index / part.parts,
                  min(kHeads * (part.index + 1) / part.parts, heads), warp, warps);
    if (cluster) cuda::cluster_meet();  // until nobody reads here any more
  } else {
    const std::int64_t partial = (static_cast<std::int64_t>(place.item) * groups + place.group) * kHeads;
    if (thread < heads) p.partial_log2[partial + thread] = s_log2[thread];
    for (int local = warp; local < heads; local += warps)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int column = 128 * k + 4 * lane;
        *reinterpret_cast<float4*>(p.partial + (partial + local) * kLatent + column) =
            *reinterpret_cast<const float4*>(s_shares + local * kShareStride + column);
      }
    if (p.merge == Merge::together) {
      __threadfence();
      barrier();
      const int list = (place.item / part.parts) * groups + place.group;
      if (thread == 0) s_todo = Meeting::meet(p.tickets + list, part.index, part.parts);
      barrier();
      __threadfence();
      const std::int64_t step = static_cast<std::int64_t>(groups) * kHeads;
      const std::int64_t base = part.first_item * step + place.group * kHeads;
#pragma unroll 1
      for (unsigned todo = s_todo; todo != 0; todo &= todo - 1) {
        const int i = __ffs(static_cast<int>(todo)) - 1;
        add_partials<AtOnce>(p, part.unit, part.parts, base, step, first_head, heads * i / part.parts,
                             heads * (i + 1) / part.parts, warp, warps);
      }
    }
  }
  if (thread == 0) end_launch(p);
}

// Two weights rounded, or what rounding takes from them.
template <bool Residue>
__device__ inline std::uint32_t rounded(float y, float z) {
  if constexpr (Residue) y -= __bfloat162float(__float2bfloat16_rn(y)), z -= __bfloat162float(__float2bfloat16_rn(z));
  return cuda::pack_bf16x2(y, z);
}
#endif

}  // namespace sievemla::stage::attention
