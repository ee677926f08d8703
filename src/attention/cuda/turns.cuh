// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/turns.cuh -- a main loop of mma.sync in which groups of warps take tiles in turns.
//
// What it computes, and over which lanes, is attention.cuh's; S^T = K Q^T and O^T = V^T P^T as there. A group has 1, 2
// or 4 warps and an O of its own, of which each warp holds a share of the dimensions; a tile is 16 rows a warp. A warp
// gathers 16 rows into its own slot, scores them over all dimensions (Q is read from shared memory), and leaves P where
// the rope of the rows was; then each warp takes its columns of all the group's rows. Groups never wait for each other,
// so that one gathers or weighs while another multiplies; in the end their results are added up.
//
// A tile: rows have landed | scores, P | group's barrier, and vote whether a score exceeds the peak by much (nearly
// never: then peaks are settled and P is made anew) | O += V^T P^T | group's barrier | gather the group's next tile
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/rows.cuh"

namespace sievemla::stage::attention {

// What a head's scores are relative to (log2; -inf: none yet), and what they may exceed it by before all warps have to
// agree anew.
struct alignas(8) TurnsState {
  float peak, slack;
};

template <class Rows, class Tile>
struct TurnsSmem {
  static constexpr int kWarps = Tile::kThreads / 32;
  static constexpr int kQueryStride = 2 * (kLatent + Rows::kRope) + 16;  // bytes; ldmatrix meets no bank twice
  static constexpr int kCopies = Rows::kScaled ? 4 : 1;                  // of P, one per scale group
  static constexpr int kWeightBytes = kCopies * Tile::kHeads * 2;        // of a row
  static constexpr bool kInRope = kWeightBytes <= 2 * Rows::kRope;
  static constexpr int kWeightStride = kInRope ? Rows::kStride : (kWeightBytes / 16 | 1) * 16;
  static constexpr int kShareStride = kLatent + 4;  // of a head's share, in floats: no bank twice
  static constexpr int kSlotsBytes = kWarps * 16 * Rows::kStride, kShareBytes = Tile::kHeads * kShareStride * 4;
  // Shares that are written side by side; further groups add to them.
  static constexpr int kFit = kSlotsBytes / kShareBytes, kShares = kFit < Tile::kGroups ? kFit : Tile::kGroups;
  static_assert(kShares >= 1);

  alignas(128) unsigned char q[Tile::kHeads * kQueryStride];
  union {
    alignas(128) unsigned char rows[kWarps][16 * Rows::kStride];
    alignas(128) float shares[kShares][Tile::kHeads][kShareStride];  // in the end
  };
  alignas(16) unsigned char weights[kInRope ? 1 : kWarps][kInRope ? 16 : 16 * kWeightStride];
  alignas(8) std::int64_t names[kWarps][16];      // of the rows of a warp's next tile
  std::int64_t out_at[Tile::kHeads];              // of the head's row in out, in elements
  int visible[Tile::kHeads];                      // lanes of this part that the head may see
  TurnsState state[Tile::kGroups][Tile::kHeads];  // of a group
  float most[Tile::kGroups][Tile::kWarps][Tile::kHeads], sum[Tile::kGroups][Tile::kWarps][Tile::kHeads];
  float factor[Tile::kGroups][Tile::kHeads];  // of a group's share
  PlanSmem plan;
  int is_last;
};

template <class Rows, class Tile>
struct Turns {
  using Smem = TurnsSmem<Rows, Tile>;
  static constexpr int kHeads = Tile::kHeads, kWarps = Tile::kWarps, kGroups = Tile::kGroups;
  static constexpr int kTokens = Tile::kTokens, kThreads = Tile::kThreads;
  static constexpr int kColumns = kHeads / 8;   // MMA columns of 8 heads
  static constexpr int kBlocks = 32 / kWarps;   // of 16 columns of V^T: a warp's
  static constexpr int kQuarters = 4 / kWarps;  // of the latent: a warp's
  // Quarters of the latent that are scored in one piece, and whether scales stay in registers: as these allow.
  static constexpr int kSpare = (65536 / kThreads < 255 ? 65536 / kThreads : 255) - 4 * kBlocks * kColumns;
  static constexpr int kUnroll = kSpare < 120 ? 1 : Rows::kScaled && kColumns == 2 ? 2 : 4;
  static constexpr bool kHoldsScales = Rows::kScaled && kUnroll == 4;
  static constexpr float kSlack = 8.f;  // not p.slack: all warps settle a peak together
  // P carries kKeyFactor, as the scores do.
  static constexpr float kOutFactor = Rows::kScaled ? Rows::kValueFactor * Rows::kWeightFactor / Rows::kKeyFactor : 1.f;

  const CudaParams& p;
  Smem& s;
  const Part& part;  // in shared memory
  const int begin, end, first_head;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = thread / 32 % kWarps, group = thread / (32 * kWarps);
  const int g = lane / 4, c = lane % 4;  // fragment row and column

  float o[kBlocks][kColumns][4] = {};
  float x[kColumns][4];                  // scores: row g of heads 2c and 2c + 1, then row g + 8
  float y[kColumns][4];                  // weights
  float sum[kColumns][2] = {};           // of this thread's weights
  float scale[kHoldsScales ? 4 : 1][2];  // of rows g and g + 8, times kKeyFactor
  unsigned live = 0;                     // bit per row of the slot: not a hole

  __device__ Turns(const CudaParams& params, Smem& smem, LaneRange lanes)
      : p(params),
        s(smem),
        part(smem.plan.place.part),
        begin(lanes.begin),
        end(lanes.end),
        first_head(smem.plan.place.group * kHeads) {}

  __device__ static float shift_of(float top) { return top == -INFINITY ? 0.f : top; }
  __device__ int head_of(int n, int j) const { return n * 8 + 2 * c + j; }
  __device__ void sync() const {
    if constexpr (kWarps == 1) __syncwarp();
    else cuda::barrier_sync(1 + group, 32 * kWarps);
  }
  __device__ bool any(bool mine) const {
    if constexpr (kWarps == 1) {
      const bool all = __any_sync(~0u, mine);
      __syncwarp();
      return all;
    } else {
      return cuda::barrier_any(1 + group, 32 * kWarps, mine);
    }
  }
  // Of the group's warp w.
  __device__ std::uint32_t slot(int w) const { return cuda::shared_address(s.rows[group * kWarps + w]); }
  __device__ std::uint32_t weights(int w) const {
    if constexpr (Smem::kInRope) return slot(w) + Rows::kRopeOffset;
    else return cuda::shared_address(s.weights[group * kWarps + w]);
  }

  // ---- rows -----------------------------------------------------------------------------------------

  // The lane of the unit whose row this lane (or lane + 16) looks up.
  __device__ int lane_of(int tile) const { return begin + tile * kTokens + warp * 16 + lane % 16; }
  __device__ void fetch_names(const void* list, int tile) {
    const int at = lane_of(tile);
    if (lane < 16 && at < end) fetch_lane(p, list, at, cuda::shared_address(&s.names[thread / 32][lane]));
  }
  // Starts the copy of the warp's rows of a tile, whose names are there; a hole becomes zeros.
  __device__ void gather(int tile) {
    const int at = lane_of(tile);
    const std::int64_t offset = at < end ? row_offset(p, fetched_lane(p, &s.names[thread / 32][lane % 16]), at) : -1;
    live = __ballot_sync(~0u, offset >= 0) & 0xFFFFu;
    const unsigned char* const from = p.rows + max(offset, std::int64_t{0});
    const auto row = [&](int i) {
      return reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), i));
    };
    constexpr int kPieces = Rows::kBytes / 16, kWhole = kPieces / 32, kLeft = kPieces % 32;
    const std::uint32_t to = slot(warp);
#pragma unroll
    for (int first = 0; first < 16; first += 8) {
      const unsigned char* from_row[8];  // all of them before the first copy, which they would wait for
#pragma unroll
      for (int i = 0; i < 8; ++i) from_row[i] = row(first + i) + lane * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < kWhole; ++j)
          cuda::cp_async_16(to + (first + i) * Rows::kStride + (32 * j + lane) * 16, from_row[i] + 512 * j,
                            live >> (first + i) & 1 ? 16 : 0);
    }
    // What is left of the rows, side by side.
    if constexpr (kLeft > 0) {
      constexpr int kCopies = (16 * kLeft + 31) / 32;
      const unsigned char* from_row[kCopies];
#pragma unroll
      for (int j = 0; j < kCopies; ++j) from_row[j] = row((32 * j + lane) / kLeft % 16);
#pragma unroll
      for (int j = 0; j < kCopies; ++j) {
        const int i = 32 * j + lane, r = i / kLeft, piece = 32 * kWhole + i % kLeft;
        if (32 * j + 32 <= 16 * kLeft || i < 16 * kLeft)
          cuda::cp_async_16(to + r * Rows::kStride + piece * 16, from_row[j] + piece * 16, live >> r & 1 ? 16 : 0);
      }
    }
  }

  // Heads past the last compute on a copy of it.
  __device__ void load_q() {
    constexpr int kSteps = (kLatent + Rows::kRope) / 16;
#pragma unroll 2
    for (int i = thread; i < kHeads * kSteps; i += kThreads) {
      const int local = i / kSteps, step = i % kSteps;
      const HeadPlace at = place_of(p, part.unit, min(first_head + local, p.fold * p.heads - 1));
      const bool latent = step < kLatent / 16;
      const auto* from = latent ? static_cast<const __nv_bfloat16*>(p.q) + at.token * p.q_token + at.head * p.q_head
                                : static_cast<const __nv_bfloat16*>(p.q_rope) + at.token * p.q_rope_token +
                                      at.head * p.q_rope_head - kLatent;
      const auto* pieces = reinterpret_cast<const uint4*>(from + step * 16);
      uint4 z[2] = {__ldg(pieces), __ldg(pieces + 1)};
      if (latent) Rows::query_step(z);
      auto* const to = reinterpret_cast<uint4*>(s.q + local * Smem::kQueryStride + step * 32);
      to[0] = z[0], to[1] = z[1];
    }
  }

  // ---- scores ---------------------------------------------------------------------------------------

  // Two steps of 16 dimensions: of the rows, and of the heads.
  static constexpr int kRopePairs = Rows::kRope / 32, kPairs = 16 + kRopePairs;  // of steps; those of the rope first
  using Heads = std::uint32_t[2][kColumns][2];
  __device__ void load_keys(Raw& to, std::uint32_t s_rows, int pair) const {
    if (pair < kRopePairs) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        std::uint32_t r[4];
        cuda::ldmatrix_x4(
            r, s_rows + lane % 16 * Rows::kStride + Rows::kRopeOffset + 32 * (2 * pair + k) + lane / 16 * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) to.r[4 * k + j] = r[j];
      }
    } else {
      Rows::load_keys(to, s_rows, (pair - kRopePairs) / 4, (pair - kRopePairs) % 4, lane);
    }
  }
  __device__ static void load_heads(Heads& to, std::uint32_t s_q, int pair) {
    const std::uint32_t s_from = s_q + (pair < kRopePairs ? 2 * kLatent + 64 * pair : 64 * (pair - kRopePairs));
    if constexpr (kColumns == 1) {  // 8 heads by 32 dimensions
      std::uint32_t r[4];
      cuda::ldmatrix_x4(r, s_from);
      to[0][0][0] = r[0], to[0][0][1] = r[1], to[1][0][0] = r[2], to[1][0][1] = r[3];
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {  // 16 heads by 16 dimensions
          std::uint32_t r[4];
          cuda::ldmatrix_x4(r, s_from + n * 8 * Smem::kQueryStride + 32 * k);
          to[k][n][0] = r[0], to[k][n][1] = r[1], to[k][n + 1][0] = r[2], to[k][n + 1][1] = r[3];
        }
    }
  }
  __device__ std::uint32_t query_address() const {
    const std::uint32_t q = cuda::shared_address(s.q);
    if constexpr (kColumns == 1) return q + lane % 8 * Smem::kQueryStride + lane / 8 * 16;
    else return q + (lane % 8 + lane / 16 * 8) * Smem::kQueryStride + lane / 8 % 2 * 16;
  }

  // Of row g or g + 8, times kKeyFactor.
  __device__ float scale_of(int r, int quarter) const {
    if constexpr (!Rows::kScaled) return 1.f;
    else if constexpr (kHoldsScales) return scale[quarter][r];
    else
      return cuda::load_shared(slot(warp) + (g + 8 * r) * Rows::kStride + Rows::kScaleOffset + 4 * quarter) *
             Rows::kKeyFactor;
  }
  __device__ void load_scales() {
    if constexpr (kHoldsScales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 z =
            *reinterpret_cast<const float4*>(s.rows[thread / 32] + (g + 8 * r) * Rows::kStride + Rows::kScaleOffset);
        scale[0][r] = z.x * Rows::kKeyFactor, scale[1][r] = z.y * Rows::kKeyFactor;
        scale[2][r] = z.z * Rows::kKeyFactor, scale[3][r] = z.w * Rows::kKeyFactor;
      }
    }
  }

  // x = K Q^T, scaled.
  __device__ void score() {
    const std::uint32_t s_rows = slot(warp), s_q = query_address();
    load_scales();
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[n][j] = 0.f;
    float part_of[2][kColumns][4] = {};  // by steps in turns, as products wait for their sum
    const auto take = [&](float low, float high) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[n][j] = fmaf(part_of[0][n][j] + part_of[1][n][j], j / 2 ? high : low, x[n][j]);
          part_of[0][n][j] = part_of[1][n][j] = 0.f;
        }
    };
    Raw keys[2];
    load_keys(keys[0], s_rows, 0);
    const auto multiply = [&](int pair, std::uint32_t s_next_rows, std::uint32_t s_heads, int next) {
      Heads heads;
      load_heads(heads, s_heads, pair);
      if (next < kPairs) load_keys(keys[(pair + 1) % 2], s_next_rows, next);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        Fragment f;
        if (pair < kRopePairs) {
#pragma unroll
          for (int j = 0; j < 4; ++j) f.a[j] = keys[pair % 2].r[4 * k + j];
        } else {
          f = Rows::key(keys[pair % 2], k);
        }
#pragma unroll
        for (int n = 0; n < kColumns; ++n) cuda::mma_bf16(part_of[k][n], f.a, heads[k][n][0], heads[k][n][1]);
      }
    };
#pragma unroll
    for (int pair = 0; pair < kRopePairs; ++pair) multiply(pair, s_rows, s_q, pair + 1);
    if (Rows::kScaled && kRopePairs > 0) take(1.f, 1.f);
    static_assert(kRopePairs % 2 == 0);
#pragma unroll(kUnroll)
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int step = quarter * Rows::kValueBytes / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = kRopePairs + i;
        multiply(pair, s_rows + step, s_q + quarter * 2 * kWarpLatent, quarter == 3 && i == 3 ? kPairs : pair + 1);
      }
      if constexpr (Rows::kScaled) take(scale_of(0, quarter), scale_of(1, quarter));
    }
    if constexpr (!Rows::kScaled) take(1.f, 1.f);
  }

  // Holes and what a head may not see. NaN there must not reach it as 0 * NaN either; whoever sees it has its score by
  // now.
  __device__ void mask(int at, int least) {
    if (live == 0xFFFFu && at + kTokens <= least) return;
    const int first = at + warp * 16;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = g + j / 2 * 8;
        if (!(live >> row & 1) || first + row >= s.visible[head_of(n, j % 2)]) x[n][j] = -INFINITY;
      }
    if (p.fold == 1) return;
    __syncwarp();
#pragma unroll 1
    for (int i = max(0, least - first); i < 16; ++i)
      Rows::clear_not_finite(s.rows[thread / 32] + i * Rows::kStride, lane);
    __syncwarp();
    load_scales();
  }

  // ---- weights --------------------------------------------------------------------------------------

  // y = exp(x - peak). True: a score exceeds the peak by much, or the rounding of a weight to bf16 might show.
  __device__ bool weigh() {
    bool exceeds = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const TurnsState state = s.state[group][head_of(n, j)];
        const float shift = shift_of(state.peak), z0 = fmaf(x[n][j], p.scale_log2, -shift),
                    z1 = fmaf(x[n][j + 2], p.scale_log2, -shift);
        y[n][j] = cuda::exp2_approx(z0), y[n][j + 2] = cuda::exp2_approx(z1);
        exceeds |= fmaxf(z0, z1) > state.slack;
      }
    return exceeds;
  }

  // P, or what rounding took from it, into shared memory.
  template <bool Residue>
  __device__ void put_weights() {
    const std::uint32_t to = weights(warp) + g * Smem::kWeightStride + 4 * c;
#pragma unroll
    for (int copy = 0; copy < Smem::kCopies; ++copy) {
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) scale[r] = scale_of(r, copy);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float2 z = {y[n][2 * r], y[n][2 * r + 1]};
          if constexpr (Rows::kScaled) z.x *= scale[r], z.y *= scale[r];
          if constexpr (Residue) {
            z.x -= __bfloat162float(__float2bfloat16_rn(z.x));
            z.y -= __bfloat162float(__float2bfloat16_rn(z.y));
          }
          cuda::store_shared(to + r * 8 * Smem::kWeightStride + copy * kHeads * 2 + n * 16,
                             cuda::pack_bf16x2(z.x, z.y));
        }
    }
  }

  // Of all rows of the warp's slot, by any `with`.
  template <class With>
  __device__ static float over_rows(float z, With with) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) z = with(z, __shfl_xor_sync(~0u, z, d));
    return z;
  }

  // New peaks from those of all the group's warps; O and sums become relative to them, y is weighed anew. True: some of
  // P is so large a part of the sum so far that its rounding to bf16 would show.
  __device__ bool settle() {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float (&most)[kWarps][kHeads] = s.most[group];
    float (&all)[kWarps][kHeads] = s.sum[group];
    const auto largest = [&](int h) {
      float z = most[0][h];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) z = fmaxf(z, most[w][h]);
      return z;
    };
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float z = over_rows(fmaxf(x[n][j], x[n][j + 2]), larger);
        if (g == 0) most[warp][head_of(n, j)] = z;
      }
    sync();
    float next[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float peak = s.state[group][head_of(n, j)].peak, z = largest(head_of(n, j)) * p.scale_log2;
        next[n][j] = z > peak + kSlack ? z : peak;  // lest P grows beyond 2^kSlack
        const float rescale = next[n][j] == peak ? 1.f : cuda::exp2_approx(peak - next[n][j]);
        sum[n][j] *= rescale;
        if (__any_sync(~0u, rescale != 1.f)) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) o[b][n][j] *= rescale, o[b][n][j + 2] *= rescale;
        }
      }
    sync();
    if (warp == 0 && g == 0) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) s.state[group][head_of(n, j)].peak = next[n][j];
    }
    sync();
    weigh();
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float z = over_rows(sum[n][j] + y[n][j] + y[n][j + 2], [](float a, float b) { return a + b; });
        const float heaviest = over_rows(fmaxf(y[n][j], y[n][j + 2]), larger);
        if (g == 0) all[warp][head_of(n, j)] = z, most[warp][head_of(n, j)] = heaviest;
      }
    sync();
    bool heavy = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int h = head_of(n, j);
        float of_all = all[0][h];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) of_all += all[w][h];
        const float part_of_sum = of_all / p.heavy;
        heavy |= largest(h) > part_of_sum;
        if (warp == 0 && g == 0) s.state[group][h].slack = fminf(kSlack, log2f(part_of_sum));
      }
    return any(heavy);
  }

  // ---- values ---------------------------------------------------------------------------------------

  // O^T += V^T P^T.
  __device__ void accumulate() {
#pragma unroll 1
    for (int k = 0; k < kWarps; ++k) {
      const std::uint32_t s_rows = slot(k);
      // Rows 0-7 and 8-15 of heads 8n .. 8n + 15, or of 8 heads twice.
      const std::uint32_t s_weights =
          weights(k) + lane % 16 * Smem::kWeightStride + (kColumns > 1 ? lane / 16 * 16 : 0);
#pragma unroll
      for (int u = 0; u < kQuarters; ++u) {
        const int quarter = warp * kQuarters + u;
        std::uint32_t weight[kColumns][2];
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
          std::uint32_t r[4];
          cuda::ldmatrix_x4_trans(r, s_weights + (Rows::kScaled ? quarter * kHeads * 2 : 0) + n * 16);
          weight[n][0] = r[0], weight[n][1] = r[1];
          if constexpr (kColumns > 1) weight[n + 1][0] = r[2], weight[n + 1][1] = r[3];
        }
        Raw raw[2];
        Rows::load_values(raw[0], s_rows, quarter, 0, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < 3) Rows::load_values(raw[(i + 1) % 2], s_rows, quarter, i + 1, lane);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const Fragment f = Rows::value(raw[i % 2], m);
#pragma unroll
            for (int n = 0; n < kColumns; ++n) cuda::mma_bf16(o[u * 8 + 2 * i + m][n], f.a, weight[n][0], weight[n][1]);
          }
        }
      }
    }
  }

  __device__ void run(int groups) {
    const void* const list = list_of(p, part.unit);
    const int tiles = max(0, end - begin + kTokens - 1) / kTokens;
    fetch_names(list, group);
    cuda::cp_async_commit();
    load_q();
    for (int i = thread; i < kGroups * kHeads; i += kThreads) s.state[i / kHeads][i % kHeads] = {-INFINITY, -INFINITY};
    if (thread < kHeads) {
      const int head = first_head + thread;
      const bool exists = head < p.fold * p.heads;
      const HeadPlace at = place_of(p, part.unit, exists ? head : 0);
      s.visible[thread] =
          exists ? lanes_of_token(p, part.unit, static_cast<int>(at.token) - part.unit * p.fold) - begin : INT_MAX;
      s.out_at[thread] = at.token * p.out_token + at.head * p.out_head;
    }
    cuda::cp_async_wait<0>();
    __syncwarp();
    if (group < tiles) gather(group), __syncwarp(), fetch_names(list, group + kGroups);
    cuda::cp_async_commit();
    __syncthreads();
    const int least = __reduce_min_sync(~0u, s.visible[lane % kHeads]);
#pragma unroll 1
    for (int tile = group; tile < tiles; tile += kGroups) {
      cuda::cp_async_wait<0>();
      __syncwarp();
      score();
      mask(tile * kTokens, least);
      __syncwarp();  // the rope of the rows is read
      bool settles = weigh(), heavy = false, residue = false, again;
      do {
        if (residue) put_weights<true>();
        else put_weights<false>();
        again = any(settles);
        if (again) {
          heavy = settle(), settles = false;  // and P is put anew
        } else {
          accumulate();
          sync();
          again = residue = heavy, heavy = false;  // V takes in what rounding took from P
        }
      } while (again);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) sum[n][j] += y[n][j] + y[n][j + 2];
      if (tile + kGroups < tiles) gather(tile + kGroups), __syncwarp(), fetch_names(list, tile + 2 * kGroups);
      cuda::cp_async_commit();
    }
    write(groups);
  }

  // ---- result ---------------------------------------------------------------------------------------

  // What each group's O of a head has to be multiplied with, and what is to be told of the head.
  __device__ void weigh_shares(int local, std::int64_t partial) {
    const int head = first_head + local;
    float top = s.state[0][local].peak, all = 0.f;
#pragma unroll
    for (int i = 1; i < kGroups; ++i) top = fmaxf(top, s.state[i][local].peak);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float weight = cuda::exp2_approx(s.state[i][local].peak - shift_of(top));
      float sums = s.sum[i][0][local];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sums += s.sum[i][w][local];
      s.factor[i][local] = weight;
      all += sums * weight;
    }
    const bool exists = head < p.fold * p.heads;
    const HeadPlace at = place_of(p, part.unit, exists ? head : 0);
    float inverse;
    if (part.parts == 1) {
      inverse = inverse_with_sink(p, all, top, at.head);
      if (p.lse && exists) write_lse(p, at, all, top);
    } else {
      inverse = all == 0.f ? 0.f : 1.f / all;
      if (exists) p.partial_log2[partial + local] = log2_of(all, top);
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) s.factor[i][local] *= inverse * kOutFactor;
  }

  // This group's O, weighted, to its share, or added to what is there.
  __device__ void put_share(bool add) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float factor = s.factor[group][head_of(n, j)];
        float* const share = &s.shares[group % Smem::kShares][head_of(n, j)][warp * kBlocks * 16];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          float2 z = {o[b][n][j] * factor, o[b][n][j + 2] * factor};
          if constexpr (Rows::kPairedColumns) {
            auto* const at = reinterpret_cast<float2*>(share + b * 16 + 2 * g);
            if (add) z.x += at->x, z.y += at->y;
            *at = z;
          } else {
            float* const at = share + b * 16 + g;
            if (add) z.x += at[0], z.y += at[8];
            at[0] = z.x, at[8] = z.y;
          }
        }
      }
  }

  __device__ void write(int groups) {
    const int item = s.plan.place.item, cta_group = s.plan.place.group;
    const std::int64_t partial = (static_cast<std::int64_t>(item) * groups + cta_group) * kHeads;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float all = over_rows(sum[n][j], [](float a, float b) { return a + b; });
        if (g == 0) s.sum[group][warp][head_of(n, j)] = all;
      }
    __syncthreads();
    if (thread < kHeads) weigh_shares(thread, partial);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kGroups; i += Smem::kShares) {
      if (group >= i && group < i + Smem::kShares) put_share(i > 0);
      __syncthreads();
    }
    const int heads = min(kHeads, p.fold * p.heads - first_head);
#pragma unroll 2
    for (int i = thread; i < heads * (kLatent / 4); i += kThreads) {
      const int local = i / (kLatent / 4), column = i % (kLatent / 4) * 4;
      float4 all{};
#pragma unroll
      for (int j = 0; j < Smem::kShares; ++j) {
        const float4 z = *reinterpret_cast<const float4*>(&s.shares[j][local][column]);
        all.x += z.x, all.y += z.y, all.z += z.z, all.w += z.w;
      }
      if (part.parts == 1) store4(p, s.out_at[local] + column, all);
      else *reinterpret_cast<float4*>(p.partial + (partial + local) * kLatent + column) = all;
    }
    if (part.parts == 1 || p.merge != Merge::last) return;

    static_assert(sizeof(s.rows) >= kMergeBytes / kHeadBytes * sizeof(float));
    // Threads past a multiple of 128 do again what others do.
    merge_if_last(p, part, cta_group, groups, kHeads, s.is_last, reinterpret_cast<float*>(s.rows), s.out_at, kThreads,
                  [] { __syncthreads(); });
  }
};

// Arch only tells apart the kernels of two configs that have a tile in common.
template <class Arch, class Rows, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    turns_kernel(const __grid_constant__ CudaParams p, int groups) {
  extern __shared__ __align__(128) unsigned char turns_smem[];
  auto& s = *reinterpret_cast<TurnsSmem<Rows, Tile>*>(turns_smem);
  cuda::wait_for_kernel();
  const Place place = find_place(p, groups, Tile::kTokens, s.plan);
  if (place.part.parts == 0) return;  // the whole CTA
  if (threadIdx.x == 0) tell_merger(p, place), s.plan.place = place;
  __syncthreads();
  cuda::let_next_start();
  Turns<Rows, Tile>(p, s, range_of(place.part, Tile::kTokens)).run(groups);
}

}  // namespace sievemla::stage::attention
