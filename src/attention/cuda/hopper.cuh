// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper.cuh -- the main loop for 64 heads and fp8 rows on sm_90: wgmma with rows on M, heads on N.
//
// What it computes, and over which lanes, is attention.cuh's; S^T = K Q^T and O^T = V^T P^T. Rows lie in shared memory
// as they lie in the cache; who multiplies makes fragments of them in registers.
//   warp group 2 (producer): fills the ring of slots (ring.cuh)
//   warp groups 0, 1 (consumers): tiles in turns. Whose turn it is scores the tile and weighs it, P goes into shared
//   memory, and both multiply it with the values, 256 columns each. So one scores while the other multiplies.
// Turns: P of a tile is told of once, and once more as what rounding took from it where that would show. Weights are
// relative to peaks that all heads have in shared memory; whose turn it is raises them, and both rescale O by what it
// tells with P.
#pragma once
#include <cuda_bf16.h>

#include <cstddef>
#include <type_traits>

#include "attention/cuda/hopper_heads.cuh"
#include "attention/cuda/ring.cuh"
#include "cuda/arch/tile.h"

namespace sievemla::stage::attention {

template <class Rows>
struct HopperSmem {
  static constexpr int kBlocks = (kLatent + Rows::kRope) / 64;  // of 64 dimensions: 128 bytes
  static constexpr int kBlockBytes = 64 * 128;
  // P has four copies, times the scale of 128 columns each. The last lies where the slots have their rope, if they
  // have, which no longer is needed by then: without it there is no room for three tiles.
  static constexpr int kCopies = Rows::kRope > 0 ? 3 : 4;
  static constexpr int kSlots = Rows::kRope > 0 ? 12 : 14;

  alignas(1024) unsigned char q[kBlocks][kBlockBytes];
  alignas(1024) unsigned char weights[kCopies][kBlockBytes];  // rows are heads, columns rows of the tile
  alignas(128) unsigned char rows[kSlots][16 * Rows::kStride];
  alignas(8) std::uint64_t full[kSlots], empty[kSlots];  // mbarriers
  alignas(8) std::uint64_t told, taken;                  // P of a turn: to be multiplied; no longer needed
  unsigned short live[kSlots];                           // bit per row: not a hole
  union {
    std::int64_t names[4][kNames][32];  // of rows to come, by the producer's warp
    float greatest[2][4][64];           // in the end: |O|, by consumer's warp and head
  };
  int visible[64];  // lanes of this part that the head may see
  int least;        // lanes of the unit that every token sees
  unsigned todo;    // of parts that merge together
  // By head. log2 of a weight is score * scale + base; peak: what weights are relative to (log2; -inf: none yet);
  // slack: what log2 of a weight may be before all of that is looked at anew (while it is, what log2 is lowered by);
  // rescale: what O has to be multiplied with before this turn.
  alignas(8) float scale[64], base[64], slack[64], peak[64], rescale[64];
  bool changed, again;                       // of a turn: O has to be rescaled; the tile has another
  alignas(8) float sum[4][64], most[4][64];  // by warp of whose turn it is
  PlanSmem plan;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The power of two that is next below x, or near it where that would be none.
__device__ inline float power_of(float x) {
  return fminf(fmaxf(__uint_as_float(__float_as_uint(x) & 0x7F800000u), 0x1p-112f), 0x1p126f);
}

// The shares of a cluster to where they belong. All its consuming threads call.
__device__ inline void write_half_shares(const CudaParams& p, const Place& place, const Told* s_told,
                                         const __half* s_shares, int thread, int threads) {
  constexpr int kHeads = 64;
  const Part& part = place.part;
  const int first_head = place.group * kHeads, heads = min(kHeads, p.fold * p.heads - first_head);
  const int first = kHeads * part.index / part.parts, end = min(kHeads * (part.index + 1) / part.parts, heads);
  cuda::cluster_sync();
  const auto add = [&](auto parts) {
    add_half_shares<decltype(parts)::value>(p, part.unit, part.parts, part.index, s_told, s_shares, first_head, first,
                                            end, thread / 32, threads / 32);
  };
  if (part.parts <= 2) add(std::integral_constant<int, 2>{});
  else if (part.parts <= 4) add(std::integral_constant<int, 4>{});
  else add(std::integral_constant<int, 8>{});
  cuda::cluster_meet();  // until nobody reads here any more
}

template <class Rows>
struct Hopper : Ring<Hopper<Rows>, Rows, HopperSmem<Rows>::kSlots> {
  using Smem = HopperSmem<Rows>;
  using Base = Ring<Hopper, Rows, Smem::kSlots>;
  using Base::slot_of, Base::round_of, Base::full, Base::empty;
  static constexpr int kTokens = 64, kGroup = 128, kConsumers = 2 * kGroup, kConsumerWarps = 8,
                       kThreads = kConsumers + kGroup, kSlots = Smem::kSlots;
  static_assert(kSlots >= 8, "the next tile is scored before this one is given back");
  // Of the first tile both give rows back; one of them has scored the second by then.
  static constexpr bool kFirstAlone = true;
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;  // 504 in all: what 384 threads get at launch
  static constexpr int kReady = 3, kMet = 4, kBoth = 5;                    // barriers, after one of each consumer
  static_assert(Rows::kScaled);

  const CudaParams& p;
  Smem& s;
  const int unit, begin, end;  // lanes [begin, end) of the unit
  const int first_head, tiles;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = uniform(thread / 32 % 4), group = uniform(thread / kGroup);

  // Known to the compiler to be the same in all lanes, as an operand's address in shared memory should be.
  __device__ static int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  __device__ Hopper(const CudaParams& params, Smem& smem, int of, LaneRange lanes, int head)
      : p(params),
        s(smem),
        unit(of),
        begin(lanes.begin),
        end(lanes.end),
        first_head(head),
        tiles(uniform(max(0, lanes.end - lanes.begin + kTokens - 1) / kTokens)) {}
  __device__ std::uint32_t told() const { return cuda::shared_address(&s.told); }
  __device__ std::uint32_t taken() const { return cuda::shared_address(&s.taken); }

  __device__ void produce() {
    this->fill(unit, kConsumerWarps, kMet, kReady, kThreads, [&](int i) {
      if (i == kSlots) cuda::mbarrier_init(told(), 4), cuda::mbarrier_init(taken(), kConsumerWarps);
    });
  }

  // ---- consumers ------------------------------------------------------------------------------------

  const int g = lane / 4, c = lane % 4;  // fragment row and column
  // A thread meets heads 8 j + 2 c and the next (e): of x in 4 j + 2 r + e, for rows g + 8 r of its warp's slot.
  float o[4][32] = {};  // block 2 i + m: columns 256 group + 128 i + 32 warp + 16 m + 2 g and the next (r)
  float x[32];          // scores, then weights
  std::uint32_t fragment[2][2][4];
  Raw raw[2];

  // The first operand in shared memory, s.q.
  const std::uint64_t operands = cuda::matrix(uniform(static_cast<int>(cuda::shared_address(s.q[0]))), 16, 1024);

  __device__ static float shift_of(float peak) { return peak == -INFINITY ? 0.f : peak; }
  __device__ void sync() const { cuda::barrier_sync(1 + group, kGroup); }
  __device__ bool any(bool mine) const { return uniform(cuda::barrier_any(1 + group, kGroup, mine)) != 0; }
  __device__ float2& pair_of(float (&of)[64], int j) const { return reinterpret_cast<float2*>(of)[4 * j + c]; }

  // Raw keys: two steps of the rope, or of the latent; raw values: 16 rows by half this group's columns, 32 a warp.
  __device__ void load_rope(std::uint32_t s_rows, int i) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      cuda::ldmatrix_x4(fragment[i % 2][k],
                        s_rows + lane % 16 * Rows::kStride + Rows::kRopeOffset + 32 * (2 * i + k) + lane / 16 * 16);
  }
  __device__ void load_keys(std::uint32_t s_rows, int i) { Rows::load_keys(raw[i % 2], s_rows, i / 4, i % 4, lane); }
  __device__ void make_keys(int i) { take(i, i, f16_key); }
  __device__ void load_values(std::uint32_t s_rows, int i) {
    Rows::load_values(raw[i % 2], s_rows, 2 * group + i % 2, warp, lane);
  }
  // Fragments of batch b from raw[i % 2].
  template <class Of>
  __device__ void take(int b, int i, Of of) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Fragment f = of(raw[i % 2], k);
#pragma unroll
      for (int j = 0; j < 4; ++j) fragment[b % 2][k][j] = f.a[j];
    }
  }
  __device__ void hold(int b) { cuda::hold(fragment[b % 2][0]), cuda::hold(fragment[b % 2][1]); }

  // Of rows g and g + 8.
  __device__ float2 scales(std::uint32_t s_rows, int scale_group) const {
    const std::uint32_t from = s_rows + Rows::kScaleOffset + 4 * scale_group + g * Rows::kStride;
    return {cuda::load_shared(from), cuda::load_shared(from + 8 * Rows::kStride)};
  }

  // Two steps of sums with batch b, of 64 dimensions' first or second half.
  template <bool F16>
  __device__ void multiply_keys(float (&to)[32], int b, std::uint64_t q, bool add) {
    hold(b);
    cuda::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const std::uint64_t step = cuda::moved(q, b % 2 * 64 + k * 32);
      if constexpr (F16) cuda::wgmma_a_f16(to, fragment[b % 2][k], step, add || k > 0);
      else cuda::wgmma_a(to, fragment[b % 2][k], step, add || k > 0);
    }
    cuda::wgmma_commit();
  }
  // x = K Q^T, scaled.
  __device__ void score(int tile) {
    const int slot = slot_of(tile, warp);
    const std::uint32_t s_rows = cuda::shared_address(s.rows[slot]);
    cuda::mbarrier_wait(full(slot), round_of(tile, warp) & 1);
    // A batch is made while the one before is multiplied, and its codes are loaded earlier.
    load_keys(s_rows, 0), load_keys(s_rows, 1);
    if constexpr (Rows::kRope > 0) {
      const std::uint64_t q = cuda::moved(operands, 8 * Smem::kBlockBytes);
      load_rope(s_rows, 0);
      cuda::hold(x);
      multiply_keys<false>(x, 0, q, false), cuda::wgmma_wait<1>(), hold(1), load_rope(s_rows, 1);
      multiply_keys<false>(x, 1, q, true), cuda::wgmma_wait<1>(), hold(0), make_keys(0);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = 0.f;
      make_keys(0);
    }
#pragma unroll
    for (int scale_group = 0; scale_group < 4; ++scale_group) {
      float share[32];  // a sum of its own for each scale group
      const std::uint64_t q = cuda::moved(operands, scale_group * (2 * Smem::kBlockBytes));
      cuda::hold(share);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        multiply_keys<true>(share, b, cuda::moved(q, b / 2 * Smem::kBlockBytes), b > 0);
        const int next = 4 * scale_group + b + 1;
        if (next + 1 < 16) load_keys(s_rows, next + 1);
        cuda::wgmma_wait<1>();
        hold(next);
        if (next < 16) make_keys(next);
      }
      const float2 scale = scales(s_rows, scale_group);
      cuda::wgmma_wait<0>();
      hold(1);
      cuda::hold(x), cuda::hold(share);
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = fmaf(share[i], i / 2 % 2 ? scale.y : scale.x, x[i]);
    }
    mask(tile * kTokens, slot);
  }

  // Holes and what a head may not see. NaN there must not reach it as 0 * NaN either; whoever sees it has its score by
  // now.
  __device__ void mask(int at, int slot) {
    const unsigned live = s.live[slot];
    const int least = s.least - begin;
    if (live == 0xFFFFu && at + kTokens <= least) return;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (!(live >> (g + 8 * r) & 1) || at + warp * 16 + g + 8 * r >= s.visible[8 * j + 2 * c + e])
            x[4 * j + 2 * r + e] = -INFINITY;
    if (p.fold == 1) return;
#pragma unroll 1
    for (int i = max(0, least - at - warp * 16); i < 16; ++i)
      Rows::clear_not_finite(s.rows[slot] + i * Rows::kStride, lane);
    __syncwarp();
  }

  // z of 16 heads, by any `with` of the eight lanes of one c, which halve the heads among them three times: z[e] is
  // head 8 g + 2 c + e then.
  template <int Half = 8, class With>
  __device__ void halve(float (&z)[16], With with) const {
    constexpr int kBit = 2 * Half;
    const bool upper = lane & kBit;
#pragma unroll
    for (int i = 0; i < Half; ++i) {
      const float theirs = upper ? z[i] : z[i + Half], mine = upper ? z[i + Half] : z[i];
      z[i] = with(mine, __shfl_xor_sync(~0u, theirs, kBit));
    }
    if constexpr (Half > 2) halve<Half / 2>(z, with);
  }
  // The greatest of x in all rows of the warp's slot, by head, into s.most.
  __device__ void tell_most() {
    float z[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) z[i] = fmaxf(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + 2 + i % 2]);
    halve(z, [](float a, float b) { return fmaxf(a, b); });
    pair_of(s.most[warp], g) = {z[0], z[1]};
  }
  __device__ float most_of_head(int h) const {
    return fmaxf(fmaxf(s.most[0][h], s.most[1][h]), fmaxf(s.most[2][h], s.most[3][h]));
  }
  // Into s.sum[warp]: x of all rows of the warp's slot, by head.
  __device__ void add_sums() {
    float z[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) z[i] = x[i / 2 * 4 + i % 2] + x[i / 2 * 4 + 2 + i % 2];
    halve(z, [](float a, float b) { return a + b; });
    float2& sum = pair_of(s.sum[warp], g);
    sum = {sum.x + z[0], sum.y + z[1]};
  }

  // New peaks from the weights of all four warps, which are made lower by it; what that changes about sums, and about
  // O: true if anything. `most`: log2 of the greatest weight of head thread % kGroup, by then.
  __device__ bool settle(float& most) {
    tell_most();
    sync();
    bool changed = false;
    if (const int h = thread % kGroup; h < 64) {
      most = most_of_head(h);
      const float peak = s.peak[h], z = most - kWeightLog2 + shift_of(peak);
      const float next = z > peak + p.slack ? z : peak;  // O is rescaled only where P would grow beyond 2^slack
      const float rescale = next == peak || peak == -INFINITY ? 1.f : cuda::exp2_approx(peak - next);  // of nothing: 1
      changed = rescale != 1.f;
      s.peak[h] = next, s.rescale[h] = rescale;
      s.base[h] = kWeightLog2 - shift_of(next), s.slack[h] = shift_of(next) - shift_of(peak);
      most -= s.slack[h];
#pragma unroll
      for (int w = 0; w < 4; ++w) s.sum[w][h] *= rescale;
    }
    changed = any(changed);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 by = pair_of(s.slack, j);  // until it is worked out anew
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * j + i] -= i % 2 ? by.y : by.x;
    }
    return changed;
  }
  // What log2 of a weight may be before its rounding to bf16 would show. True: one is more.
  __device__ bool weigh_heaviest(float most) {
    sync();
    bool heavy = false;
    if (const int h = thread % kGroup; h < 64) {
      const float part = (s.sum[0][h] + s.sum[1][h] + s.sum[2][h] + s.sum[3][h]) / p.heavy;
      heavy = cuda::exp2_approx(most) > part;
      s.slack[h] = fminf(p.slack + kWeightLog2, log2f(part));
    }
    return any(heavy);
  }

  __device__ void wait_until_taken(unsigned turn) const {
    if (turn > 0) cuda::mbarrier_wait(taken(), (turn - 1) & 1);
  }

  // Scores become weights.
  struct Weighed {
    bool changed, heavy;
  };
  __device__ Weighed weigh(unsigned turn) {
    bool exceeds = false;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 scale = pair_of(s.scale, j), base = pair_of(s.base, j), slack = pair_of(s.slack, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * j + i] = fmaf(x[4 * j + i], i % 2 ? scale.y : scale.x, i % 2 ? base.y : base.x);
      exceeds |= fmaxf(x[4 * j], x[4 * j + 2]) > slack.x || fmaxf(x[4 * j + 1], x[4 * j + 3]) > slack.y;
    }
    exceeds = any(exceeds);
    bool changed = false;
    float most = -INFINITY;
    if (exceeds) {
      wait_until_taken(turn);  // what is told of peaks is no longer read
      changed = settle(most);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = cuda::exp2_approx(x[i]);
    add_sums();
    return {changed, exceeds && weigh_heaviest(most)};
  }
  // P into shared memory, for turn `turn`; or, the tile's second, what rounding took from it.
  __device__ void tell(int tile, unsigned turn, bool residue, Weighed what) {
    wait_until_taken(turn);
    const std::uint32_t s_rows = cuda::shared_address(s.rows[slot_of(tile, warp)]);
    if (residue) put_weights<true>(s_rows);
    else put_weights<false>(s_rows);
    if (thread % kGroup == 0) s.changed = what.changed, s.again = what.heavy;
    cuda::fence_async();
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(told());
  }
  template <bool Residue>
  __device__ void put_weights(std::uint32_t s_rows) {
    // The lane's row of a matrix: eight heads, eight rows of the slot.
    const std::uint32_t to =
        cuda::shared_address(s.weights[0]) + cuda::swizzled(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
    const std::uint32_t in_slot =
        s_rows + Rows::kRopeOffset + (lane / 8 % 2 * 8 + lane / 16) * Rows::kStride + lane % 8 * 16;
#pragma unroll
    for (int copy = 0; copy < 4; ++copy) {
      const float2 scale = scales(s_rows, copy);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        std::uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float by = i % 2 ? scale.y : scale.x;
          r[i] = rounded<Residue>(x[4 * j + 2 * i] * by, x[4 * j + 2 * i + 1] * by);
        }
        cuda::stmatrix_x4_trans(
            copy < Smem::kCopies ? to + copy * Smem::kBlockBytes + j * 1024 : in_slot + j * Rows::kStride, r);
      }
    }
  }

  // A slot of the tile, which this warp, its part of products with P in it included, no longer reads.
  __device__ void give_back(int tile, int i) const {
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(empty(slot_of(tile, i)));
  }
  // O^T += V^T P^T, this turn's P; gives the slots back after the tile's last. True: it has another.
  __device__ bool multiply(int tile, unsigned turn) {
    // Of a slot, the columns of a scale group are a batch.
    const auto load = [&](int b) {
      if (b >= 8) return;
      const int slot = slot_of(tile, b / 2);
      if (b % 2 == 0) cuda::mbarrier_wait(full(slot), round_of(tile, b / 2) & 1);
      load_values(cuda::shared_address(s.rows[slot]), b);
    };
    const auto make = [&](int b) { take(b, b, [](const Raw& of, int k) { return Rows::value(of, k); }); };
    load(0), load(1);
    make(0);
    cuda::mbarrier_wait(told(), turn & 1);
    const bool again = s.again;
    if (s.changed) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 by = pair_of(s.rescale, j);
#pragma unroll
        for (int b = 0; b < 4; ++b)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[b][4 * j + i] *= i % 2 ? by.y : by.x;
      }
    }
    const std::uint64_t weights =
        cuda::moved(operands, static_cast<int>(offsetof(Smem, weights)) + 2 * group * Smem::kBlockBytes);
#pragma unroll
    for (int b = 0; b < 4; ++b) cuda::hold(o[b]);
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      std::uint64_t operand = cuda::moved(weights, b % 2 * Smem::kBlockBytes + b / 2 * 32);
      if (Rows::kRope > 0 && b % 2 == 1 && group == 1)
        operand = cuda::plain_matrix(cuda::shared_address(s.rows[slot_of(tile, b / 2)]) + Rows::kRopeOffset,
                                     8 * Rows::kStride, Rows::kStride);
      hold(b);
      cuda::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) cuda::wgmma_a(o[b % 2 * 2 + i], fragment[b % 2][i], operand, true);
      cuda::wgmma_commit();
      load(b + 2);
      cuda::wgmma_wait<1>();
      if (b > 0) hold(b - 1);
      if (b + 1 < 8) make(b + 1);  // meanwhile
      if (b % 2 == 1 && b > 1 && !again) give_back(tile, b / 2 - 1);
    }
    cuda::wgmma_wait<0>();
    hold(7);
#pragma unroll
    for (int b = 0; b < 4; ++b) cuda::hold(o[b]);
    __syncwarp();
    if (!again) give_back(tile, 3);
    if (lane == 0) cuda::mbarrier_arrive(taken());
    return again;
  }

  // The heads from `first_head` of the unit on into s.q, and what they may see.
  __device__ void load_q() {
    const ScaledHeads<Rows, 64, kConsumerWarps> heads(s.q, thread, lane);
    heads.fetch(p, unit, first_head);
    if (thread == 0) s.least = lanes_of_all(p, unit);
    if (thread < 64)
      s.visible[thread] = lanes_of_token(p, unit, min(first_head + thread, p.fold * p.heads - 1) / p.heads) - begin;
    heads.scale(s.scale, p.scale_log2);
  }

  __device__ void consume(int groups) {
    if (thread < 64) s.peak[thread] = s.slack[thread] = -INFINITY, s.base[thread] = kWeightLog2;
    if (thread < 4 * 64) (&s.sum[0][0])[thread] = 0.f;
    load_q();
    cuda::barrier_sync(kReady, kThreads);
    bool again = false;
    int scored = -1;  // what x are the scores of
    unsigned turn = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++turn) {
      const bool mine = tile % 2 == group;
      const int next = mine ? tile : tile + 1;
      if (next < tiles && next != scored) score(next), scored = next;
      if (mine) tell(tile, turn, again, again ? Weighed{} : weigh(turn));
      again = multiply(tile, turn);
      if (!again) ++tile;
    }
    write(groups);
  }

  // ---- the result -----------------------------------------------------------------------------------

  static_assert(offsetof(Smem, full) - offsetof(Smem, weights) >= sizeof(float) * kShareStride * 64);

  __device__ static void join() { cuda::barrier_sync(kBoth, kConsumers); }
  // By head, what O is to be multiplied with, over Q.
  __device__ float (&factors() const)[64] { return reinterpret_cast<float (&)[64]>(s.q[2]); }

  // This thread's O, as share(head, column, values of the column and the next).
  template <class Share>
  __device__ void each_share(Share share) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 by = pair_of(factors(), j);
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          share(8 * j + 2 * c + e, 256 * group + b / 2 * 128 + warp * 32 + b % 2 * 16 + 2 * g,
                o[b][4 * j + e] * (e ? by.y : by.x), o[b][4 * j + 2 + e] * (e ? by.y : by.x));
    }
  }
  // |O| that are finite: the greatest of a head into s.greatest.
  __device__ void tell_greatest() {
    float z[16];
    const auto find = [&](auto counted) {
      bool finite = true;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        z[i] = 0.f;
#pragma unroll
        for (int b = 0; b < 4; ++b)
#pragma unroll
          for (int r = 0; r < 2; ++r) z[i] = fmaxf(z[i], counted(fabsf(o[b][i / 2 * 4 + 2 * r + i % 2])));
        finite &= z[i] < INFINITY;
      }
      return finite;
    };
    // Nearly always all are finite, and the second search is code that need not come.
    if (!find([](float y) { return y; })) find([](float y) { return y < INFINITY ? y : 0.f; });
    halve(z, [](float a, float b) { return fmaxf(a, b); });
    pair_of(s.greatest[group][warp], g) = {z[0], z[1]};
  }

  // Parts that meet leave their shares as f16, each head with a factor of its own.
  __device__ void write(int groups) {
    auto* const s_told = reinterpret_cast<Told*>(s.q[0]);  // no longer needed
    auto* const s_log2 = reinterpret_cast<float*>(s.q[1]);
    const Place place = s.plan.place;
    const bool together = place.part.parts > 1 && p.merge == Merge::together;
    const bool halves = together || (place.part.parts > 1 && p.merge == Merge::cluster);
    const std::int64_t partial = partial_row(place, groups);
    if (halves) tell_greatest();
    join();
    if (thread < 64) {
      const float sum = s.sum[0][thread] + s.sum[1][thread] + s.sum[2][thread] + s.sum[3][thread];
      const float log2 = log2_of(sum, s.peak[thread] - kWeightLog2);
      float by = sum == 0.f ? 0.f : kCodeFactor / sum;
      s_log2[thread] = log2;
      if (halves) {  // a head's greatest value becomes 2^14 or next above it, and is told what it has to become
        float top = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) top = fmaxf(top, s.greatest[i / 4][i % 4][thread]);
        const float power = power_of(top), factor = power * 0x1p-14f * by;
        s_told[thread] = {log2, factor};
        by = 0x1p14f / power;
        if (together) {
          p.partial_log2[partial + thread] = log2;
          p.partial[(partial + thread) * kLatent + HalfPartials::kFactorAt] = factor;
        }
      }
      factors()[thread] = by;
    }
    join();
    if (together) {
      auto* const to = reinterpret_cast<__half*>(p.partial + partial * kLatent);
      each_share([=](int head, int column, float y, float z) {
        *reinterpret_cast<std::uint32_t*>(to + head * (2 * kLatent) + column) = cuda::pack_f16x2(y, z);
      });
      meet_parts(p, place, groups, s.todo, thread, join,
                 [&](int i) { add_part<HalfPartials, 4>(p, place, groups, i, thread / 32, kConsumers / 32); });
    } else if (halves) {
      auto* const s_shares = reinterpret_cast<__half*>(s.weights);
      each_share([=](int head, int column, float y, float z) {
        *reinterpret_cast<std::uint32_t*>(s_shares + head * kHalfStride + column) = cuda::pack_f16x2(y, z);
      });
      write_half_shares(p, place, s_told, s_shares, thread, kConsumers);
    } else {
      auto* const s_shares = reinterpret_cast<float*>(s.weights);
      each_share([=](int head, int column, float y, float z) {
        *reinterpret_cast<float2*>(s_shares + head * kShareStride + column) = {y, z};
      });
      write_shares(p, place, groups, s_log2, s_shares, thread, kConsumers, join);
    }
    if (thread == 0) end_launch(p);
  }
};

#endif

template <class Arch, class Rows>
__global__ void __launch_bounds__(cuda::WarpGroupTile::kThreads, 1)
    hopper_kernel(const __grid_constant__ CudaParams p, int groups) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char hopper_smem[];
  auto& s = *reinterpret_cast<HopperSmem<Rows>*>(hopper_smem);
  using Loop = Hopper<Rows>;
  begin_launch(p);
  const Place place = find_place(p, groups, Loop::kTokens, s.plan);
  if (place.part.parts == 0) return;  // the whole CTA
  const LaneRange lanes = range_of(place.part, Loop::kTokens);
  if (threadIdx.x >= Loop::kConsumers) {
    cuda::give_registers<Loop::kProducerRegisters>();
    Loop(p, s, place.part.unit, lanes, 0).produce();
  } else {
    cuda::take_registers<Loop::kConsumerRegisters>();
    if (threadIdx.x == 0) {
      s.plan.place = place;
      tell_merger(p, place);
    }
    Loop(p, s, place.part.unit, lanes, place.group * 64).consume(groups);
  }
#endif
}

}  // namespace sievemla::stage::attention
