// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper_heads.cuh -- what the loops for 64 heads on sm_90 share: Q on its way in, results on theirs
// out.
#pragma once
#include <cuda_bf16.h>

#include <type_traits>

#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/rows.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/ptx/sm90a.cuh"

namespace sievemla::stage::attention {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The heads from `first_head` of the unit on into s.q, and what they may see. Heads past the last compute on a copy of
// it. 256 threads call; a warp loads eight heads.
template <class Rows, class Smem>
__device__ inline void load_heads(const CudaParams& p, Smem& s, int unit, int begin, int first_head, int thread) {
  const auto head_of = [&](int local) { return min(first_head + local, p.fold * p.heads - 1); };
  const int lane = thread % 32, first = thread / 32 * 8;
  const HeadPlace at = place_of(p, unit, head_of(first + lane % 8));
  const std::int64_t latent = at.token * p.q_token + at.head * p.q_head,
                     rope = at.token * p.q_rope_token + at.head * p.q_rope_head;
  uint4 y[8][2], z[2];
#pragma unroll
  for (int h = 0; h < 8; ++h) {
    const auto* from = static_cast<const __nv_bfloat16*>(p.q) + __shfl_sync(~0u, latent, h) + lane * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) y[h][half] = __ldg(reinterpret_cast<const uint4*>(from + 256 * half));
  }
  if (thread == 0) s.least = lanes_of_all(p, unit);
  if (thread < 64) s.visible[thread] = lanes_of_token(p, unit, head_of(thread) / p.heads) - begin;
  if constexpr (Rows::kRope > 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      z[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q_rope) +
                                                  __shfl_sync(~0u, rope, 4 * i + lane / 8) + lane % 8 * 8));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint4*>(s.q[8] + cuda::swizzled(first + 4 * i + lane / 8, lane % 8)) = z[i];
  }
#pragma unroll
  for (int h = 0; h < 8; ++h)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<uint4*>(s.q[4 * half + lane / 8] + cuda::swizzled(first + h, lane % 8)) = y[h][half];
  cuda::fence_async();
}

// What a thread of warp group `group` (of two, 256 columns each) has of heads row and row + 8, columns 2c and the next
// of every eight, times a factor each, as the CTA's shares.
__device__ inline void put_shares(const float (&o)[2][64], float* s_shares, int group, int row, int c,
                                  const float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const to = s_shares + (row + 8 * r) * kShareStride + 256 * group + 2 * c;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 16; ++j)
        *reinterpret_cast<float2*>(to + 128 * h + 8 * j) = {o[h][4 * j + 2 * r] * factor[r],
                                                            o[h][4 * j + 2 * r + 1] * factor[r]};
  }
}

// What shares in f16 need beside them: log2 of a head's sums, and a factor, so that its greatest value is about 2^14 of
// it.
struct HalfShares {
  Told told[64];
};
// The power of two that is next below x, or near it where that would be none.
__device__ inline float power_of(float x) {
  return fminf(fmaxf(__uint_as_float(__float_as_uint(x) & 0x7F800000u), 0x1p-100f), 0x1p126f);
}

// The shares of a cluster to where they belong. All its consuming threads call.
__device__ inline void write_half_shares(const CudaParams& p, const Place& place, const HalfShares& s,
                                         const __half* s_shares, int thread, int threads) {
  constexpr int kHeads = 64;
  const Part& part = place.part;
  const int first_head = place.group * kHeads, heads = min(kHeads, p.fold * p.heads - first_head);
  const int first = kHeads * part.index / part.parts, end = min(kHeads * (part.index + 1) / part.parts, heads);
  cuda::cluster_sync();
  const auto add = [&](auto parts) {
    add_half_shares<decltype(parts)::value>(p, part.unit, part.parts, part.index, s.told, s_shares, first_head, first,
                                            end, thread / 32, threads / 32);
  };
  if (part.parts <= 2) add(std::integral_constant<int, 2>{});
  else if (part.parts <= 4) add(std::integral_constant<int, 4>{});
  else add(std::integral_constant<int, 8>{});
  cuda::cluster_meet();  // until nobody reads here any more
}

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
__device__ inline float quad_sum(float y) {
  y += __shfl_xor_sync(~0u, y, 1);
  return y + __shfl_xor_sync(~0u, y, 2);
}

#endif

}  // namespace sievemla::stage::attention
