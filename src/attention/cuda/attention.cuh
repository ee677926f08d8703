// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/attention.cuh -- stage 3 on CUDA: one main loop over cache rows, sparse or dense, decode or prefill.
//
//   s[j] = scale * q . row[j]      p = softmax(s)      out = sum_j p[j] * latent of row[j]
//
// A CTA serves a head group of a unit (params.h) over one part of its lanes. Heads are MMA columns, rows and then latent
// columns are MMA rows (S^T = K Q^T, O^T = V^T P^T), so 8 heads cost 8 heads' worth. The four warps of a group split the
// DIMENSIONS: warp w holds Q and O of latent [128 w, 128 w + 128) and 16 of the rope, and of a gathered row it reads that
// slice alone, as key and again as value. Scores are sums over the warps, so they pass through shared memory once; there the
// warps split the heads. fp8 scales meet a warp's score sums (one scale per 128 dimensions) and its copy of P, never K or V.
//
// A tile of rows, stage by stage (a barrier is the whole CTA's):
//   scores of the warp's slice -> smem | barrier A | gather the tile after next, softmax -> smem | next tile has landed,
//   barrier B | O += V^T P^T
// Barrier A: all scores of this tile are there, and the tile before is done with its stage. Barrier B: P is there, and so
// are the next tile's rows.
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/rows.cuh"

namespace sievemla::stage::attention {

// ---- shared memory ----------------------------------------------------------------------------------

template <class Rows, class Tile>
struct AttentionSmem {
  static constexpr int kCopies = Rows::kScaled ? 4 : 1;  // of P, one per scale group

  alignas(128) unsigned char rows[Tile::kStages][Tile::kTokens * Rows::kStride];
  // Strides: 4 more floats, so that heads 2c of a fragment lie 8 banks apart; 8 more bf16, so that ldmatrix meets no bank twice.
  alignas(16) float scores[Tile::kGroups][4][Tile::kHeads][Tile::kTokens + 4];
  alignas(16) unsigned short weights[Tile::kGroups][kCopies][Tile::kHeads][Tile::kTokens + 8];
  float rescale[Tile::kCtaHeads];  // of O for this tile; in the end 1 / sum
  int visible[Tile::kCtaHeads];    // lanes that the head may see
  std::int64_t offset[Tile::kStages][Tile::kTokens];  // of the row in the cache; -1: a hole
  PlanSmem plan;
  Part part;
  int is_last;
};

// ---- device -----------------------------------------------------------------------------------------

template <class Rows, class Tile>
struct Attention {
  using Smem = AttentionSmem<Rows, Tile>;
  static constexpr int kHeads = Tile::kHeads, kTokens = Tile::kTokens, kStages = Tile::kStages;
  static constexpr int kColumns = kHeads / 8;         // MMA columns of 8 heads
  static constexpr int kLanesPerHead = 128 / kHeads;  // of a warp in the softmax, over kHeads / 4 heads
  static constexpr int kMine = kTokens / kLanesPerHead;
  static_assert(kMine >= 1);

  const CudaParams& p;
  Smem& s;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, group = thread / 128;
  const int g = lane / 4, c = lane % 4;  // fragment row and column
  const Part& part;      // in shared memory
  const int first_head;  // of the CTA in the unit

  // Softmax: this lane's head and places in a tile.
  const int soft_head = warp * (kHeads / 4) + lane / kLanesPerHead, soft_first = lane % kLanesPerHead * kMine;

  std::uint32_t q[8][kColumns][2], q_rope[kColumns][2];
  float o[8][kColumns][4] = {};
  float peak = -INFINITY, sum = 0.f;  // of soft_head; the sum is this lane's share

  __device__ Attention(const CudaParams& params, Smem& smem, const Part& work, int head)
      : p(params), s(smem), part(work), first_head(head) {}

  __device__ void load_q() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int head = first_head + group * kHeads + n * 8 + g;
      const bool live = head < p.fold * p.heads;
      const HeadPlace at = place_of(p, part.unit, live ? head : 0);
      const auto* latent = static_cast<const __nv_bfloat16*>(p.q) + at.token * p.q_token + at.head * p.q_head + warp * kWarpLatent;
#pragma unroll
      for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          q[step][n][half] = live ? __ldg(reinterpret_cast<const unsigned*>(latent + step * 16 + Rows::key_column(c, half))) : 0u;
      if constexpr (Rows::kRope > 0) {
        const auto* rope = static_cast<const __nv_bfloat16*>(p.q_rope) + at.token * p.q_rope_token + at.head * p.q_rope_head + warp * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          q_rope[n][half] = live ? __ldg(reinterpret_cast<const unsigned*>(rope + 2 * c + 8 * half)) : 0u;
      }
    }
  }

  // Starts the copy of a tile's rows; a hole becomes zeros.
  __device__ void gather(int stage) {
    constexpr int kPieces = Rows::kBytes / 16;
#pragma unroll 4
    for (int row = thread / 32; row < kTokens; row += Tile::kThreads / 32) {
      const std::int64_t offset = s.offset[stage][row];
      const unsigned char* from = p.rows + (offset < 0 ? 0 : offset);
      const std::uint32_t to = cuda::shared_address(&s.rows[stage][row * Rows::kStride]);
#pragma unroll
      for (int piece = lane; piece < kPieces; piece += 32) cuda::cp_async_16(to + piece * 16, from + piece * 16, offset >= 0);
    }
  }

  // This warp's share of the scores of a tile, scaled, into shared memory.
  __device__ void score(int stage) {
    const std::uint32_t s_tile = cuda::shared_address(s.rows[stage]);
#pragma unroll
    for (int m = 0; m < kTokens / 16; ++m) {
      const std::uint32_t s_rows = s_tile + m * 16 * Rows::kStride;
      float acc[kColumns][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Fragment step[2];
        Rows::keys(s_rows, warp, i, lane, step);
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int n = 0; n < kColumns; ++n) cuda::mma_bf16(acc[n], step[k].a, q[2 * i + k][n][0], q[2 * i + k][n][1]);
      }
      if constexpr (Rows::kScaled) {
        const unsigned char* scale = s.rows[stage] + (m * 16 + g) * Rows::kStride + Rows::kScaleOffset + 4 * warp;
        const float low = *reinterpret_cast<const float*>(scale);
        const float high = *reinterpret_cast<const float*>(scale + 8 * Rows::kStride);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) acc[n][0] *= low, acc[n][1] *= low, acc[n][2] *= high, acc[n][3] *= high;
      }
      if constexpr (Rows::kRope > 0) {
        Fragment rope;
        cuda::ldmatrix_x4(rope.a, s_rows + (lane % 16) * Rows::kStride + Rows::kRopeOffset + warp * 32 + lane / 16 * 16);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) cuda::mma_bf16(acc[n], rope.a, q_rope[n][0], q_rope[n][1]);
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        float(*to)[kTokens + 4] = &s.scores[group][warp][n * 8 + 2 * c];
        to[0][m * 16 + g] = acc[n][0], to[1][m * 16 + g] = acc[n][1];
        to[0][m * 16 + g + 8] = acc[n][2], to[1][m * 16 + g + 8] = acc[n][3];
      }
    }
  }

  // Softmax of this warp's heads over the tile of lanes from `first` on: P (times the scales) and the rescale of O into
  // shared memory.
  __device__ void softmax(int stage, int first) {
    float x[kMine];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float* from = &s.scores[group][w][soft_head][soft_first];
      float share[kMine];
      if constexpr (kMine % 4 == 0) {
#pragma unroll
        for (int j = 0; j < kMine; j += 4) *reinterpret_cast<float4*>(share + j) = *reinterpret_cast<const float4*>(from + j);
      } else {
#pragma unroll
        for (int j = 0; j < kMine; ++j) share[j] = from[j];
      }
#pragma unroll
      for (int j = 0; j < kMine; ++j) x[j] = w == 0 ? share[j] : x[j] + share[j];
    }
    const int visible = s.visible[group * kHeads + soft_head] - first - soft_first;
    float most = -INFINITY;
    bool live[kMine];
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      live[j] = s.offset[stage][soft_first + j] >= 0 && j < visible;
      x[j] = live[j] ? x[j] * p.scale_log2 : -INFINITY;
      most = fmaxf(most, x[j]);
    }
#pragma unroll
    for (int d = kLanesPerHead / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    most = fmaxf(most, peak);
    const float shift = most == -INFINITY ? 0.f : most;  // (-inf) - (-inf) would be NaN
    const float rescale = cuda::exp2_approx(peak - shift);
    peak = most;
    sum *= rescale;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      x[j] = live[j] ? cuda::exp2_approx(x[j] - shift) : 0.f;
      sum += x[j];
    }
    if (lane % kLanesPerHead == 0) s.rescale[group * kHeads + soft_head] = rescale;

    constexpr int kStep = kMine < 4 ? kMine : 4;  // places at a time: more would not fit the registers
#pragma unroll
    for (int j = 0; j < kMine; j += kStep) {
      if constexpr (Rows::kScaled) {
        float4 scale[kStep];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          const unsigned char* row = s.rows[stage] + (soft_first + j + i) * Rows::kStride;
          scale[i] = *reinterpret_cast<const float4*>(row + Rows::kScaleOffset);
        }
#pragma unroll
        for (int copy = 0; copy < 4; ++copy) {
          float y[kStep];
#pragma unroll
          for (int i = 0; i < kStep; ++i) y[i] = x[j + i] * (&scale[i].x)[copy];
          store_weights<kStep>(&s.weights[group][copy][soft_head][soft_first + j], y);
        }
      } else {
        store_weights<kStep>(&s.weights[group][0][soft_head][soft_first + j], x + j);
      }
    }
  }

  template <int Count>
  __device__ static void store_weights(unsigned short* to, const float* y) {
    if constexpr (Count == 1) {
      *to = static_cast<unsigned short>(cuda::pack_bf16x2(y[0], 0.f));
    } else if constexpr (Count == 2) {
      *reinterpret_cast<unsigned*>(to) = cuda::pack_bf16x2(y[0], y[1]);
    } else {
      *reinterpret_cast<uint2*>(to) = {cuda::pack_bf16x2(y[0], y[1]), cuda::pack_bf16x2(y[2], y[3])};
    }
  }

  // O = O * rescale + V^T P^T over a tile.
  __device__ void accumulate(int stage) {
    float2 rescale[kColumns];
    bool changed = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      rescale[n] = *reinterpret_cast<const float2*>(&s.rescale[group * kHeads + n * 8 + 2 * c]);
      changed |= rescale[n].x != 1.f || rescale[n].y != 1.f;
    }
    if (__any_sync(~0u, changed)) {  // peaks settle after a few tiles
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
          o[m][n][0] *= rescale[n].x, o[m][n][1] *= rescale[n].y, o[m][n][2] *= rescale[n].x, o[m][n][3] *= rescale[n].y;
    }
    const std::uint32_t s_tile = cuda::shared_address(s.rows[stage]);
    const std::uint32_t s_weights = cuda::shared_address(s.weights[group][Rows::kScaled ? warp : 0]);
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
      std::uint32_t weight[kColumns][2];
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        std::uint32_t r[4];  // heads 8n .. 8n + 15 (or the same 8 twice), rows 0-7 and 8-15 of the step
        const int head = n * 8 + (kColumns > 1 ? lane / 16 * 8 : 0) + lane % 8;
        cuda::ldmatrix_x4(r, s_weights + 2 * (head * (kTokens + 8) + 16 * k + lane / 8 % 2 * 8));
        weight[n][0] = r[0], weight[n][1] = r[1];
        if constexpr (kColumns > 1) weight[n + 1][0] = r[2], weight[n + 1][1] = r[3];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Fragment column[2];
        Rows::values(s_tile + k * 16 * Rows::kStride, warp, i, lane, column);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int n = 0; n < kColumns; ++n) cuda::mma_bf16(o[2 * i + m][n], column[m].a, weight[n][0], weight[n][1]);
      }
    }
  }

  // Two neighbouring columns of a head, from a fragment's rows g and g + 8.
  template <class Store>
  __device__ void store_pairs(Store&& store) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int local = group * kHeads + n * 8 + 2 * c + j;
        const float factor = s.rescale[local];
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          float low = o[m][n][j] * factor, high = o[m][n][j + 2] * factor;
          int column = warp * kWarpLatent + m * 16 + 2 * g;
          if constexpr (!Rows::kPairedColumns) {  // g and g + 8: trade with the lane of the neighbouring row
            const bool odd = g % 2;
            const float got = __shfl_xor_sync(~0u, odd ? low : high, 4);
            low = odd ? got : low, high = odd ? high : got;
            column = warp * kWarpLatent + m * 16 + (odd ? 8 + g - 1 : g);
          }
          store(local, column, low, high);
        }
      }
  }

  __device__ void write(int item, int groups, int cta_group) {
#pragma unroll
    for (int d = kLanesPerHead / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const int local = group * kHeads + soft_head, head = first_head + local;
    const bool live = head < p.fold * p.heads;
    const HeadPlace at = place_of(p, part.unit, live ? head : 0);
    if (lane % kLanesPerHead == 0) {
      if (part.parts == 1) {
        s.rescale[local] = inverse_with_sink(p, sum, peak, at.head);
        if (p.lse && live) p.lse[at.token * p.lse_token + at.head * p.lse_head] = log2_of(sum, peak) * kLn2;
      } else {
        s.rescale[local] = sum == 0.f ? 0.f : 1.f / sum;
        if (live) p.partial_log2[(static_cast<std::int64_t>(item) * groups + cta_group) * Tile::kCtaHeads + local] = log2_of(sum, peak);
      }
    }
    __syncthreads();
    if (part.parts == 1) {
      store_pairs([&](int cta_head, int column, float low, float high) {
        if (first_head + cta_head >= p.fold * p.heads) return;
        const HeadPlace to = place_of(p, part.unit, first_head + cta_head);
        const std::int64_t i = to.token * p.out_token + to.head * p.out_head + column;
        if (p.out_f32) *reinterpret_cast<float2*>(static_cast<float*>(p.out) + i) = {low, high};
        else *reinterpret_cast<unsigned*>(static_cast<__nv_bfloat16*>(p.out) + i) = cuda::pack_bf16x2(low, high);
      });
      return;
    }
    float* to = p.partial + (static_cast<std::int64_t>(item) * groups + cta_group) * Tile::kCtaHeads * kLatent;
    store_pairs([&](int cta_head, int column, float low, float high) {
      if (first_head + cta_head < p.fold * p.heads) *reinterpret_cast<float2*>(to + cta_head * kLatent + column) = {low, high};
    });
    if (!p.merge_here) return;

    // Store, fence, count; whoever counts last sees all parts and merges them.
    __threadfence();
    __syncthreads();
    unsigned* ticket = p.tickets + static_cast<std::int64_t>(part.unit) * groups + cta_group;
    if (thread == 0) s.is_last = atomicAdd(ticket, 1u) == static_cast<unsigned>(part.parts - 1);
    __syncthreads();
    if (!s.is_last) return;
    if (thread == 0) *ticket = 0;
    __threadfence();
    merge_heads(p, part, cta_group, groups, Tile::kCtaHeads, 0, Tile::kCtaHeads);
  }

  __device__ void run(int item, int groups, int cta_group) {
    if (thread < Tile::kCtaHeads) {
      const int head = first_head + thread;
      s.visible[thread] = head < p.fold * p.heads ? lanes_of_token(p, part.unit, head / p.heads) : 0;
    }
    const std::int64_t tiles = (part.lanes + kTokens - 1) / kTokens;
    int first = static_cast<int>(tiles * part.index / part.parts) * kTokens;  // lane of the tile at hand
    const int end = min(part.lanes, static_cast<int>(tiles * (part.index + 1) / part.parts) * kTokens);

    // The slots of the tile to gather next are read a tile ahead, by one warp.
    std::int64_t named = -1;
    const auto read = [&](int tile) {
      if (thread < kTokens && tile + thread < end) named = read_lane(p, part.unit, tile + thread);
    };
    const auto place = [&](int tile, int stage) {
      if (thread < kTokens) s.offset[stage][thread] = tile + thread < end ? row_offset(p, named, tile + thread) : -1;
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      read(first + i * kTokens);
      place(first + i * kTokens, i);
    }
    read(first + (kStages - 1) * kTokens);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (first + i * kTokens < end) gather(i);
      cuda::cp_async_commit();
    }
    load_q();
    cuda::cp_async_wait<kStages - 2>();
    __syncthreads();

    int stage = 0;
#pragma unroll 1
    for (; first < end; first += kTokens) {
      const int free = stage == 0 ? kStages - 1 : stage - 1, next = first + (kStages - 1) * kTokens;
      score(stage);
      place(next, free);
      read(next + kTokens);
      __syncthreads();  // A
      if (next < end) gather(free);
      cuda::cp_async_commit();
      softmax(stage, first);
      cuda::cp_async_wait<kStages - 2>();
      __syncthreads();  // B
      accumulate(stage);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    __syncthreads();  // the last reads of s.rescale are done
    write(item, groups, cta_group);
  }
};

template <class Rows, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas) attention_kernel(const __grid_constant__ CudaParams p, int groups) {
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& s = *reinterpret_cast<AttentionSmem<Rows, Tile>*>(dynamic_smem);
  const int item = blockIdx.x / groups, group = blockIdx.x % groups;
  const Part part = find_part(p, item, false, Tile::kTokens, s.plan);
  if (part.parts == 0) return;  // the whole CTA
  if (threadIdx.x == 0) s.part = part;
  __syncthreads();
  Attention<Rows, Tile> attention(p, s, s.part, group * Tile::kCtaHeads);
  attention.run(item, groups, group);
}

}  // namespace sievemla::stage::attention
