// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/attention.cuh -- stage 3 on CUDA: the main loop of mma.sync, which every config has, over cache
// rows, sparse or dense, decode or prefill.
//
//   s[j] = scale * q . row[j]      p = softmax(s)      out = sum_j p[j] * latent of row[j]
//
// A CTA serves a head group of a unit (params.h) over one part of its lanes. Heads are MMA columns, rows and then
// latent columns are MMA rows (S^T = K Q^T, O^T = V^T P^T), so 8 heads cost 8 heads' worth. The four warps of a group
// split the DIMENSIONS: warp w holds Q and O of latent [128 w, 128 w + 128) and 16 of the rope, and of a gathered row
// it reads that slice alone, as key and again as value. Scores are sums over the warps, so they pass through shared
// memory once; there the warps split the heads. fp8 scales meet a warp's score sums (one scale per 128 dimensions) and
// its copy of P, never K or V.
//
// P is rounded to bf16. Where a place has more than 1 / p.heavy of the sum so far (a short list, a peaked softmax),
// what rounding took from it would show in the result: such a tile goes through V once more, with the residue as P.
//
// A tile of rows, stage by stage (a barrier is the whole CTA's):
//   scores of the warp's slice -> smem | barrier A | gather the tile after next, softmax -> smem | next tile has
//   landed, barrier B | O += V^T P^T
// Barrier A: all scores of this tile are there, and the tile before is done with its stage. Barrier B: P is there, and
// so are the next tile's rows.
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/choice.h"
#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/rows.cuh"

namespace sievemla::stage::attention {

inline constexpr int kLookUp = 512;  // lanes whose slots are looked up at a time, by the whole CTA

// ---- shared memory ----------------------------------------------------------------------------------

template <class Rows, class Tile>
struct AttentionSmem {
  static constexpr int kCopies = Rows::kScaled ? 4 : 1;  // of P, one per scale group

  alignas(128) unsigned char rows[Tile::kStages][Tile::kTokens * Rows::kStride];
  // Strides: 4 more floats, so that heads 2c of a fragment lie 8 banks apart; 8 more bf16, so that ldmatrix meets no
  // bank twice.
  alignas(16) float scores[Tile::kGroups][4][Tile::kHeads][Tile::kTokens + 4];
  alignas(16) unsigned short weights[Tile::kGroups][kCopies][Tile::kHeads][Tile::kTokens + 8];
  float rescale[Tile::kCtaHeads];  // of O for this tile; in the end 1 / sum
  int visible[Tile::kCtaHeads];    // lanes of this part that the head may see
  int begin, end;                  // lanes of the unit that are this part's
  int least;                       // lanes of the unit that every token sees
  alignas(16) float scale[Tile::kGroups][Rows::kScaled ? 4 : 1][Tile::kTokens];  // of the group's tile, turned around
  alignas(4) bool heavy[Tile::kGroups][4];         // by warp: the tile's P has to go through V twice
  alignas(16) const unsigned char* from[kLookUp];  // rows of the lanes looked up last; any address for a hole
  unsigned live[2][kLookUp / 32];        // bit per lane: not a hole; of the lanes looked up last and of those before
  const void* list;                      // of the unit
  std::int64_t out_at[Tile::kCtaHeads];  // of the head's row in out, in elements
  // A thread's own fragments of the rope of Q, where 32 heads leave no registers for them.
  static constexpr bool kHoldsRope = Tile::kHeads == 32 && Rows::kRope > 0;
  uint2 q_rope[kHoldsRope ? Tile::kHeads / 8 : 1][kHoldsRope ? Tile::kThreads : 1];
  PlanSmem plan;
  int is_last;
};

// ---- device -----------------------------------------------------------------------------------------

// What a CTA's heads see and where their results go; a thread each. The plan is there.
template <class Smem>
__device__ inline void place_heads(const CudaParams& p, Smem& s, int heads) {
  const int local = static_cast<int>(threadIdx.x), unit = s.plan.place.part.unit;
  if (local >= heads) return;
  const int head = s.plan.place.group * heads + local;
  const bool live = head < p.fold * p.heads;
  const HeadPlace at = place_of(p, unit, live ? head : 0);
  s.visible[local] = live ? lanes_of_token(p, unit, head / p.heads) - s.begin : 0;
  s.out_at[local] = at.token * p.out_token + at.head * p.out_head;
}

template <class Rows, class Tile, bool Clusters>
struct Attention {
  using Smem = AttentionSmem<Rows, Tile>;
  static constexpr int kHeads = Tile::kHeads, kTokens = Tile::kTokens, kStages = Tile::kStages;
  static constexpr int kColumns = kHeads / 8;         // MMA columns of 8 heads
  static constexpr int kLanesPerHead = 128 / kHeads;  // of a warp in the softmax, over kHeads / 4 heads
  static constexpr int kMine = kTokens / kLanesPerHead;
  static constexpr int kLoads = kColumns < 4 ? 4 : 2;  // fragments in flight, as registers allow
  static_assert(kMine >= 1);

  const CudaParams& p;
  Smem& s;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, group = thread / 128;
  const int g = lane / 4, c = lane % 4;  // fragment row and column
  const Part& part;                      // in shared memory

  // Softmax: this lane's head and places in a tile.
  const int soft_head = warp * (kHeads / 4) + lane / kLanesPerHead, soft_first = lane % kLanesPerHead * kMine;

  std::uint32_t q[8][kColumns][2], q_rope[Smem::kHoldsRope ? 1 : kColumns][2];
  float o[8][kColumns][4] = {};
  float peak = -INFINITY, sum = 0.f;  // of soft_head: what scores are relative to, and this lane's share of the sum

  __device__ Attention(const CudaParams& params, Smem& smem) : p(params), s(smem), part(smem.plan.place.part) {}

  __device__ int first_head() const { return s.plan.place.group * Tile::kCtaHeads; }  // of the CTA in the unit

  // Heads past the last compute on a copy of it, and see nothing.
  __device__ void load_q() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int head = min(first_head() + group * kHeads + n * 8 + g, p.fold * p.heads - 1);
      const HeadPlace at = place_of(p, part.unit, head);
      const auto* latent =
          static_cast<const __nv_bfloat16*>(p.q) + at.token * p.q_token + at.head * p.q_head + warp * kWarpLatent;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint2 pair = Rows::query(latent + step * 16, c);
        q[step][n][0] = pair.x, q[step][n][1] = pair.y;
      }
      if constexpr (Rows::kRope > 0) {
        const auto* rope = static_cast<const __nv_bfloat16*>(p.q_rope) + at.token * p.q_rope_token +
                           at.head * p.q_rope_head + warp * 16;
        const uint2 pair = {__ldg(reinterpret_cast<const unsigned*>(rope + 2 * c)),
                            __ldg(reinterpret_cast<const unsigned*>(rope + 2 * c + 8))};
        if constexpr (Smem::kHoldsRope) s.q_rope[n][thread] = pair;
        else q_rope[n][0] = pair.x, q_rope[n][1] = pair.y;
      }
    }
  }

  // Q * kQueryFactor, apart from load_q so that nothing waits for the loads.
  __device__ void scale_q() {
    if constexpr (Rows::kQueryFactor != 0) {
#pragma unroll
      for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            q[step][n][half] = cuda::fma_bf16x2(q[step][n][half], Rows::kQueryFactor, 0x80008000u);
    }
  }

  // Finds the rows of kLookUp lanes from the `from`-th of this part on.
  __device__ void look_up(int from) {
    const int first = s.begin + from, end = s.end, block = from / kLookUp;
#pragma unroll 1
    for (int i = thread; i < kLookUp; i += Tile::kThreads) {
      const int at = first + i;
      if (at - lane >= end) break;  // the whole warp
      const std::int64_t offset = at < end ? row_offset(p, read_lane(p, s.list, at), at) : -1;
      s.from[i] = p.rows + max(offset, std::int64_t{0});
      const unsigned live = __ballot_sync(~0u, offset >= 0);
      if (lane == 0) s.live[block % 2][i / 32] = live;
    }
  }
  // Bit per row of the tile whose first lane is the `at`-th of this part.
  __device__ unsigned live_rows(int at) const { return s.live[at / kLookUp % 2][at % kLookUp / 32] >> at % 32; }

  // Starts the copy of the rows of the tile whose first lane is the `at`-th of this part; a hole becomes zeros. A warp
  // takes neighbouring rows, a lane 16-byte pieces of them.
  __device__ void gather(int at, int stage) {
    constexpr int kPieces = Rows::kBytes / 16, kRows = kTokens / (Tile::kThreads / 32);
    const int first = thread / 32 * kRows;
    const unsigned live = live_rows(at) >> first;
    const unsigned char* const* rows = &s.from[at % kLookUp + first];
    const std::uint32_t to = cuda::shared_address(s.rows[stage]) + first * Rows::kStride + lane * 16;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const unsigned char* from = rows[row] + lane * 16;
      const int bytes = live >> row & 1 ? 16 : 0;
#pragma unroll
      for (int piece = 0; piece < kPieces; piece += 32)
        if (piece + 32 <= kPieces || lane < kPieces - piece)
          cuda::cp_async_16(to + row * Rows::kStride + piece * 16, from + piece * 16, bytes);
    }
  }

  // This warp's share of the scores of a tile, scaled, into shared memory.
  __device__ void score(int stage) {
    const std::uint32_t s_tile = cuda::shared_address(s.rows[stage]);
#pragma unroll(kColumns >= 4 ? 1 : 2)
    for (int m = 0; m < kTokens / 16; ++m) {
      const std::uint32_t s_rows = s_tile + m * 16 * Rows::kStride;
      constexpr int kAhead = kLoads;
      Raw raw[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead - 1; ++i) Rows::load_keys(raw[i], s_rows, warp, i, lane);
      Fragment rope;
      if constexpr (Rows::kRope > 0)
        cuda::ldmatrix_x4(rope.a,
                          s_rows + (lane % 16) * Rows::kStride + Rows::kRopeOffset + warp * 32 + lane / 16 * 16);
      float low = 1.f, high = 1.f;
      if constexpr (Rows::kScaled) {
        const unsigned char* scale = s.rows[stage] + (m * 16 + g) * Rows::kStride + Rows::kScaleOffset + 4 * warp;
        low = *reinterpret_cast<const float*>(scale), high = *reinterpret_cast<const float*>(scale + 8 * Rows::kStride);
        if (c == 0) {
          s.scale[group][warp][m * 16 + g] = finite_scale(low) * Rows::kWeightFactor;
          s.scale[group][warp][m * 16 + g + 8] = finite_scale(high) * Rows::kWeightFactor;
        }
        low *= Rows::kKeyFactor, high *= Rows::kKeyFactor;
      }
      float acc[kColumns][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i + kAhead - 1 < 4) Rows::load_keys(raw[(i + kAhead - 1) % kAhead], s_rows, warp, i + kAhead - 1, lane);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const Fragment step = Rows::key(raw[i % kAhead], k);
#pragma unroll
          for (int n = 0; n < kColumns; ++n) cuda::mma_bf16(acc[n], step.a, q[2 * i + k][n][0], q[2 * i + k][n][1]);
        }
      }
      if constexpr (Rows::kScaled) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) acc[n][0] *= low, acc[n][1] *= low, acc[n][2] *= high, acc[n][3] *= high;
      }
      if constexpr (Rows::kRope > 0) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          if constexpr (Smem::kHoldsRope) {
            const uint2 pair = s.q_rope[n][thread];
            cuda::mma_bf16(acc[n], rope.a, pair.x, pair.y);
          } else {
            cuda::mma_bf16(acc[n], rope.a, q_rope[n][0], q_rope[n][1]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        float (*to)[kTokens + 4] = &s.scores[group][warp][n * 8 + 2 * c];
        to[0][m * 16 + g] = acc[n][0], to[1][m * 16 + g] = acc[n][1];
        to[0][m * 16 + g + 8] = acc[n][2], to[1][m * 16 + g + 8] = acc[n][3];
      }
    }
  }

  // What some tokens may not see must not reach them as 0 * NaN: its scores are there already.
  __device__ void hide(int stage, int at) {
    if (p.fold == 1 || s.begin + at + kTokens <= s.least) return;
#pragma unroll 1
    for (int row = max(0, s.least - s.begin - at) + thread / 32; row < kTokens; row += Tile::kThreads / 32)
      Rows::clear_not_finite(s.rows[stage] + row * Rows::kStride, lane);
  }

  // Scaled scores (to base 2) of this lane's head and places in the tile whose first lane is the `at`-th of this part;
  // the bits say which places count.
  __device__ unsigned scores_of(int at, float (&x)[kMine]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float share[kMine];
      load<kMine>(share, &s.scores[group][w][soft_head][soft_first]);
#pragma unroll
      for (int j = 0; j < kMine; ++j) x[j] = w == 0 ? share[j] : x[j] + share[j];
    }
#pragma unroll
    for (int j = 0; j < kMine; ++j) x[j] *= p.scale_log2;
    const int visible = s.visible[group * kHeads + soft_head] - at - soft_first;
    return visible <= 0 ? 0u : (live_rows(at) >> soft_first) & (~0u >> (visible < 32 ? 32 - visible : 0));
  }

  // Softmax of this warp's heads over a tile: P (times the scales), the rescale of O, and whether some of P is so large
  // a part of the sum so far that its rounding to bf16 would show, into shared memory.
  __device__ void softmax(int at) {
    float x[kMine];
    const unsigned live = scores_of(at, x);
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < kMine; ++j)
      if (live >> j & 1) most = fmaxf(most, x[j]);
#pragma unroll
    for (int d = kLanesPerHead / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    most = most > peak + p.slack ? most : peak;          // most tiles leave O as it is
    const float shift = most == -INFINITY ? 0.f : most;  // (-inf) - (-inf) would be NaN
    const float rescale = cuda::exp2_approx(peak - shift);
    peak = most;
    sum *= rescale;
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      x[j] = live >> j & 1 ? cuda::exp2_approx(x[j] - shift) : 0.f;
      sum += x[j];
      largest = fmaxf(largest, x[j]);
    }
    if (lane % kLanesPerHead == 0) s.rescale[group * kHeads + soft_head] = rescale;
#pragma unroll
    for (int copy = 0; copy < Smem::kCopies; ++copy) {
      float y[kMine];
      weights_of(copy, x, y);
      store_bf16<kMine>(&s.weights[group][copy][soft_head][soft_first], y);
    }

    bool heavy = largest * p.heavy > sum;  // of this lane's share; of the whole sum where that is so
    if (__any_sync(~0u, heavy)) {
      float all = sum;
#pragma unroll
      for (int d = kLanesPerHead / 2; d > 0; d /= 2) all += __shfl_xor_sync(~0u, all, d);
      heavy = largest * p.heavy > all;
    }
    const bool any = __any_sync(~0u, heavy);
    if (lane == 0) s.heavy[group][warp] = any;
  }

  // What rounding took from P, in place of the scores: each warp over those of its own heads.
  __device__ void residue(int at) {
    float x[kMine];
    const unsigned live = scores_of(at, x);
    const float shift = peak == -INFINITY ? 0.f : peak;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kMine; ++j) x[j] = live >> j & 1 ? cuda::exp2_approx(x[j] - shift) : 0.f;
#pragma unroll
    for (int copy = 0; copy < Smem::kCopies; ++copy) {
      float y[kMine];
      weights_of(copy, x, y);
#pragma unroll
      for (int j = 0; j < kMine; ++j) y[j] -= __bfloat162float(__float2bfloat16_rn(y[j]));
      store_bf16<kMine>(reinterpret_cast<unsigned short*>(&s.scores[group][copy][soft_head][0]) + soft_first, y);
    }
  }

  // P times the scales of one group.
  __device__ void weights_of(int copy, const float (&x)[kMine], float (&y)[kMine]) const {
    if constexpr (Rows::kScaled) load<kMine>(y, &s.scale[group][copy][soft_first]);
#pragma unroll
    for (int j = 0; j < kMine; ++j) y[j] = Rows::kScaled ? x[j] * y[j] : x[j];
  }

  template <int Count>
  __device__ static void load(float* to, const float* from) {
    if constexpr (Count % 4 == 0) {
#pragma unroll
      for (int j = 0; j < Count; j += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + j);
        to[j] = x.x, to[j + 1] = x.y, to[j + 2] = x.z, to[j + 3] = x.w;
      }
    } else if constexpr (Count == 2) {
      const float2 x = *reinterpret_cast<const float2*>(from);
      to[0] = x.x, to[1] = x.y;
    } else {
      to[0] = *from;
    }
  }
  template <int Count>
  __device__ static void store_bf16(unsigned short* to, const float* y) {
    if constexpr (Count == 1) {
      *to = static_cast<unsigned short>(cuda::pack_bf16x2(y[0], 0.f));
    } else if constexpr (Count == 2) {
      *reinterpret_cast<unsigned*>(to) = cuda::pack_bf16x2(y[0], y[1]);
    } else if constexpr (Count == 4) {
      *reinterpret_cast<uint2*>(to) = {cuda::pack_bf16x2(y[0], y[1]), cuda::pack_bf16x2(y[2], y[3])};
    } else {
      static_assert(Count == 8);
      *reinterpret_cast<uint4*>(to) = {cuda::pack_bf16x2(y[0], y[1]), cuda::pack_bf16x2(y[2], y[3]),
                                       cuda::pack_bf16x2(y[4], y[5]), cuda::pack_bf16x2(y[6], y[7])};
    }
  }

  __device__ void rescale_o() {
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
          o[m][n][0] *= rescale[n].x, o[m][n][1] *= rescale[n].y, o[m][n][2] *= rescale[n].x,
              o[m][n][3] *= rescale[n].y;
    }
  }

  // O += V^T P^T over a tile. P of head h starts at s_weights + h * head_bytes.
  __device__ void accumulate(int stage, std::uint32_t s_weights, int head_bytes) {
    const std::uint32_t s_tile = cuda::shared_address(s.rows[stage]);
#pragma unroll(kColumns >= 4 ? 1 : 2)
    for (int k = 0; k < kTokens / 16; ++k) {
      const std::uint32_t s_rows = s_tile + k * 16 * Rows::kStride;
      constexpr int kAhead = kLoads;
      Raw raw[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead - 1; ++i) Rows::load_values(raw[i], s_rows, warp, i, lane);
      std::uint32_t weight[kColumns][2];
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        std::uint32_t r[4];  // heads 8n .. 8n + 15, rows 0-7 and 8-15 of the step
        const int head = n * 8 + lane / 16 * 8 + lane % 8;
        cuda::ldmatrix_x4(r, s_weights + head * head_bytes + 2 * (16 * k + lane / 8 % 2 * 8));
        weight[n][0] = r[0], weight[n][1] = r[1], weight[n + 1][0] = r[2], weight[n + 1][1] = r[3];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i + kAhead - 1 < 4) Rows::load_values(raw[(i + kAhead - 1) % kAhead], s_rows, warp, i + kAhead - 1, lane);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const Fragment column = Rows::value(raw[i % kAhead], m);
#pragma unroll
          for (int n = 0; n < kColumns; ++n) cuda::mma_bf16(o[2 * i + m][n], column.a, weight[n][0], weight[n][1]);
        }
      }
    }
  }

  // Column of a fragment's row pair of 16 within the row, and the pair's values as neighbours.
  __device__ int first_column() const {
    return warp * kWarpLatent + (Rows::kPairedColumns ? 2 * g : g % 2 ? g + 7 : g);
  }
  __device__ float2 neighbours(float low, float high) const {
    if constexpr (Rows::kPairedColumns) return {low, high};
    const bool odd = g % 2;  // columns g and g + 8: trade with the lane of the neighbouring row
    const float got = __shfl_xor_sync(~0u, odd ? low : high, 4);
    return odd ? float2{got, high} : float2{low, got};
  }

  // Result of head `local` of the CTA, from column first_column() on: null past the last head.
  template <class T>
  __device__ void store_all(T* (&to)[kColumns][2]) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float factor = s.rescale[group * kHeads + n * 8 + 2 * c + j];
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          const float2 x = neighbours(o[m][n][j] * factor, o[m][n][j + 2] * factor);
          if (!to[n][j]) continue;
          if constexpr (sizeof(T) == 4) *reinterpret_cast<float2*>(to[n][j] + m * 16) = x;
          else *reinterpret_cast<unsigned*>(to[n][j] + m * 16) = cuda::pack_bf16x2(x.x, x.y);
        }
      }
  }
  template <class T>
  __device__ void store_out() const {
    T* to[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int local = group * kHeads + n * 8 + 2 * c + j;
        to[n][j] = first_head() + local < p.fold * p.heads ? static_cast<T*>(p.out) + s.out_at[local] + first_column()
                                                           : nullptr;
      }
    store_all(to);
  }

  // The parts of the unit are a cluster: each adds up some of the heads.
  __device__ void write_with_cluster(int local) {
    auto* const s_shares = reinterpret_cast<float*>(s.rows);
    auto* const s_log2 = reinterpret_cast<float*>(s.weights);
    static_assert(offsetof(Smem, weights) >= sizeof(float) * kShareStride * Tile::kCtaHeads);
    static_assert(sizeof(s.weights) >= sizeof(float) * Tile::kCtaHeads);
    if (lane % kLanesPerHead == 0) {
      s_log2[local] = log2_of(sum, peak);
      s.rescale[local] = sum == 0.f ? 0.f : Rows::kValueFactor / sum;
    }
    __syncthreads();
    float* to[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        to[n][j] = s_shares + (group * kHeads + n * 8 + 2 * c + j) * kShareStride + first_column();
    store_all(to);
    cuda::cluster_sync();
    add_shares<1>(p, part.unit, part.parts, part.index, s_log2, s_shares, first_head(),
                  Tile::kCtaHeads * part.index / part.parts,
                  min(Tile::kCtaHeads * (part.index + 1) / part.parts, p.fold * p.heads - first_head()), thread / 32,
                  Tile::kThreads / 32);
    cuda::cluster_meet();  // until nobody reads here any more
  }

  __device__ void write(int groups) {
    const int item = s.plan.place.item, cta_group = s.plan.place.group;
#pragma unroll
    for (int d = kLanesPerHead / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const int local = group * kHeads + soft_head, head = first_head() + local;
    const bool live = head < p.fold * p.heads;
    const std::int64_t partial = (static_cast<std::int64_t>(item) * groups + cta_group) * Tile::kCtaHeads;
    if constexpr (Clusters) {
      if (part.parts > 1 && p.merge == Merge::cluster) return write_with_cluster(local);
    }
    if (lane % kLanesPerHead == 0) {
      const HeadPlace at = place_of(p, part.unit, live ? head : 0);
      if (part.parts == 1) {
        s.rescale[local] = inverse_with_sink(p, sum, peak, at.head) * Rows::kValueFactor;
        if (p.lse && live) write_lse(p, at, sum, peak);
      } else {
        s.rescale[local] = sum == 0.f ? 0.f : Rows::kValueFactor / sum;
        if (live) p.partial_log2[partial + local] = log2_of(sum, peak);
      }
    }
    __syncthreads();
    if (part.parts == 1) {
      if (p.out_f32) store_out<float>();
      else store_out<unsigned short>();
      return;
    }
    float* to[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int h = group * kHeads + n * 8 + 2 * c + j;
        to[n][j] = first_head() + h < p.fold * p.heads ? p.partial + (partial + h) * kLatent + first_column() : nullptr;
      }
    store_all(to);
    if (p.merge != Merge::last) return;

    static_assert(sizeof(s.scores) >= kMergeBytes / kHeadBytes * sizeof(float));
    merge_if_last(p, part, cta_group, groups, Tile::kCtaHeads, s.is_last, &s.scores[0][0][0][0], s.out_at,
                  Tile::kThreads, [] { __syncthreads(); });
  }

  // O takes in a tile: rescale, V^T P^T, and once more with the residue of P where some of it is heavy.
  __device__ void take(int stage, int at) {
    rescale_o();
    const int copy = Rows::kScaled ? warp : 0;
    accumulate(stage, cuda::shared_address(s.weights[group][copy]), 2 * (kTokens + 8));
    unsigned heavy = *reinterpret_cast<const unsigned*>(s.heavy[0]);
    if constexpr (Tile::kGroups == 2) heavy |= *reinterpret_cast<const unsigned*>(s.heavy[1]);
    if (heavy == 0) return;
    residue(at);
    __syncthreads();
    accumulate(stage, cuda::shared_address(s.scores[group][copy]), 4 * (kTokens + 4));
    __syncthreads();  // the next tile's scores may be written
  }

  __device__ void run(int groups) {
    const int tiles = (s.end - s.begin + kTokens - 1) / kTokens;
    look_up(0);
    if constexpr (!Clusters) place_heads(p, s, Tile::kCtaHeads);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < tiles) gather(i * kTokens, i);
      cuda::cp_async_commit();
    }
    load_q();
    scale_q();
    cuda::cp_async_wait<kStages - 2>();
    __syncthreads();

    int stage = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int free = stage == 0 ? kStages - 1 : stage - 1, next = tile + kStages - 1, at = tile * kTokens;
      score(stage);
      if (next * kTokens % kLookUp == 0) look_up(next * kTokens);
      __syncthreads();  // A
      if (next < tiles) gather(next * kTokens, free);
      cuda::cp_async_commit();
      hide(stage, at);
      softmax(at);
      cuda::cp_async_wait<kStages - 2>();
      __syncthreads();  // B
      take(stage, at);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    __syncthreads();  // the last reads of s.rescale are done
    write(groups);
  }
};

// Arch only tells apart the kernels of two configs that have a tile in common.
template <class Arch, class Rows, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    attention_kernel(const __grid_constant__ CudaParams p, int groups) {
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& s = *reinterpret_cast<AttentionSmem<Rows, Tile>*>(dynamic_smem);
  if (!plan_is_told(p)) cuda::wait_for_kernel();
  const Place place = find_place(p, groups, Tile::kTokens, s.plan);
  if (place.part.parts == 0) return;  // the whole CTA
  if (threadIdx.x == 0) {
    const LaneRange range = range_of(place.part, Tile::kTokens);
    s.begin = range.begin, s.end = range.end, s.least = lanes_of_all(p, place.part.unit);
    tell_merger(p, place);
    s.plan.place = place, s.list = list_of(p, place.part.unit);
  }
  __syncthreads();
  constexpr bool kClusters = Arch::kCluster > 1;
  // While the kernel ahead runs; in other configs, which have nothing to wait for, registers were spilled for it.
  if constexpr (kClusters) place_heads(p, s, Tile::kCtaHeads);
  cuda::wait_for_kernel();
  cuda::let_next_start();
  Attention<Rows, Tile, kClusters> attention(p, s);
  attention.run(groups);
}

}  // namespace sievemla::stage::attention
