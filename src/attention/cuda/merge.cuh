// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/merge.cuh -- the parts of a unit become its result, added in the order of the parts.
//
//   log2 = log2 sum_i 2^part_log2[i]       out = sum_i 2^(part_log2[i] - log2) * part[i]
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/cuda/choice.h"
#include "attention/cuda/plan.cuh"
#include "cuda/ptx/ptx.cuh"

namespace sievemla::stage::attention {

inline constexpr float kLn2 = 0.69314718055994531f, kLog2e = 1.4426950408889634f;

// Where head `head` (of the unit's fold * heads) of a unit is written.
struct HeadPlace {
  std::int64_t token;
  int head;
};
__device__ inline HeadPlace place_of(const CudaParams& p, int unit, int head) {
  if (p.fold == 1) return {unit, head};
  return {static_cast<std::int64_t>(unit) * p.fold + head / p.heads, head % p.heads};
}

// log2 of sum * 2^peak; nothing selected: {0, -inf}.
__device__ inline float log2_of(float sum, float peak) { return sum == 0.f ? -INFINITY : peak + log2f(sum); }

__device__ inline void write_lse(const CudaParams& p, HeadPlace at, float sum, float peak) {
  p.lse[at.token * p.lse_token + at.head * p.lse_head] = log2_of(sum, peak) * kLn2;
}

// 1 / (sum + sink), relative to the peak; 0 where nothing was selected.
__device__ inline float inverse_with_sink(const CudaParams& p, float sum, float peak, int head) {
  if (sum == 0.f) return 0.f;
  return 1.f / (p.sink ? sum + exp2f(p.sink[head] * kLog2e - peak) : sum);
}

__device__ inline void store4(const CudaParams& p, std::int64_t to, float4 x) {
  if (p.out_f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to) = x;
  } else {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + to) = {cuda::pack_bf16x2(x.x, x.y),
                                                                          cuda::pack_bf16x2(x.z, x.w)};
  }
}

__device__ inline void store8(const CudaParams& p, std::int64_t to, const float (&x)[8]) {
  if (p.out_f32) {
    auto* const at = reinterpret_cast<float4*>(static_cast<float*>(p.out) + to);
    at[0] = {x[0], x[1], x[2], x[3]}, at[1] = {x[4], x[5], x[6], x[7]};
  } else {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + to) = {
        cuda::pack_bf16x2(x[0], x[1]), cuda::pack_bf16x2(x[2], x[3]), cuda::pack_bf16x2(x[4], x[5]),
        cuda::pack_bf16x2(x[6], x[7])};
  }
}

// Adds up a thread's columns 4t .. 4t + 3 of every head, part by part; 16 loads in flight, of 16 / Parts heads.
template <int Parts>
__device__ inline void add_parts(const CudaParams& p, const float4* from, std::int64_t part_step, int parts, int heads,
                                 const float* s_weight, const std::int64_t* s_out_at, int threads) {
  constexpr int kHeads = 16 / Parts;
  const int thread = threadIdx.x, share = threads / 128;
#pragma unroll 1
  for (int first = thread / 128 * kHeads; first < heads; first += share * kHeads) {
    float4 sum[kHeads] = {};
#pragma unroll 1
    for (int i = 0; i < parts; i += Parts) {
      float4 x[kHeads][Parts];
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int j = 0; j < Parts; ++j)
          if (first + h < heads && i + j < parts)
            x[h][j] = __ldcg(from + (first + h) * (512 / 4) + (i + j) * part_step);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int j = 0; j < Parts; ++j) {
          const float weight = first + h < heads && i + j < parts ? s_weight[(first + h) * parts + i + j] : 0.f;
          if (weight != 0.f) {  // an empty part has no row: what lies there may be NaN
            sum[h].x += weight * x[h][j].x, sum[h].y += weight * x[h][j].y;
            sum[h].z += weight * x[h][j].z, sum[h].w += weight * x[h][j].w;
          }
        }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (first + h < heads) store4(p, s_out_at[first + h] + thread % 128 * 4, sum[h]);
  }
}

// 2^(log2 of a part - shift) for each part of a head, into `weight`; shift is the greatest log2, 0 where no part has a
// row. By `Lanes` lanes side by side, `log2_of_part(i)` once each; whole warps call.
struct Exponentials {
  float shift, sum;
};
template <int Lanes, class Log2>
__device__ inline Exponentials exponentials(float* weight, int parts, int lane, Log2 log2_of_part) {
  float peak = -INFINITY, sum = 0.f;
#pragma unroll 1
  for (int i = lane; i < parts; i += Lanes) peak = fmaxf(peak, log2_of_part(i));
#pragma unroll
  for (int d = Lanes / 2; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
  const float shift = peak == -INFINITY ? 0.f : peak;
#pragma unroll 1
  for (int i = lane; i < parts; i += Lanes) sum += weight[i] = cuda::exp2_approx(weight[i] - shift);
#pragma unroll
  for (int d = Lanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return {shift, sum};
}

// Whoever counts last merges a head group of a unit: 128 threads a head, four columns each. All threads of the CTA call
// once its part is stored, or its first `threads`, which `barrier` then joins. Partials of other CTAs are read past L1.
// s_weight holds parts * group_heads floats, s_out_at[h] is where head h of the group starts in out.
template <class Barrier>
__device__ inline void merge_if_last(const CudaParams& p, const Part& part, int group, int groups, int group_heads,
                                     int& s_is_last, float* s_weight, const std::int64_t* s_out_at, int threads,
                                     Barrier barrier) {
  const int thread = threadIdx.x, parts = part.parts;
  __threadfence();
  barrier();
  unsigned* const ticket = p.tickets + static_cast<std::int64_t>(part.unit) * groups + group;
  if (thread == 0) s_is_last = atomicAdd(ticket, 1u) == static_cast<unsigned>(parts - 1);
  barrier();
  if (!s_is_last) return;
  if (thread == 0) *ticket = 0;
  __threadfence();

  const std::int64_t step = static_cast<std::int64_t>(groups) * group_heads;  // rows from one part to the next
  const std::int64_t base = (static_cast<std::int64_t>(part.first_item) * groups + group) * group_heads;
  const int heads = min(group_heads, p.fold * p.heads - group * group_heads);

  // s_weight[head][part]: first the part's log2, then its weight.
#pragma unroll 1
  for (int i = thread; i < parts * heads; i += threads)
    s_weight[i] = __ldcg(p.partial_log2 + base + i / parts + i % parts * step);
  barrier();
  const int lane = thread % 16;  // 16 lanes a head
#pragma unroll 1
  for (int h = thread / 16; h - thread % 32 / 16 < heads; h += threads / 16) {  // whole warps
    float* weight = s_weight + h * parts;
    const int mine = h < heads ? parts : 0;
    const auto [shift, sum] = exponentials<16>(weight, mine, lane, [=](int i) { return weight[i]; });
    if (h >= heads) continue;
    const HeadPlace at = place_of(p, part.unit, group * group_heads + h);
    const float inverse = inverse_with_sink(p, sum, shift, at.head);
    if (p.lse && lane == 0) write_lse(p, at, sum, shift);
#pragma unroll 1
    for (int i = lane; i < mine; i += 16) weight[i] *= inverse;
  }
  barrier();

  const float4* from = reinterpret_cast<const float4*>(p.partial) + base * (512 / 4) + thread % 128;
  const std::int64_t part_step = step * (512 / 4);
  if (parts <= 4) add_parts<4>(p, from, part_step, parts, heads, s_weight, s_out_at, threads);
  else add_parts<16>(p, from, part_step, parts, heads, s_weight, s_out_at, threads);
}

// ---- parts that merge together, through memory --------------------------------------------------------

// The parts of a unit meet at a ticket, and each adds up some of the heads. They run at the same time, most likely: who
// has waited for long leaves its heads to the last to arrive.
struct Meeting {
  static constexpr int kBits = 6, kMostParts = 32 - 2 * kBits;
  static constexpr unsigned kArrived = 1, kLeft = 1u << kBits, kMask = kLeft - 1, kGone = kLeft << kBits;
  static constexpr long long kPatience = 100000;  // clocks

  // Parts whose heads this one has to add up, as bits. One thread calls, all threads' results being visible.
  __device__ static unsigned meet(unsigned* ticket, int index, int parts) {
    const unsigned mine = kGone << index;
    unsigned seen = atomicAdd(ticket, kArrived) + kArrived, todo = mine;
    if (static_cast<int>(seen & kMask) == parts) {
      todo |= seen;
    } else {
      const long long start = clock64();
      for (;;) {
        seen = static_cast<unsigned>(cuda::load_now(reinterpret_cast<const int*>(ticket)));
        if (static_cast<int>(seen & kMask) == parts) break;
        if (clock64() - start > kPatience && atomicCAS(ticket, seen, seen | mine) == seen) return 0;
      }
    }
    seen = atomicAdd(ticket, kLeft) + kLeft;  // who has left does not look any more
    if (static_cast<int>(seen / kLeft & kMask) + __popc(seen / kGone) == parts) *ticket = 0;
    return todo / kGone;
  }
};

// What parts of a head weigh, by `Lanes` lanes side by side, one a part. `log2`: of the sum of the lane's part; -inf:
// no part, or no row. `shift` is the greatest, 0 where none has a row.
struct PartWeight {
  float shift, weight, total;
};
template <int Lanes>
__device__ inline PartWeight weigh_part(float log2) {
  float peak = log2;
#pragma unroll
  for (int d = Lanes / 2; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
  const float shift = peak == -INFINITY ? 0.f : peak;
  const float weight = cuda::exp2_approx(log2 - shift);
  float total = weight;
#pragma unroll
  for (int d = Lanes / 2; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  return {shift, weight, total};
}

// sum += by * x, eight f16.
__device__ inline void add_halves(float (&sum)[8], float by, uint4 x) {
  const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 y = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    sum[2 * i] += by * y.x, sum[2 * i + 1] += by * y.y;
  }
}

// How a head's 2 KB of partial results hold its 512 columns: as f32, or as f16 and behind them what they have to be
// multiplied with.
struct FloatPartials {
  using Piece = float4;
  static constexpr int kColumns = 4;
  __device__ static float factor(const float*) { return 1.f; }
  __device__ static void add(float (&sum)[4], float by, float4 x) {
    sum[0] += by * x.x, sum[1] += by * x.y, sum[2] += by * x.z, sum[3] += by * x.w;
  }
  __device__ static void store(const CudaParams& p, std::int64_t to, const float (&x)[4]) {
    store4(p, to, {x[0], x[1], x[2], x[3]});
  }
};
struct HalfPartials {
  using Piece = uint4;
  static constexpr int kColumns = 8, kFactorAt = 256;  // in floats
  __device__ static float factor(const float* row) { return __ldcg(row + kFactorAt); }
  __device__ static void add(float (&sum)[8], float by, uint4 x) { add_halves(sum, by, x); }
  __device__ static void store(const CudaParams& p, std::int64_t to, const float (&x)[8]) { store8(p, to, x); }
};

// Heads [first, end) of a head group, by a warp each. `base`: the group's first row in the unit's first part. AtOnce
// parts are on their way at a time.
template <class Partials, int AtOnce>
__device__ inline void add_partials(const CudaParams& p, int unit, int parts, std::int64_t base, std::int64_t step,
                                    int first_head, int first, int end, int warp, int warps) {
  constexpr int kColumns = Partials::kColumns, kPieces = 512 / 32 / kColumns;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int local = first + warp; local < end; local += warps) {
    const HeadPlace at = place_of(p, unit, first_head + local);
    const float* const row = p.partial + (base + local) * 512;
    const bool there = lane < parts;
    const float log2 = there ? __ldcg(p.partial_log2 + base + local + lane * step) : -INFINITY;
    const float factor = there ? Partials::factor(row + lane * step * 512) : 0.f;
    auto [shift, weight, total] = weigh_part<32>(log2);
    weight *= inverse_with_sink(p, total, shift, at.head) * factor;
    if (p.lse && lane == 0) write_lse(p, at, total, shift);
    const auto* const from = reinterpret_cast<const typename Partials::Piece*>(row) + lane;
    float sum[kPieces][kColumns] = {};
#pragma unroll 1
    for (int i = 0; i < parts; i += AtOnce) {
      typename Partials::Piece x[AtOnce][kPieces];
#pragma unroll
      for (int j = 0; j < AtOnce; ++j)
#pragma unroll
        for (int k = 0; k < kPieces; ++k)
          if (i + j < parts) x[j][k] = __ldcg(from + (i + j) * step * (512 / 4) + k * 32);
#pragma unroll
      for (int j = 0; j < AtOnce; ++j) {
        const float mine = __shfl_sync(~0u, weight, i + j);
        if (mine != 0.f)  // of an empty part, what lies there may be NaN
#pragma unroll
          for (int k = 0; k < kPieces; ++k) Partials::add(sum[k], mine, x[j][k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kPieces; ++k)
      Partials::store(p, at.token * p.out_token + at.head * p.out_head + kColumns * (lane + 32 * k), sum[k]);
  }
}

// ---- parts that are a cluster ------------------------------------------------------------------------

// A CTA has in shared memory what it found of each head: log2 of the sum, and the normalised result, rows this many
// floats apart: 8 more than 512, so that fragments of eight heads meet no bank twice.
inline constexpr int kShareStride = 512 + 8;
inline constexpr int kMostCluster = 8;

// Heads [first, end) of the CTA, of which head 0 is head first_head of the unit, as the cluster's CTAs together found
// them: out and lse. A CTA may do so alone (parts = 1). A warp takes 128 * Blocks columns of a head at a time. A CTA
// begins with its own share, so that not all read one at a time; the order of the sum depends on nothing but `index`.
template <int Blocks>
__device__ inline void add_shares(const CudaParams& p, int unit, int parts, int index, const float* s_log2,
                                  const float* s_shares, int first_head, int first, int end, int warp, int warps) {
  constexpr int kPieces = 4 / Blocks;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int item = first * kPieces + warp; item < end * kPieces; item += warps) {
    const int local = item / kPieces, column = item % kPieces * (128 * Blocks) + lane * 4;
    const HeadPlace at = place_of(p, unit, first_head + local);
    const float log2 = lane < parts
                           ? cuda::cluster_load(cuda::cluster_address(cuda::shared_address(s_log2 + local), lane))
                           : -INFINITY;
    const std::uint32_t from = cuda::shared_address(s_shares + local * kShareStride + column);
    float peak = log2, weight;
#pragma unroll
    for (int d = kMostCluster / 2; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
    peak = __shfl_sync(~0u, peak, 0);
    const float shift = peak == -INFINITY ? 0.f : peak;
    float total = weight = cuda::exp2_approx(log2 - shift);
#pragma unroll
    for (int d = kMostCluster / 2; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
    total = __shfl_sync(~0u, total, 0);
    weight *= inverse_with_sink(p, total, shift, at.head);
    if (p.lse && column == 0) write_lse(p, at, total, shift);
    float4 sum[Blocks] = {};
#pragma unroll 4
    for (int i = 0; i < parts; ++i) {
      const int part = index + i < parts ? index + i : index + i - parts;
      const std::uint32_t share = cuda::cluster_address(from, part);
      const float mine = __shfl_sync(~0u, weight, part);
#pragma unroll
      for (int k = 0; k < Blocks; ++k) {
        const float4 x = cuda::cluster_load4(share + k * 512);
        sum[k].x += mine * x.x, sum[k].y += mine * x.y, sum[k].z += mine * x.z, sum[k].w += mine * x.w;
      }
    }
#pragma unroll
    for (int k = 0; k < Blocks; ++k)
      store4(p, at.token * p.out_token + at.head * p.out_head + column + k * 128, sum[k]);
  }
}

// The same from shares in f16, with half the bytes: CTAs read each other's shared memory at 3.3 TB/s in all. They are a
// head's O over a power of two of its own, not normalised: s_told[head] has log2 of the sum, and the factor that makes
// them the result.
inline constexpr int kHalfStride = 512 + 8;
struct Told {
  float log2, factor;
};

// A warp has 8 / Parts heads at a time, of at most Parts parts; of eight parts four at a time, by half the code, which
// runs once.
template <int Parts>
__device__ inline void add_half_shares(const CudaParams& p, int unit, int parts, int index, const Told* s_told,
                                       const __half* s_shares, int first_head, int first, int end, int warp,
                                       int warps) {
  constexpr int kHeads = 8 / Parts, kAtOnce = Parts < 4 ? Parts : 4;
  static_assert(kMostCluster == 8);
  const int lane = threadIdx.x % 32;
  const auto part_of = [=](int i) { return index + i < parts ? index + i : index + i - parts; };
#pragma unroll 1
  for (int local = first + warp * kHeads; local < end; local += warps * kHeads) {
    const int mine = local + lane / 8, part = lane % 8;  // eight lanes a head, one a part
    const bool there = lane / 8 < kHeads && mine < end;
    float log2 = -INFINITY, factor = 0.f;
    const auto ask = [&] {
      if (there && part < parts) {
        const std::uint32_t told = cuda::cluster_address(cuda::shared_address(&s_told[mine]), part);
        log2 = cuda::cluster_load(told), factor = cuda::cluster_load(told + 4);
      }
    };
    // Before the shares, behind which it would come last; with few parts a warp has time, and its shares go first.
    if constexpr (Parts == 8) ask();
    float weight = 0.f, sum[kHeads][2][8] = {};
#pragma unroll 1
    for (int begin = 0; begin < Parts; begin += kAtOnce) {
      uint4 x[kHeads][kAtOnce][2];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const std::uint32_t from = cuda::shared_address(s_shares + (local + h) * kHalfStride + lane * 8);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (local + h >= end || begin + i >= parts) continue;
          const std::uint32_t share = cuda::cluster_address(from, part_of(begin + i));
          x[h][i][0] = cuda::cluster_load_u4(share), x[h][i][1] = cuda::cluster_load_u4(share + 512);
        }
      }
      if (begin == 0) {  // meanwhile
        if constexpr (Parts < 8) ask();
        const PartWeight found = weigh_part<kMostCluster>(log2);
        weight = found.weight;
        if (there) {
          const HeadPlace at = place_of(p, unit, first_head + mine);
          weight *= inverse_with_sink(p, found.total, found.shift, at.head) * factor;
          if (p.lse && part == 0) write_lse(p, at, found.total, found.shift);
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (local + h >= end || begin + i >= parts) continue;
          const float by = __shfl_sync(~0u, weight, h * 8 + part_of(begin + i));
#pragma unroll
          for (int k = 0; k < 2; ++k) add_halves(sum[h][k], by, x[h][i][k]);
        }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (local + h >= end) continue;
      const HeadPlace at = place_of(p, unit, first_head + local + h);
      const std::int64_t to = at.token * p.out_token + at.head * p.out_head + lane * 8;
      store8(p, to, sum[h][0]), store8(p, to + 256, sum[h][1]);
    }
  }
}

// ---- a kernel of its own ----------------------------------------------------------------------------

// What each part of a head has to be multiplied with, into s_weight; lse. A warp calls.
__device__ inline void weigh_parts(const CudaParams& p, const float* log2s, std::int64_t step, int parts, HeadPlace at,
                                   bool tells, float* s_weight) {
  const int lane = threadIdx.x % 32;
  const auto [shift, total] =
      exponentials<32>(s_weight, parts, lane, [=](int i) { return s_weight[i] = __ldcg(log2s + i * step); });
  const float inverse = inverse_with_sink(p, total, shift, at.head);
#pragma unroll 1
  for (int i = lane; i < parts; i += 32) s_weight[i] *= inverse;
  if (p.lse && tells && lane == 0) write_lse(p, at, total, shift);
}

// A CTA adds up 512 / gridDim.y columns of a head: a warp 128 of them over some of the parts, every other, every fourth
// or every eighth; what these found is added up in shared memory. Loads wait for nothing but the kernel before. One
// warp reads what all of them weigh by: few places, which all CTAs read at once.
template <class Arch>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ CudaParams p, int groups, int group_heads) {
  constexpr int kAhead = 4, kWarps = kMergeThreads / 32;
  __shared__ float s_weight[kMergeParts];
  __shared__ float4 s_sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = 4 / static_cast<int>(gridDim.y), block = warp % blocks, share = warp / blocks,
            shares = kWarps / blocks;
  const int heads = p.fold * p.heads, unit = static_cast<int>(blockIdx.x) / heads,
            head = static_cast<int>(blockIdx.x) - unit * heads, group = head / group_heads;
  const std::int64_t step = static_cast<std::int64_t>(groups) * group_heads;  // heads from one part to the next
  const int column = (static_cast<int>(blockIdx.y) * blocks + block) * 128 + lane * 4;
  const HeadPlace at = place_of(p, unit, head);
  cuda::wait_for_kernel();
  cuda::let_next_start();
  const Part part = parts_of_unit(p, unit);
  if (part.parts <= 1) return;  // written by its only part
  const std::int64_t base =
      static_cast<std::int64_t>(part.first_item) * step + group * group_heads + head % group_heads;
  const float* const partial = p.partial + base * 512 + column;

  float4 x[kAhead];
  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (const int i = first + k * shares; i < part.parts)
        x[k] = __ldcg(reinterpret_cast<const float4*>(partial + i * step * 512));
  };
  load(share);
  if (warp == 0) weigh_parts(p, p.partial_log2 + base, step, part.parts, at, blockIdx.y == 0, s_weight);
  __syncthreads();
  float4 sum = {};
#pragma unroll 1
  for (int i = share; i < part.parts; i += kAhead * shares) {
    if (i > share) load(i);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int which = i + k * shares;
      const float weight = which < part.parts ? s_weight[which] : 0.f;
      if (weight != 0.f)  // an empty part has no row: what lies there may be NaN
        sum.x += weight * x[k].x, sum.y += weight * x[k].y, sum.z += weight * x[k].z, sum.w += weight * x[k].w;
    }
  }
  s_sums[warp][lane] = sum;
  __syncthreads();
  if (share > 0) return;
  for (int i = 1; i < shares; ++i) {
    const float4 y = s_sums[i * blocks + block][lane];
    sum.x += y.x, sum.y += y.y, sum.z += y.z, sum.w += y.w;
  }
  store4(p, at.token * p.out_token + at.head * p.out_head + column, sum);
}

}  // namespace sievemla::stage::attention
