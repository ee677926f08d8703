// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper_heads.cuh -- what the loops by wgmma on sm_90 share: heads as f16; and, for 64 heads,
// weights that are rounded and results on their way out.
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/rows.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/ptx/sm90a.cuh"

namespace sievemla::stage::attention {

// Weights of fp8 rows carry 2^56, which with the codes' 2^-120 (cuda/mma/e4m3.cuh) keeps O far from the ends of f32; so
// do their sums with 64 heads.
inline constexpr int kWeightLog2 = 56;
inline constexpr float kWeightFactor = 0x1p56f, kCodeFactor = 0x1p120f;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Heads of fp8 rows, as operands in shared memory: blocks of 64 dimensions, swizzled, the latent made f16, each head
// times a power of two, by which its scores then are too large, in the order of Rows::query_step. Below 2^-30 of a
// head's greatest bits are lost, below 2^-38 all. Of a CTA's `Heads` each warp that calls makes some by itself.
template <class Rows, int Heads, int Warps>
struct ScaledHeads {
  static constexpr int kEach = (Heads + Warps - 1) / Warps, kAtOnce = kEach % 2 == 0 ? 2 : 1;
  static_assert(Heads % kEach == 0 && kEach <= 8);

  unsigned char (*const q)[Heads * 128];
  const int lane, first;  // first: of this warp's heads

  __device__ ScaledHeads(unsigned char (*blocks)[Heads * 128], int thread, int of_warp)
      : q(blocks), lane(of_warp), first(thread / 32 * kEach) {}

  // Asks for them. Heads past the last compute on a copy of it.
  __device__ void fetch(const CudaParams& p, int unit, int first_head) const {
    if (kEach * Warps > Heads && first >= Heads) return;
    const HeadPlace at = place_of(p, unit, min(first_head + first + lane % kEach, p.fold * p.heads - 1));
    const std::int64_t latent = at.token * p.q_token + at.head * p.q_head,
                       rope = at.token * p.q_rope_token + at.head * p.q_rope_head;
    const auto copy = [&](int block, int head, const void* from, std::int64_t element) {
      cuda::cp_async_16(cuda::shared_address(q[block]) + cuda::swizzled(head, lane % 8),
                        static_cast<const __nv_bfloat16*>(from) + element, 16);
    };
#pragma unroll
    for (int h = 0; h < kEach; ++h) {
      const std::int64_t from = __shfl_sync(~0u, latent, h) + lane * 8;
      copy(lane / 8, first + h, p.q, from), copy(4 + lane / 8, first + h, p.q, from + 256);
    }
    if constexpr (Rows::kRope > 0) {
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        const std::int64_t from = __shfl_sync(~0u, rope, i + lane / 8) + lane % 8 * 8;
        if (i + lane / 8 < kEach) copy(8, first + i + lane / 8, p.q_rope, from);
      }
    }
    cuda::cp_async_commit();
  }
  // When they are there: f16. scale[head]: what a score is to be multiplied with, `by` included.
  __device__ void scale(float (&scale)[Heads], float by) const {
    cuda::cp_async_wait<0>();
    __syncwarp();
    if (kEach * Warps == Heads || first < Heads) {
#pragma unroll 1
      for (int h = first; h < first + kEach; h += kAtOnce) scale_heads(h, scale, by);
    }
    cuda::fence_async();
  }

 private:
  // By half of a word: `most`, or the greatest magnitude in x.
  __device__ static std::uint32_t larger(std::uint32_t most, uint4 x) {
    const auto with = [&](std::uint32_t pair) { most = __vmaxu2(most, pair & 0x7FFF7FFFu); };
    with(x.x), with(x.y), with(x.z), with(x.w);
    return most;
  }
  // kAtOnce heads, since each is a chain of instructions.
  __device__ void scale_heads(int first, float* scale, float by_all) const {
    const auto piece = [&](int block, int n, int i) -> uint4& {
      return *reinterpret_cast<uint4*>(q[block] + cuda::swizzled(first + n, i));
    };
    const bool has_rope = Rows::kRope > 0 && lane < 8;
    uint4 y[kAtOnce][2], z[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      y[n][0] = piece(lane / 8, n, lane % 8), y[n][1] = piece(4 + lane / 8, n, lane % 8);
      if (has_rope) z[n] = piece(8, n, lane);
    }
    std::uint32_t most[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      most[n] = larger(larger(0, y[n][0]), y[n][1]);
      if (has_rope) most[n] = larger(most[n], z[n]);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) most[n] = __reduce_max_sync(~0u, max(most[n] & 0xFFFF, most[n] >> 16));
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      // The greatest becomes 2^13 or next above it: short of f16's end, and 512 products with codes far from f32's.
      const std::uint32_t exponent = min(max(127 + 127 + 13 - static_cast<int>(most[n] >> 7), 1), 253);
      const float power = __uint_as_float(exponent << 23);
      if (lane == 0) scale[first + n] = by_all * __uint_as_float((254 - exponent) << 23);
      const auto of = [&](std::uint32_t pair) {
        return cuda::pack_f16x2(__uint_as_float(pair << 16) * power, __uint_as_float(pair & 0xFFFF0000u) * power);
      };
      const int place = lane % 2 * 8;  // of half a step
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto* const low = reinterpret_cast<unsigned char*>(&piece(4 * half + lane / 8, n, lane % 8 & ~1)) + place;
        auto* const high = reinterpret_cast<unsigned char*>(&piece(4 * half + lane / 8, n, lane % 8 | 1)) + place;
        *reinterpret_cast<uint2*>(low) = {of(y[n][half].x), of(y[n][half].z)};
        *reinterpret_cast<uint2*>(high) = {of(y[n][half].y), of(y[n][half].w)};
      }
      if (has_rope) {
        constexpr std::uint32_t kZero = 0x80008000u;  // -0: added, it changes nothing
        const std::uint32_t by = exponent << 7 | exponent << 23;
        piece(8, n, lane) = {cuda::fma_bf16x2(z[n].x, by, kZero), cuda::fma_bf16x2(z[n].y, by, kZero),
                             cuda::fma_bf16x2(z[n].z, by, kZero), cuda::fma_bf16x2(z[n].w, by, kZero)};
      }
    }
  }
};
// A fragment of keys as f16, of what Rows::load_keys has loaded.
__device__ inline Fragment f16_key(const Raw& raw, int k) {
  return {cuda::e4m3_f16x2<0>(raw.r[2 * k]), cuda::e4m3_f16x2<0>(raw.r[2 * k + 1]), cuda::e4m3_f16x2<1>(raw.r[2 * k]),
          cuda::e4m3_f16x2<1>(raw.r[2 * k + 1])};
}

// Parts that merge through memory, when this one's results are stored: add(i) for each whose heads this CTA adds up.
// `barrier` joins the threads that call.
template <class Barrier, class Add>
__device__ inline void meet_parts(const CudaParams& p, const Place& place, int groups, unsigned& s_todo, int thread,
                                  Barrier barrier, Add add) {
  __threadfence();
  barrier();
  const int list = (place.item / place.part.parts) * groups + place.group;
  if (thread == 0) s_todo = Meeting::meet(p.tickets + list, place.part.index, place.part.parts);
  barrier();
  __threadfence();
#pragma unroll 1
  for (unsigned todo = s_todo; todo != 0; todo &= todo - 1) add(__ffs(static_cast<int>(todo)) - 1);
}
// Heads of part i of a unit, of which others may be added up by other parts.
template <class Partials, int AtOnce>
__device__ inline void add_part(const CudaParams& p, const Place& place, int groups, int i, int warp, int warps) {
  constexpr int kHeads = 64;
  const Part& part = place.part;
  const int first_head = place.group * kHeads, heads = min(kHeads, p.fold * p.heads - first_head);
  const std::int64_t step = static_cast<std::int64_t>(groups) * kHeads;
  add_partials<Partials, AtOnce>(p, part.unit, part.parts, part.first_item * step + first_head, step, first_head,
                                 heads * i / part.parts, heads * (i + 1) / part.parts, warp, warps);
}
// Row of head 0 of the CTA in the partial results.
__device__ inline std::int64_t partial_row(const Place& place, int groups) {
  return (static_cast<std::int64_t>(place.item) * groups + place.group) * 64;
}

// The shares of this CTA, or of its cluster, to where they belong, or as partial results. `barrier` joins the threads
// that call.
template <class Barrier>
__device__ inline void write_shares(const CudaParams& p, const Place& place, int groups, const float* s_log2,
                                    const float* s_shares, int thread, int threads, Barrier barrier) {
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
    return;
  }
  const std::int64_t partial = partial_row(place, groups);
  if (thread < heads) p.partial_log2[partial + thread] = s_log2[thread];
  for (int local = warp; local < heads; local += warps)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int column = 128 * k + 4 * lane;
      *reinterpret_cast<float4*>(p.partial + (partial + local) * kLatent + column) =
          *reinterpret_cast<const float4*>(s_shares + local * kShareStride + column);
    }
}

// Two weights rounded, or what rounding takes from them.
template <bool Residue>
__device__ inline std::uint32_t rounded(float y, float z) {
  if constexpr (Residue) y -= __bfloat162float(__float2bfloat16_rn(y)), z -= __bfloat162float(__float2bfloat16_rn(z));
  return cuda::pack_bf16x2(y, z);
}
#endif

}  // namespace sievemla::stage::attention
