// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper_roles.cuh -- the main loop for 64 heads and bf16 rows on sm_90: a role for each warp group.
//
// What it computes, and over which lanes, is attention.cuh's. Rows pass through two stages of 64, swizzled as wgmma
// wants them. mbarriers join the roles; a stage is free again by 16 rows.
//   warp group 3 (producer): rows into stages
//   warp group 2 (scorer): S = Q K^T of a stage; P into it, where the rope was
//   warp groups 0, 1 (values): O += P V, 256 columns each
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/hopper_heads.cuh"
#include "cuda/arch/tile.h"

namespace sievemla::stage::attention {

template <class Rows>
struct RolesSmem {
  static constexpr int kBlocks = (kLatent + Rows::kRope) / 64;  // of 64 dimensions: 128 bytes
  static constexpr int kBlockBytes = 64 * 128;

  alignas(1024) unsigned char q[kBlocks][kBlockBytes];
  alignas(1024) unsigned char rows[2][9][kBlockBytes];  // the last block has the rope; once that is multiplied, P
  alignas(16) unsigned char live[2][16];                // bit per row, four a byte: not a hole
  alignas(8) std::uint64_t full[2], empty[2][4], weighed[2], taken[2];  // mbarriers
  float rescale[2][64];        // of P in turns: what O of the head has to be multiplied with before
  unsigned char told[2][4];    // of P in turns, by 16 heads: kRescale, kAgain
  int visible[64];             // lanes of this part that the head may see
  int least;                   // lanes of the unit that every token sees
  float log2[64], factor[64];  // in the end: of the head's sum; what O has to be multiplied with
  unsigned todo;               // of parts that merge together
  PlanSmem plan;
};

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

__device__ inline float quad_sum(float y) {
  y += __shfl_xor_sync(~0u, y, 1);
  return y + __shfl_xor_sync(~0u, y, 2);
}

// What all roles know.
template <class Rows>
struct Role {
  using Smem = RolesSmem<Rows>;
  static constexpr int kTokens = 64, kGroup = 128, kConsumers = 3 * kGroup, kThreads = 4 * kGroup;
  // All four together: 512, what 512 threads get at launch.
  static constexpr int kProducerRegisters = 56, kScorerRegisters = 136, kValueRegisters = 160;
  // Barriers. Who waits at one does so at one place: else synccheck takes the block for divergent, and stops it.
  static constexpr int kReady = 1, kJoined = 2, kScored = 3, kSet = 4, kLoaded = 5, kSummed = 6;
  static constexpr unsigned kRescale = 1, kAgain = 2;  // O before P; the stage goes through P once more
  static_assert(!Rows::kScaled);

  // Known to the compiler to be the same in all lanes, as an operand's address in shared memory should be.
  __device__ static int uniform(int x) { return __shfl_sync(~0u, x, 0); }
  // threadIdx.x, where it is asked for: what comes of it would be held across the roles.
  __device__ static int own_thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }

  const CudaParams& p;
  Smem& s;
  const int unit, begin, end;  // lanes [begin, end) of the unit
  const int tiles = uniform((end - begin + kTokens - 1) / kTokens);
  const int thread = own_thread(), lane = thread % 32, warp = uniform(thread / 32 % 4);
  const int c = lane % 4, row = warp * 16 + lane / 4;  // a consumer's heads: row and row + 8

  __device__ std::uint32_t full(int stage) const { return cuda::shared_address(&s.full[stage]); }
  __device__ std::uint32_t empty(int stage, int i) const { return cuda::shared_address(&s.empty[stage][i]); }
  __device__ std::uint32_t weighed(int turn) const { return cuda::shared_address(&s.weighed[turn]); }
  __device__ std::uint32_t taken(int turn) const { return cuda::shared_address(&s.taken[turn]); }
};

// ---- producer -----------------------------------------------------------------------------------------

template <class Rows>
struct RowProducer : Role<Rows> {
  using Base = Role<Rows>;
  using Base::p, Base::s, Base::unit, Base::begin, Base::end, Base::tiles, Base::lane, Base::warp, Base::full,
      Base::empty, Base::kTokens;
  const std::uint64_t policy = cuda::l2_policy(p.read_once);

  // A warp has rows 4 warp .. of each 16. Lane l knows where one of two tiles' is: row l % 4 of l / 4 % 4 of tile l /
  // 16. -1: a hole.
  __device__ int lane_of(int pair) const {
    return begin + (2 * pair + lane / 16) * kTokens + lane / 4 % 4 * 16 + warp * 4 + lane % 4;
  }
  __device__ void read(Name& name, const void* list, int pair) const {
    name.read(p, list, lane_of(pair), lane_of(pair) < end);
  }
  __device__ std::int64_t offset_of(const Name& name, int pair) const {
    const int at = lane_of(pair);
    return at < end ? row_offset(p, name.of(p), at) : -1;
  }

  // Blocks of four rows, of which this lane's 16 bytes lie at `from`: 128 bytes of each row an instruction.
  template <int First, int Count>
  __device__ void copy(int stage, int i, std::int64_t from) const {
    const std::uint32_t to =
        cuda::shared_address(s.rows[stage][First]) + cuda::swizzled(16 * i + warp * 4 + lane / 8, lane % 8);
    const unsigned char* const at = p.rows + max(from, std::int64_t{0}) + First * 128 + lane % 8 * 16;
#pragma unroll
    for (int block = 0; block < Count; ++block)
      cuda::cp_async_16(to + block * Base::Smem::kBlockBytes, at + block * 128, from >= 0 ? 16 : 0, policy);
  }

  __device__ void run() {
    const void* const list = list_of(p, unit);
    int zero;  // that the compiler takes for different in different lanes: see below
    asm volatile("mov.u32 %0, %%laneid;\nshr.u32 %0, %0, 5;" : "=r"(zero));
    Name first, second;
    read(first, list, 0), read(second, list, 1);
    std::int64_t here = offset_of(first, 0), next = offset_of(second, 1);
    cuda::barrier_sync(Base::kReady, Base::kGroup + 32);  // the mbarriers are there
    Name name;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile % 2 == 0) {
        name = {};
        read(name, list, tile / 2 + 2);
      }
      // A stage that is the same in all lanes would go into a uniform register, and ptxas 13.0 then makes an illegal
      // instruction of a cp.async with an L2 policy.
      const int stage = tile % 2 + zero;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned live = __ballot_sync(~0u, here >= 0) >> (tile % 2 * 16 + 4 * i);
        if (tile >= 2) cuda::mbarrier_wait(empty(stage, i), tile / 2 - 1 & 1);
        if (lane == 0) s.live[stage][4 * i + warp] = live & 0xF;
        copy<0, kLatent / 64>(stage, i, __shfl_sync(~0u, here, tile % 2 * 16 + 4 * i + lane / 8));
      }
      // Not before P, which lies there, has been multiplied with all of the rows.
      if constexpr (Rows::kRope > 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy<kLatent / 64, 1>(stage, i, __shfl_sync(~0u, here, tile % 2 * 16 + 4 * i + lane / 8));
      }
      cuda::mbarrier_arrive_landed(full(stage));
      if (lane == 0) cuda::mbarrier_arrive(full(stage));
      if (tile % 2 == 1) here = next, next = offset_of(name, tile / 2 + 2);
    }
  }
};

// ---- scorer -------------------------------------------------------------------------------------------

template <class Rows>
struct Scorer : Role<Rows> {
  using Base = Role<Rows>;
  using Base::p, Base::s, Base::begin, Base::tiles, Base::lane, Base::warp, Base::c, Base::row, Base::full, Base::taken,
      Base::weighed, Base::uniform, Base::kGroup, Base::kTokens, Base::kScored;
  static constexpr int kBlockBytes = Base::Smem::kBlockBytes;

  const std::uint64_t q = cuda::matrix(uniform(static_cast<int>(cuda::shared_address(s.q[0]))), 16, 1024),
                      k = cuda::matrix(uniform(static_cast<int>(cuda::shared_address(s.rows[0][0]))), 16, 1024);
  float x[32];  // scores, then weights
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  int passes = 0;  // of rows through P, so far
  int least;       // lanes of this part that both heads see

  // x = Q K^T
  __device__ void score(int tile) {
    cuda::mbarrier_wait(full(tile % 2), tile / 2 & 1);
    cuda::fence_async();
    const std::uint64_t keys = cuda::moved(k, tile % 2 * static_cast<int>(sizeof(s.rows[0])));
    cuda::hold(x);
    cuda::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * Base::Smem::kBlocks; ++i) {
      const int at = i / 4 * kBlockBytes + i % 4 * 32;
      cuda::wgmma_64x64(x, cuda::moved(q, at), cuda::moved(keys, at), i > 0);
    }
    cuda::wgmma_commit();
    wait_for_turn();  // meanwhile
    const uint4 live = *reinterpret_cast<const uint4*>(s.live[tile % 2]);
    const bool all = (live.x & live.y & live.z & live.w) == 0x0F0F0F0Fu;
    cuda::wgmma_wait<0>();
    cuda::hold(x);
    if (!all || least < (tile + 1) * kTokens) mask(tile % 2, tile * kTokens);
  }
  __device__ void wait_for_turn() const {
    if (passes >= 2) cuda::mbarrier_wait(taken(passes % 2), (passes / 2 & 1) ^ 1);
  }
  __device__ void mask(int stage, int at) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int token = i / 4 * 8 + 2 * c + i % 2;
      if (!(s.live[stage][token / 4] >> token % 4 & 1) || at + token >= s.visible[row + i / 2 % 2 * 8])
        x[i] = -INFINITY;
    }
  }

  // What some tokens may not see must not reach them as 0 * NaN: its scores are there already.
  __device__ void hide(int stage, int at) {
    if (p.fold == 1) return;
    const int first = max(0, s.least - begin - at);
    if (first >= kTokens) return;
    cuda::barrier_sync(kScored, kGroup);
#pragma unroll 1
    for (int i = first + warp; i < kTokens; i += 4) {
#pragma unroll 1
      for (int block = 0; block < kLatent / 64; ++block) {
        auto& pair = reinterpret_cast<std::uint32_t*>(s.rows[stage][block] + i * 128)[lane];
        pair = finite_bf16x2(pair);
      }
    }
  }

  // P of x, then of what rounding took from it where that would show.
  __device__ void weigh(int stage, int at) {
    hide(stage, at);
    float most[2] = {-INFINITY, -INFINITY}, rescale[2];
#pragma unroll
    for (int i = 0; i < 32; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], x[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
      float top = most[r] * p.scale_log2;
      top = top > peak[r] + p.slack ? top : peak[r];
      rescale[r] = top == peak[r] ? 1.f : cuda::exp2_approx(peak[r] - top);
      peak[r] = top;
      sum[r] *= rescale[r];
    }
    const bool changed = __any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f);
    const float shift[2] = {peak[0] == -INFINITY ? 0.f : -peak[0], peak[1] == -INFINITY ? 0.f : -peak[1]};
    float more[2] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      x[i] = cuda::exp2_approx(fmaf(x[i], p.scale_log2, shift[i / 2 % 2]));
      (i / 4 % 2 ? more : sum)[i / 2 % 2] += x[i];
    }
    bool heavy = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += more[r];
      most[r] = cuda::exp2_approx(fmaf(most[r], p.scale_log2, shift[r])) * p.heavy;
      heavy |= most[r] > sum[r];  // of this thread's share; of all where that is so
    }
    if (__any_sync(~0u, heavy)) {
      const float all[2] = {quad_sum(sum[0]), quad_sum(sum[1])};
      heavy = most[0] > all[0] || most[1] > all[1];
    }
    // Here all of the scorer's warps have their scores: the rope is no longer read.
    const bool again = cuda::barrier_any(kScored, kGroup, heavy);
    pass<false>(stage, rescale, (changed ? Base::kRescale : 0) | (again ? Base::kAgain : 0));
    if (!again) return;
    cuda::mbarrier_wait(taken((passes + 1) % 2), (passes - 1) / 2 & 1);  // P is one for the stage
    pass<true>(stage, rescale, 0);
  }

  // P into shared memory.
  template <bool Residue>
  __device__ void pass(int stage, const float (&rescale)[2], unsigned told) {
    const int turn = passes % 2;
    if constexpr (Residue) wait_for_turn();
    ++passes;
    if (lane == 0) s.told[turn][warp] = static_cast<unsigned char>(told);
    if (told & Base::kRescale && c == 0) s.rescale[turn][row] = rescale[0], s.rescale[turn][row + 8] = rescale[1];
    // This lane's row of the four blocks of 8 rows x 16 bytes that are stored at a time.
    const std::uint32_t to = cuda::shared_address(s.rows[stage][8]) + cuda::swizzled(warp * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      std::uint32_t y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i / 2) + 2 * (i % 2);
        y[i] = rounded<Residue>(x[at], x[at + 1]);
      }
      cuda::stmatrix_x4(to ^ j << 4, y);
    }
    cuda::fence_async();
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(weighed(turn));
  }

  __device__ void run() {
    cuda::barrier_sync(Base::kLoaded, Base::kConsumers);  // Q and the mbarriers are there
    least = min(s.visible[row], s.visible[row + 8]);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      score(tile);
      weigh(tile % 2, tile * kTokens);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(sum[r]);
      if (c != 0) continue;
      s.log2[row + 8 * r] = log2_of(sum[r], peak[r]);
      s.factor[row + 8 * r] = sum[r] == 0.f ? 0.f : 1.f / sum[r];
    }
  }
};

// ---- values -------------------------------------------------------------------------------------------

template <class Rows>
struct Values : Role<Rows> {
  using Base = Role<Rows>;
  using Base::s, Base::tiles, Base::thread, Base::lane, Base::warp, Base::c, Base::row, Base::empty, Base::taken,
      Base::weighed, Base::uniform;
  static constexpr int kBlockBytes = Base::Smem::kBlockBytes;
  const int first_head;
  const int group = uniform(thread / Base::kGroup);
  float o[2][64] = {};  // columns 256 group + 128 i + ..

  // The rows of step i are free again once at most 3 - i steps run.
  template <int Left>
  __device__ void release(int stage) {
    cuda::wgmma_wait<Left>();
    if (lane == 0) cuda::mbarrier_arrive(empty(stage, 3 - Left));
  }

  __device__ void run() {
    cuda::barrier_sync(Base::kSet, 2 * Base::kGroup);  // the mbarriers are there
    load_heads<Rows>(this->p, s, this->unit, this->begin, first_head, thread);
    cuda::barrier_arrive(Base::kLoaded, Base::kConsumers);
    const std::uint64_t weights = cuda::matrix(uniform(static_cast<int>(cuda::shared_address(s.rows[0][8]))), 16, 1024),
                        values = cuda::matrix(uniform(static_cast<int>(cuda::shared_address(s.rows[0][4 * group]))),
                                              kBlockBytes, 1024);
#pragma unroll 1
    for (int tile = 0, pass = 0; tile < tiles; ++pass) {
      const int stage = tile % 2, at = stage * static_cast<int>(sizeof(s.rows[0]));
      cuda::mbarrier_wait(weighed(pass % 2), pass / 2 & 1);
      cuda::fence_async();
      const unsigned told = uniform(s.told[pass % 2][warp]);
      if (told & Base::kRescale) {
        const float rescale[2] = {s.rescale[pass % 2][row], s.rescale[pass % 2][row + 8]};
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < 64; ++i) o[h][i] *= rescale[i / 2 % 2];
      }
      cuda::hold(o[0]), cuda::hold(o[1]);
      cuda::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          cuda::wgmma_64x128(o[h], cuda::moved(weights, at + i * 32),
                             cuda::moved(values, at + 2 * h * kBlockBytes + i * 2048));
        cuda::wgmma_commit();
      }
      if (told & Base::kAgain) {
        cuda::wgmma_wait<0>();
      } else {
        release<3>(stage), release<2>(stage), release<1>(stage), release<0>(stage);
        ++tile;
      }
      cuda::hold(o[0]), cuda::hold(o[1]);
      if (lane == 0) cuda::mbarrier_arrive(taken(pass % 2));
    }
  }
};

#endif

template <class Arch, class Rows>
__global__ void __launch_bounds__(cuda::RolesTile::kThreads, 1)
    roles_kernel(const __grid_constant__ CudaParams p, int groups) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char roles_smem[];
  auto& s = *reinterpret_cast<RolesSmem<Rows>*>(roles_smem);
  using Base = Role<Rows>;
  static_assert(Base::kThreads == cuda::RolesTile::kThreads);
  static_assert(sizeof(s.rows) >= sizeof(float) * kShareStride * 64);
  begin_launch(p);
  const Place place = find_place(p, groups, Base::kTokens, s.plan);
  if (place.part.parts == 0) return;  // the whole CTA
  const LaneRange lanes = range_of(place.part, Base::kTokens);
  const auto join = [] { cuda::barrier_sync(Base::kJoined, Base::kConsumers); };
  const int group = threadIdx.x / Base::kGroup;
  if (group == 3) {
    cuda::give_registers<Base::kProducerRegisters>();
    RowProducer<Rows>{{p, s, place.part.unit, lanes.begin, lanes.end}}.run();
    return;
  }
  auto* const s_shares = reinterpret_cast<float*>(s.rows);  // in the end
  if (group == 2) {
    cuda::take_registers<Base::kScorerRegisters>();
    Scorer<Rows>{{p, s, place.part.unit, lanes.begin, lanes.end}}.run();
    cuda::barrier_arrive(Base::kSummed, Base::kConsumers);
  } else {
    cuda::take_registers<Base::kValueRegisters>();
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        s.plan.place = place;
        tell_merger(p, place);
        for (int i = 0; i < 2; ++i) {
          cuda::mbarrier_init(cuda::shared_address(&s.full[i]), 4 + Base::kGroup);
          for (int k = 0; k < 4; ++k) cuda::mbarrier_init(cuda::shared_address(&s.empty[i][k]), 8);
          cuda::mbarrier_init(cuda::shared_address(&s.weighed[i]), 4);
          cuda::mbarrier_init(cuda::shared_address(&s.taken[i]), 8);
        }
        cuda::fence_async();
      }
      __syncwarp();
      cuda::barrier_arrive(Base::kReady, Base::kGroup + 32);
    }
    Values<Rows> values{{p, s, place.part.unit, lanes.begin, lanes.end}, place.group * 64};
    values.run();
    cuda::barrier_sync(Base::kSummed, Base::kConsumers);
    put_shares(values.o, s_shares, values.group, values.row, values.c,
               {s.factor[values.row], s.factor[values.row + 8]});
  }
  const int thread = Base::own_thread();
  const Place& placed = s.plan.place;
  write_shares(p, placed, groups, s.log2, s_shares, thread, Base::kConsumers, join);
  if (placed.part.parts > 1 && p.merge == Merge::together)
    meet_parts(p, placed, groups, s.todo, thread, join,
               [&](int i) { add_part<FloatPartials, 2>(p, placed, groups, i, thread / 32, Base::kConsumers / 32); });
  if (thread == 0) end_launch(p);
#endif
}

}  // namespace sievemla::stage::attention
