// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper.cuh -- the main loop for 64 heads and fp8 rows on sm_90: two warp groups multiply (wgmma),
// one gathers and converts.
//
// What it computes, and over which lanes, is attention.cuh's. Tiles have 64 rows, in two stages.
//   warp group 2 (producer): rows -> bf16 in shared memory, swizzled as wgmma wants it
//   warp groups 0, 1 (consumers): S = Q K^T over 32 of the rows each | barrier: the rows' peaks are known | softmax in
//   registers, P for the other group into shared memory; O += P V over its own rows | barrier | over the other's; 256
//   columns each
// codes * 2^-120 are the keys and values; scales meet the sums over 128 dimensions, and P, of which a group then needs
// two copies, one for each 128 of its columns.
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/hopper_heads.cuh"
#include "cuda/arch/tile.h"

namespace sievemla::stage::attention {

template <class Rows>
struct HopperSmem {
  static constexpr int kBlocks = (kLatent + Rows::kRope) / 64;  // of 64 dimensions: 128 bytes
  static constexpr int kBlockBytes = 64 * 128;

  alignas(1024) unsigned char q[kBlocks][kBlockBytes];
  alignas(1024) unsigned char rows[2][kBlocks][kBlockBytes];
  // P for the other consumer: rows are heads; columns are rows of the tile, or 32 rows by two scales. Where there is
  // room for one alone, the other lies where the stage has its rope, which no longer is needed by then.
  static constexpr bool kBorrows = Rows::kRope > 0;
  alignas(1024) unsigned char weights[kBorrows ? 1 : 2][kBlockBytes];
  alignas(16) float scale[2][4][64];
  alignas(8) unsigned char live[2][8];         // bit per row: not a hole
  alignas(8) std::uint64_t full[2], empty[2];  // mbarriers
  int visible[64];                             // lanes of this part that the head may see
  int least;                                   // lanes of the unit that every token sees
  unsigned todo;                               // of parts that merge together
  float shared[2][64];                         // what the consumers tell each other, by head
  PlanSmem plan;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Rows>
struct Hopper {
  using Smem = HopperSmem<Rows>;
  static constexpr int kTokens = 64, kConsumers = 256, kConsumerWarps = 8, kProducers = 128,
                       kThreads = kConsumers + kProducers;
  static constexpr int kRows = 16;                                         // of a tile, a producing warp's
  static constexpr int kConsumerRegisters = 208, kProducerRegisters = 88;  // 504 in all: what 384 threads get at launch
  static constexpr int kCopies = 2;                                        // of P
  // Scores are kKeyFactor too small, so the rope of Q is made so, and P and its sums are as much too large: so the
  // scales serve both as they are.
  static constexpr int kKeyLog2 = 56;
  static_assert(Rows::kScaled && Rows::kKeyFactor == 0x1p56f);
  static constexpr std::uint32_t kRopeFactor = 0x23802380u;  // 2^-56, twice
  static constexpr float kOutFactor = Rows::kValueFactor * Rows::kWeightFactor;

  const CudaParams& p;
  Smem& s;
  const int unit, begin, end;  // lanes [begin, end) of the unit
  const int first_head, tiles;
  const int thread = threadIdx.x, lane = thread % 32, group = thread / 128;

  __device__ std::uint32_t full(int stage) const { return cuda::shared_address(&s.full[stage]); }
  __device__ std::uint32_t empty(int stage) const { return cuda::shared_address(&s.empty[stage]); }

  // ---- producer: a warp's rows of a tile ------------------------------------------------------------

  std::uint64_t policy;  // how rows stay in L2
  const int warp = thread / 32 % 4;

  // Lane l knows where row l % kRows is; -1: a hole.
  __device__ int lane_of(int tile) const { return begin + tile * kTokens + warp * kRows + lane % kRows; }
  __device__ std::int64_t offset_of(Name name, int at) const { return at < end ? row_offset(p, name.of(p), at) : -1; }

  // 16 bytes of the row at `offset`, zeros for a hole.
  __device__ uint4 load_16(std::int64_t offset, int byte) const {
    uint4 x;
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.s32 there, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n@there ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], "
        "%6;\n}"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(p.rows + offset + byte), "r"(static_cast<int>(offset >= 0)), "l"(policy));
    return x;
  }
  // x, of which nothing can be worked out before the loop: that would take registers from it.
  __device__ static int not_ahead(int x) {
    asm volatile("" : "+r"(x));
    return x;
  }
  // Brings the warp's rows of a tile into L2: few of their loads can be in flight.
  __device__ void prefetch(std::int64_t offsets) const {
    constexpr int kLines = (Rows::kBytes + 127) / 128;
    const int first = not_ahead(lane);
#pragma unroll
    for (int i = 0; i < kRows * kLines; i += 32) {
      const int row = min((i + first) / kLines, kRows - 1), line = (i + first) % kLines;
      const std::int64_t at = __shfl_sync(~0u, offsets, row);
      if (at >= 0) cuda::prefetch_l2(p.rows + at + line * 128);
    }
  }
  // This thread's 16 codes of row `row`.
  __device__ uint4 codes(std::int64_t offsets, int row) const {
    return load_16(__shfl_sync(~0u, offsets, row), lane * 16);
  }
  // `to`: where block lane / 4 has the warp's rows. Lanes of two blocks must not meet in a bank: one starts with its
  // second half, which is what an odd `piece` means.
  __device__ static void store_codes(unsigned char* to, int row, int piece, uint4 x) {
    const uint4 y = piece & 1 ? uint4{x.z, x.w, x.x, x.y} : x;
    *reinterpret_cast<uint4*>(to + cuda::swizzled(row, piece)) = {
        cuda::e4m3_pair<cuda::kBytes01>(y.x), cuda::e4m3_pair<cuda::kBytes23>(y.x),
        cuda::e4m3_pair<cuda::kBytes01>(y.y), cuda::e4m3_pair<cuda::kBytes23>(y.y)};
    *reinterpret_cast<uint4*>(to + cuda::swizzled(row, piece ^ 1)) = {
        cuda::e4m3_pair<cuda::kBytes01>(y.z), cuda::e4m3_pair<cuda::kBytes23>(y.z),
        cuda::e4m3_pair<cuda::kBytes01>(y.w), cuda::e4m3_pair<cuda::kBytes23>(y.w)};
  }

  // `to`: where the block has the warp's rows.
  __device__ void copy_16(const unsigned char* to, int row, int piece, std::int64_t offset, int byte) const {
    cuda::cp_async_16(cuda::shared_address(to + cuda::swizzled(row, piece)),
                      p.rows + max(offset, std::int64_t{0}) + byte, offset >= 0 ? 16 : 0, policy);
  }

  __device__ void produce() {
    constexpr int kAhead = 8;  // rows whose loads are in flight
    const void* const list = list_of(p, unit);
    int zero;  // that the compiler takes for different in different lanes: see below
    asm volatile("mov.u32 %0, %%laneid;\nshr.u32 %0, %0, 5;" : "=r"(zero));
    policy = cuda::l2_policy(p.read_once);
    int at = lane_of(0);
    Name first, second;
    first.read(p, list, at, at < end), second.read(p, list, at + kTokens, at + kTokens < end);
    std::int64_t here = offset_of(first, at), next;
    uint4 ring[kAhead];
    const auto load_ahead = [&] {
#pragma unroll
      for (int row = 0; row < kAhead; ++row) ring[row] = codes(here, row);
    };
    prefetch(here);
    load_ahead();
    next = offset_of(second, at + kTokens);
    cuda::barrier_sync(1, kThreads);  // the mbarriers are there
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, at += kTokens) {
      // A stage that is the same in all lanes would go into a uniform register, and ptxas 13.0 then makes an illegal
      // instruction of a cp.async with an L2 policy.
      const int stage = tile % 2 + zero;
      Name name;
      name.read(p, list, at + 2 * kTokens, at + 2 * kTokens < end);
      unsigned char* const to = s.rows[stage][0] + warp * kRows * 128;
      if (tile >= 2) cuda::mbarrier_wait(empty(stage), (tile / 2 + 1) & 1);
      if constexpr (Rows::kRope > 0) {
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i) {
          const int l = not_ahead(lane), row = 4 * i + l / 8;
          copy_16(to + 8 * Smem::kBlockBytes, row, l % 8, __shfl_sync(~0u, here, row), Rows::kRopeOffset + l % 8 * 16);
        }
      }
      const unsigned live = __ballot_sync(~0u, here >= 0);
      if (lane < kRows / 8) s.live[stage][warp * (kRows / 8) + lane] = static_cast<unsigned char>(live >> 8 * lane);
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
        const int l = not_ahead(lane), row = 8 * i + l % 8;
        const std::int64_t from = __shfl_sync(~0u, here, row);
        cuda::cp_async_4(cuda::shared_address(&s.scale[stage][l / 8][warp * kRows + row]),
                         p.rows + max(from, std::int64_t{0}) + Rows::kScaleOffset + l / 8 * 4, from >= 0 ? 4 : 0);
      }
      const int piece = not_ahead(lane % 4 * 2 + lane / 4 % 2);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        store_codes(to + lane / 4 * Smem::kBlockBytes, row, piece, ring[row % kAhead]);
        if (row + kAhead < kRows) ring[row % kAhead] = codes(here, row + kAhead);
      }
      cuda::fence_async();
      cuda::mbarrier_arrive_landed(full(stage));
      cuda::mbarrier_arrive(full(stage));
      here = next;
      load_ahead();  // not before the fence, which waits for loads
      next = offset_of(name, at + 2 * kTokens);
      prefetch(next);
    }
  }

  // ---- consumers ------------------------------------------------------------------------------------

  const int c = lane % 4, row = warp * 16 + lane / 4;  // this thread's heads: row and row + 8
  float o[2][64] = {};                                 // columns 256 group + 128 i + ..
  float x[16];                                         // scores of rows 32 group + .., then weights
  float share[2][16];                                  // sums over 128 dimensions
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  __device__ Hopper(const CudaParams& params, Smem& smem, int of, LaneRange lanes, int head)
      : p(params),
        s(smem),
        unit(of),
        begin(lanes.begin),
        end(lanes.end),
        first_head(head),
        tiles((lanes.end - lanes.begin + kTokens - 1) / kTokens) {}

  // d (+)= Q K^T over blocks [First, First + Count).
  template <int First, int Count>
  __device__ void multiply_keys(float (&d)[16], int stage, bool add) {
    const std::uint64_t q = cuda::matrix(cuda::shared_address(s.q[First]), 16, 1024),
                        k = cuda::matrix(cuda::shared_address(s.rows[stage][First] + group * 32 * 128), 16, 1024);
#pragma unroll
    for (int i = 0; i < Count * 4; ++i) {
      const int at = (i / 4 * Smem::kBlockBytes + i % 4 * 32) >> 4;
      cuda::wgmma_64x32(d, q + at, k + at, add || i > 0);
    }
  }

  __device__ void score(int tile) {
    const int stage = tile % 2;
    cuda::mbarrier_wait(full(stage), tile / 2 & 1);
    cuda::fence_async();
    cuda::hold(x), cuda::hold(share[0]);
    cuda::wgmma_fence();
    if constexpr (Rows::kRope > 0) multiply_keys<8, 1>(x, stage, false);
    multiply_keys<0, 2>(share[0], stage, false);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::hold(x), cuda::hold(share[0]);
    // A group of dimensions is multiplied while the sums of the one before are taken.
    multiply_group<1>(stage);
    take_share<0>(stage);
    multiply_group<2>(stage);
    cuda::wgmma_wait<1>();
    take_share<1>(stage);
    multiply_group<3>(stage);
    cuda::wgmma_wait<1>();
    take_share<2>(stage);
    cuda::wgmma_wait<0>();
    take_share<3>(stage);
  }
  template <int Group>
  __device__ void multiply_group(int stage) {
    cuda::hold(share[Group % 2]);
    cuda::wgmma_fence();
    multiply_keys<2 * Group, 2>(share[Group % 2], stage, false);
    cuda::wgmma_commit();
  }
  // x += share * scale
  template <int Group>
  __device__ void take_share(int stage) {
    float (&sums)[16] = share[Group % 2];
    cuda::hold(sums);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scale = scales(stage, Group, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool first = Group == 0 && Rows::kRope == 0;
        x[4 * j + i] = fmaf(sums[4 * j + i], i % 2 ? scale.y : scale.x, first ? 0.f : x[4 * j + i]);
      }
    }
  }
  // Of this thread's rows 8j + 2c and the next.
  __device__ float2 scales(int stage, int scale_group, int j) const {
    return *reinterpret_cast<const float2*>(&s.scale[stage][scale_group][32 * group + 8 * j + 2 * c]);
  }

  // What some tokens may not see must not reach them as 0 * NaN: its scores are there already.
  __device__ void hide(int stage, int at) {
    if (p.fold == 1) return;
    const int first = max(0, s.least - begin - at);
    if (first >= kTokens) return;
#pragma unroll 1
    for (int row = first + thread / 32; row < kTokens; row += kConsumers / 32)
      if (lane < 4) s.scale[stage][lane][row] = finite_scale(s.scale[stage][lane][row]);
    cuda::fence_async();
    cuda::barrier_sync(3, kConsumers);
  }

  // P in x. Whether some of it is so large a part of this group's sum so far that its rounding to bf16 would show.
  __device__ bool softmax(int tile) {
    const int stage = tile % 2, first = tile * kTokens + 32 * group;
    const float scale_log2 = p.scale_log2 * Rows::kKeyFactor;
    const unsigned live = reinterpret_cast<const unsigned*>(s.live[stage])[group];
    const int visible[2] = {s.visible[row] - first, s.visible[row + 8] - first};
    if (live != ~0u || min(visible[0], visible[1]) < 32) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int token = i / 4 * 8 + 2 * c + i % 2;
        if (!(live >> token & 1) || token >= visible[i / 2 % 2]) x[i] = -INFINITY;
      }
    }
    float mine[2] = {-INFINITY, -INFINITY}, rescale[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) mine[i / 2 % 2] = fmaxf(mine[i / 2 % 2], x[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      mine[r] = fmaxf(mine[r], __shfl_xor_sync(~0u, mine[r], 1));
      mine[r] = fmaxf(mine[r], __shfl_xor_sync(~0u, mine[r], 2));
      if (c == 0) s.shared[group][row + 8 * r] = mine[r];
    }
    cuda::barrier_sync(3, kConsumers);
    hide(stage, tile * kTokens);
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(mine[r], s.shared[1 - group][row + 8 * r]) * scale_log2;
      most = most > peak[r] + p.slack ? most : peak[r];
      rescale[r] = most == peak[r] ? 1.f : cuda::exp2_approx(peak[r] - most);
      changed |= rescale[r] != 1.f;
      peak[r] = most;
      sum[r] *= rescale[r];
    }
    if (__any_sync(~0u, changed)) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 64; ++i) o[h][i] *= rescale[i / 2 % 2];
    }
    const float shift[2] = {kKeyLog2 - (peak[0] == -INFINITY ? 0.f : peak[0]),
                            kKeyLog2 - (peak[1] == -INFINITY ? 0.f : peak[1])};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = cuda::exp2_approx(fmaf(x[i], scale_log2, shift[i / 2 % 2]));
      sum[i / 2 % 2] += x[i];
    }
    bool heavy = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      mine[r] = cuda::exp2_approx(fmaf(mine[r], scale_log2, shift[r])) * p.heavy;
      heavy |= mine[r] > sum[r];  // of this thread's share; of all where that is so
    }
    if (__any_sync(~0u, heavy)) {
      const float all[2] = {quad_sum(sum[0]), quad_sum(sum[1])};
      heavy = mine[0] > all[0] || mine[1] > all[1];
    }
    return heavy;
  }
  // Where the P lies that `reader` reads.
  __device__ unsigned char* weights_for(int reader, int stage) {
    if constexpr (Smem::kBorrows) return reader == 1 ? s.weights[0] : s.rows[stage][8];
    else return s.weights[reader];
  }
  // P, times the scales: this group's as operands, the other's into shared memory.
  template <bool Residue>
  __device__ void spread_weights(int stage, std::uint32_t (&own)[kCopies][8]) {
    unsigned char* const to = weights_for(1 - group, stage) + row * 128 + 4 * c;
    const int turn = (row & 7) << 4;          // of the swizzle
    constexpr int kAtOnce = Residue ? 1 : 4;  // scales that are read before anything is written
#pragma unroll
    for (int i = 0; i < kCopies * 4; i += kAtOnce) {
      const int copy = i / 4;
      float2 scale[2][kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int other = 0; other < 2; ++other)
          scale[other][k] = scales(stage, 2 * (other ? 1 - group : group) + copy, i % 4 + k);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int j = i % 4 + k, piece = 4 * copy + j;
          const float y = x[4 * j + 2 * r], z = x[4 * j + 2 * r + 1];
          own[copy][2 * j + r] = rounded<Residue>(y * scale[0][k].x, z * scale[0][k].y);
          *reinterpret_cast<std::uint32_t*>(to + 1024 * r + (piece << 4 ^ turn)) =
              rounded<Residue>(y * scale[1][k].x, z * scale[1][k].y);
        }
    }
  }
  // Starts O += P V. True: P has to go through V once more, as what rounding took from it.
  template <bool Residue>
  __device__ bool accumulate(int tile, bool heavy) {
    const int stage = tile % 2;
    std::uint32_t own[kCopies][8];
    spread_weights<Residue>(stage, own);
    cuda::fence_async();
    // Its own rows first: the other's P may take a while.
    const unsigned char* values = s.rows[stage][4 * group];
    const auto matrix_of = [&](int rows_of, int h, int step) {
      return cuda::matrix(cuda::shared_address(values + rows_of * 4096), Smem::kBlockBytes, 1024) +
             ((2 * h * Smem::kBlockBytes + step * 2048) >> 4);
    };
    cuda::hold(o[0]), cuda::hold(o[1]);
    cuda::wgmma_fence();
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int step = 0; step < 2; ++step) cuda::wgmma_64x128(o[h], &own[h][4 * step], matrix_of(group, h, step));
    const bool again = cuda::barrier_any(3, kConsumers, heavy);
    const std::uint64_t others = cuda::matrix(cuda::shared_address(weights_for(group, stage)), 16, 1024);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int step = 0; step < 2; ++step)
        cuda::wgmma_64x128(o[h], others + (64 * h + 32 * step >> 4), matrix_of(1 - group, h, step));
    cuda::wgmma_commit();
    return again;
  }
  __device__ void finish() {
    cuda::wgmma_wait<0>();
    cuda::hold(o[0]), cuda::hold(o[1]);
  }

  // ---- the result -----------------------------------------------------------------------------------

  __device__ void write(int groups) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(sum[r]);
      if (c == 0) s.shared[group][row + 8 * r] = sum[r];
    }
    cuda::barrier_sync(3, kConsumers);
    auto& halves = reinterpret_cast<HalfShares&>(s.q[0]);  // no longer needed
    auto* const s_log2 = reinterpret_cast<float*>(s.q[1]);
    static_assert(sizeof(halves) <= sizeof(s.q[0]));
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = s.shared[0][row + 8 * r] + s.shared[1][row + 8 * r];
      if (group == 0 && c == 0)
        halves.told[row + 8 * r].log2 = s_log2[row + 8 * r] = log2_of(sum[r], peak[r] - kKeyLog2);
      factor[r] = sum[r] == 0.f ? 0.f : kOutFactor / sum[r];
    }
    const auto join = [] { cuda::barrier_sync(3, kConsumers); };
    static_assert(offsetof(Smem, scale) - offsetof(Smem, rows) >= sizeof(float) * kShareStride * 64);
    const Place place = s.plan.place;
    if (place.part.parts > 1 && p.merge == Merge::cluster) {
      auto* const s_shares = reinterpret_cast<__half*>(s.rows);
      put_half_shares(o, halves, s_shares, group, row, c, factor, join);
      write_half_shares(p, place, halves, s_shares, thread, kConsumers);
    } else {
      auto* const s_shares = reinterpret_cast<float*>(s.rows);
      put_shares(o, s_shares, group, row, c, factor);
      write_shares<2>(p, place, groups, s_log2, s_shares, s.todo, thread, kConsumers, join);
    }
  }

  __device__ void consume(int groups) {
    load_heads<Rows, kRopeFactor>(p, s, unit, begin, first_head, thread);
    cuda::barrier_sync(3, kConsumers);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      score(tile);
      const bool heavy = softmax(tile);
      if (accumulate<false>(tile, heavy)) {
        finish();
        cuda::barrier_sync(3, kConsumers);  // P is no longer read
        accumulate<true>(tile, false);
      }
      finish();
      if (lane == 0) cuda::mbarrier_arrive(empty(tile % 2));
    }
    write(groups);
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
      for (int stage = 0; stage < 2; ++stage) {
        cuda::mbarrier_init(cuda::shared_address(&s.full[stage]), 2 * Loop::kProducers);
        cuda::mbarrier_init(cuda::shared_address(&s.empty[stage]), Loop::kConsumerWarps);
      }
      cuda::fence_async();
    }
    cuda::barrier_arrive(1, Loop::kThreads);
    Loop(p, s, place.part.unit, lanes, place.group * 64).consume(groups);
  }
#endif
}

}  // namespace sievemla::stage::attention
