// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/merge.cuh -- the parts of a unit become its result, added in the order of the parts.
//
//   log2 = log2 sum_i 2^part_log2[i]       out = sum_i 2^(part_log2[i] - log2) * part[i]
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/plan.cuh"
#include "cuda/ptx/ptx.cuh"

namespace sievemla::stage::attention {

inline constexpr float kLn2 = 0.69314718055994531f, kLog2e = 1.4426950408889634f;

// Where head `head` (of the unit's fold * heads) of a unit is written, and its query token.
struct HeadPlace {
  std::int64_t token;
  int head;
};
__device__ inline HeadPlace place_of(const CudaParams& p, int unit, int head) {
  return {static_cast<std::int64_t>(unit) * p.fold + head / p.heads, head % p.heads};
}

// Sum and maximum of 2^x, kept apart so that nothing overflows. Empty: {0, -inf}.
__device__ inline float log2_of(float sum, float peak) { return sum == 0.f ? -INFINITY : peak + log2f(sum); }

// 1 / (sum + sink), relative to the peak; 0 where nothing was selected.
__device__ inline float inverse_with_sink(const CudaParams& p, float sum, float peak, int head) {
  if (sum == 0.f) return 0.f;
  return 1.f / (p.sink ? sum + exp2f(p.sink[head] * kLog2e - peak) : sum);
}

__device__ inline void store4(const CudaParams& p, HeadPlace at, int column, float4 x) {
  const std::int64_t to = at.token * p.out_token + at.head * p.out_head + column;
  if (p.out_f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to) = x;
  } else {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + to) = {cuda::pack_bf16x2(x.x, x.y),
                                                                          cuda::pack_bf16x2(x.z, x.w)};
  }
}

// Merges heads [first, first + count) of a group of `group_heads` heads: 128 threads a head, four columns each. All threads
// of the CTA call. Partials were written by other CTAs: they are read past L1.
__device__ inline void merge_heads(const CudaParams& p, const Part& part, int group, int groups, int group_heads, int first,
                                   int count) {
  const int threads = blockDim.x, thread = threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(groups) * group_heads;  // rows from one part to the next
  const std::int64_t base = (static_cast<std::int64_t>(part.first_item) * groups + group) * group_heads;
  const int all_heads = p.fold * p.heads;
  for (int h0 = 0; h0 < count; h0 += threads / 128) {
    const int head = first + h0 + thread / 128, unit_head = group * group_heads + head;
    const bool live = h0 + thread / 128 < count && unit_head < all_heads;
    float peak = -INFINITY, sum = 0.f;
    if (live) {
      for (int i = thread % 32; i < part.parts; i += 32) peak = fmaxf(peak, __ldcg(p.partial_log2 + base + head + i * step));
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
    const float shift = peak == -INFINITY ? 0.f : peak;
    float4 out = {0.f, 0.f, 0.f, 0.f};
    if (live) {
      const float4* from = reinterpret_cast<const float4*>(p.partial) + (base + head) * (512 / 4) + thread % 128;
#pragma unroll 8
      for (int i = 0; i < part.parts; ++i) {
        const float weight = cuda::exp2_approx(__ldcg(p.partial_log2 + base + head + i * step) - shift);
        const float4 x = __ldcg(from + i * step * (512 / 4));
        if (weight != 0.f) {  // an empty part has no row: what lies there may be NaN
          out.x += weight * x.x, out.y += weight * x.y, out.z += weight * x.z, out.w += weight * x.w;
          sum += weight;
        }
      }
      const HeadPlace at = place_of(p, part.unit, unit_head);
      const float inverse = inverse_with_sink(p, sum, shift, at.head);
      store4(p, at, thread % 128 * 4, {out.x * inverse, out.y * inverse, out.z * inverse, out.w * inverse});
      if (p.lse && thread % 128 == 0) p.lse[at.token * p.lse_token + at.head * p.lse_head] = log2_of(sum, shift) * kLn2;
    }
  }
}

// Where parts are many: one CTA of 128 threads a head.
__global__ void __launch_bounds__(128) merge_kernel(const __grid_constant__ CudaParams p, int groups, int group_heads, int tile) {
  __shared__ PlanSmem s_plan;
  const int heads = p.fold * p.heads, head = blockIdx.x % heads;
  const Part part = find_part(p, blockIdx.x / heads, true, tile, s_plan);
  if (part.parts <= 1) return;  // written by its only part
  merge_heads(p, part, head / group_heads, groups, group_heads, head % group_heads, 1);
}

}  // namespace sievemla::stage::attention
