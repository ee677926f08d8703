// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper.cuh -- the main loop for many heads on sm_90: warp groups multiply (wgmma), one gathers.
//
// What it computes, and over which lanes, is attention.cuh's. A CTA serves 64 heads; its tiles have 64 rows, two
// stages.
//   warp group 2 (producer): rows -> bf16 in shared memory, swizzled as wgmma wants it; fp8 is converted on the way,
// once
//   warp groups 0, 1 (consumers): S = Q K^T over 32 of the rows each | barrier: the rows' peaks are known | softmax in
//   registers, P for the other group into shared memory | barrier | O += P V over all rows, 256 columns each
// fp8: codes * 2^-120 are the keys and values; scales meet the sums over 128 dimensions, and P, of which a group then
// needs two copies, one for each 128 of its columns.
#pragma once
#include <cuda_bf16.h>

#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/rows.cuh"
#include "cuda/ptx/sm90a.cuh"

namespace sievemla::stage::attention {

template <class Rows>
struct HopperSmem {
  static constexpr int kBlocks = (kLatent + Rows::kRope) / 64;  // of 64 dimensions: 128 bytes
  static constexpr int kBlockBytes = 64 * 128;

  alignas(1024) unsigned char q[kBlocks][kBlockBytes];
  alignas(1024) unsigned char rows[2][kBlocks][kBlockBytes];
  // P for the other consumer: rows are heads; columns are rows of the tile, or 32 rows by two scales. Where there is
  // room for one alone, the other lies where the stage has its rope, which no longer is needed by then.
  static constexpr bool kBorrows = Rows::kScaled && Rows::kRope > 0;
  alignas(1024) unsigned char weights[Rows::kScaled && !kBorrows ? 2 : 1][kBlockBytes];
  alignas(16) float scale[2][Rows::kScaled ? 4 : 1][64];  // times kKeyFactor
  alignas(8) unsigned short live[2][4];                   // bit per row: not a hole
  alignas(8) std::uint64_t full[2], empty[2];             // mbarriers
  const void* list;                                       // of the unit
  int begin, end;                                         // lanes of the unit that are this part's
  int visible[64];                                        // lanes of this part that the head may see
  float shared[2][64];                                    // what the consumers tell each other, by head
  PlanSmem plan;
  int is_last;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Rows>
struct Hopper {
  using Smem = HopperSmem<Rows>;
  static constexpr int kHeads = 64, kTokens = 64, kConsumers = 256, kConsumerWarps = 8, kFirstProducer = 256;
  static constexpr int kPieces = Smem::kBlocks * 8;      // of 16 bytes, of a row in bf16
  static constexpr int kCopies = Rows::kScaled ? 2 : 1;  // of P
  static constexpr float kHeavyPart = 16.f, kSlack = 8.f;
  // P carries kKeyFactor as well: the scales in shared memory serve both.
  static constexpr float kOutFactor = Rows::kScaled ? Rows::kValueFactor * Rows::kWeightFactor / Rows::kKeyFactor : 1.f;

  const CudaParams& p;
  Smem& s;
  const Part& part;
  const int first_head, tiles;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, group = thread / 128;

  __device__ static int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
  __device__ std::uint32_t full(int stage) const { return cuda::shared_address(&s.full[stage]); }
  __device__ std::uint32_t empty(int stage) const { return cuda::shared_address(&s.empty[stage]); }

  // ---- producer: a warp's 16 rows of a tile ---------------------------------------------------------

  // Lanes l and l + 16 know where row l is; -1: a hole.
  __device__ int lane_of(int tile) const { return s.begin + tile * kTokens + warp * 16 + lane % 16; }
  __device__ std::int64_t named_by(int at) const { return at < s.end ? read_lane(p, s.list, at) : -1; }
  __device__ std::int64_t offset_of(std::int64_t named, int at) const {
    return at < s.end ? row_offset(p, named, at) : -1;
  }

  // 16 bytes of the row at `offset`, zeros for a hole.
  __device__ uint4 load_16(std::int64_t offset, int byte) const {
    uint4 x;
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.s32 there, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n@there ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(p.rows + offset + byte), "r"(static_cast<int>(offset >= 0)));
    return x;
  }
  // Brings the warp's rows of a tile into L2: few of their loads can be in flight.
  __device__ void prefetch(std::int64_t offsets) const {
    constexpr int kLines = (Rows::kBytes + 127) / 128;
#pragma unroll
    for (int i = 0; i < 16 * kLines; i += 32) {
      const int row = min((i + lane) / kLines, 15), line = (i + lane) % kLines;
      const std::int64_t at = __shfl_sync(~0u, offsets, row);
      if (at >= 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.rows + at + line * 128));
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
    *reinterpret_cast<uint4*>(to + swizzled(row, piece)) = {
        cuda::e4m3_pair<cuda::kBytes01>(y.x), cuda::e4m3_pair<cuda::kBytes23>(y.x),
        cuda::e4m3_pair<cuda::kBytes01>(y.y), cuda::e4m3_pair<cuda::kBytes23>(y.y)};
    *reinterpret_cast<uint4*>(to + swizzled(row, piece ^ 1)) = {
        cuda::e4m3_pair<cuda::kBytes01>(y.z), cuda::e4m3_pair<cuda::kBytes23>(y.z),
        cuda::e4m3_pair<cuda::kBytes01>(y.w), cuda::e4m3_pair<cuda::kBytes23>(y.w)};
  }

  // `to`: where the block has the warp's rows.
  __device__ void copy_16(const unsigned char* to, int row, int piece, std::int64_t offset, int byte) const {
    cuda::cp_async_16(cuda::shared_address(to + swizzled(row, piece)), p.rows + max(offset, std::int64_t{0}) + byte,
                      offset >= 0 ? 16 : 0);
  }

  __device__ void produce() {
    constexpr int kAhead = 8;  // rows whose loads are in flight
    int at = lane_of(0);
    std::int64_t here = offset_of(named_by(at), at), next = offset_of(named_by(at + kTokens), at + kTokens);
    uint4 ring[kAhead], scale{};
    if constexpr (Rows::kScaled) {
      prefetch(next);
      scale = load_16(here, Rows::kScaleOffset);
#pragma unroll
      for (int row = 0; row < kAhead; ++row) ring[row] = codes(here, row);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, at += kTokens) {
      const int stage = tile % 2;
      const std::int64_t named = named_by(at + 2 * kTokens);
      int piece = lane % 8;
      unsigned char* const to = s.rows[stage][0] + warp * 16 * 128;
      if (tile >= 2) cuda::mbarrier_wait(empty(stage), (tile / 2 + 1) & 1);
      if constexpr (Rows::kRope > 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 4 * i + lane / 8;
          copy_16(to + 8 * Smem::kBlockBytes, row, piece, __shfl_sync(~0u, here, row),
                  Rows::kRopeOffset + lane % 8 * 16);
        }
      }
      const unsigned live = __ballot_sync(~0u, here >= 0);
      if (lane == 0) s.live[stage][warp] = static_cast<unsigned short>(live);
      if constexpr (Rows::kScaled) {
        if (lane < 16) {
          const std::uint32_t x[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) s.scale[stage][i][warp * 16 + lane] = __uint_as_float(x[i]) * Rows::kKeyFactor;
        }
        scale = load_16(next, Rows::kScaleOffset);
        piece = lane % 4 * 2 + lane / 4 % 2;
        asm volatile("" : "+r"(piece));  // the places of all rows, worked out ahead, would not fit the registers
#pragma unroll
        for (int row = 0; row < 16; ++row) {
          store_codes(to + lane / 4 * Smem::kBlockBytes, row, piece, ring[row % kAhead]);
          ring[row % kAhead] = codes(row + kAhead < 16 ? here : next, (row + kAhead) % 16);
        }
        cuda::fence_async();
      } else {
        asm volatile("" : "+r"(piece));
#pragma unroll
        for (int row = 0; row < 16; ++row) {
          const std::int64_t from = __shfl_sync(~0u, here, row);
          copy_16(to + lane / 8 * Smem::kBlockBytes, row, piece, from, lane * 16);
          copy_16(to + (4 + lane / 8) * Smem::kBlockBytes, row, piece, from, 512 + lane * 16);
        }
      }
      cuda::mbarrier_arrive_landed(full(stage));
      cuda::mbarrier_arrive(full(stage));
      here = next, next = offset_of(named, at + 2 * kTokens);
      if constexpr (Rows::kScaled) prefetch(next);
    }
  }

  // ---- consumers ------------------------------------------------------------------------------------

  const int c = lane % 4, row = warp * 16 + lane / 4;  // this thread's heads: row and row + 8
  float o[2][64] = {};                                 // columns 256 group + 128 i + ..
  float x[16];                                         // scores of rows 32 group + .., then weights
  float share[16];                                     // sums over 128 dimensions
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  __device__ Hopper(const CudaParams& params, Smem& smem, int head)
      : p(params),
        s(smem),
        part(smem.plan.part),
        first_head(head),
        tiles((smem.end - smem.begin + kTokens - 1) / kTokens) {}

  // Heads past the last compute on a copy of it.
  __device__ int head_of(int local) const { return min(first_head + local, p.fold * p.heads - 1); }

  // A warp loads eight heads.
  __device__ void load_q() {
    const int first = thread / 32 * 8;
    const HeadPlace at = place_of(p, part.unit, head_of(first + lane % 8));
    const std::int64_t latent = at.token * p.q_token + at.head * p.q_head,
                       rope = at.token * p.q_rope_token + at.head * p.q_rope_head;
    uint4 y[8][2], z[2];
#pragma unroll
    for (int h = 0; h < 8; ++h) {
      const auto* from = static_cast<const __nv_bfloat16*>(p.q) + __shfl_sync(~0u, latent, h) + lane * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) y[h][half] = __ldg(reinterpret_cast<const uint4*>(from + 256 * half));
    }
    if constexpr (Rows::kRope > 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        z[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q_rope) +
                                                    __shfl_sync(~0u, rope, 4 * i + lane / 8) + lane % 8 * 8));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint4*>(s.q[8] + swizzled(first + 4 * i + lane / 8, lane % 8)) = z[i];
    }
#pragma unroll
    for (int h = 0; h < 8; ++h)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<uint4*>(s.q[4 * half + lane / 8] + swizzled(first + h, lane % 8)) = times_factor(y[h][half]);
    cuda::fence_async();
    cuda::barrier_sync(3, kConsumers);
  }
  __device__ static uint4 times_factor(uint4 y) {
    if constexpr (Rows::kQueryFactor != 0) {
      y.x = cuda::fma_bf16x2(y.x, Rows::kQueryFactor, 0x80008000u);
      y.y = cuda::fma_bf16x2(y.y, Rows::kQueryFactor, 0x80008000u);
      y.z = cuda::fma_bf16x2(y.z, Rows::kQueryFactor, 0x80008000u);
      y.w = cuda::fma_bf16x2(y.w, Rows::kQueryFactor, 0x80008000u);
    }
    return y;
  }

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

  __device__ void score(int stage) {
    cuda::hold(x);
    if constexpr (!Rows::kScaled) {
      cuda::wgmma_fence();
      multiply_keys<0, Smem::kBlocks>(x, stage, false);
    } else {
      cuda::hold(share);
      cuda::wgmma_fence();
      if constexpr (Rows::kRope > 0) multiply_keys<8, 1>(x, stage, false);
      multiply_keys<0, 2>(share, stage, false);
    }
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::hold(x);
    if constexpr (Rows::kScaled) {
      take_share<0>(stage);
      multiply_group<1>(stage);
      multiply_group<2>(stage);
      multiply_group<3>(stage);
    }
  }
  template <int Group>
  __device__ void multiply_group(int stage) {
    cuda::hold(share);
    cuda::wgmma_fence();
    multiply_keys<2 * Group, 2>(share, stage, false);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    take_share<Group>(stage);
  }
  // x += share * scale
  template <int Group>
  __device__ void take_share(int stage) {
    cuda::hold(share);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scale = scales(stage, Group, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool first = Group == 0 && Rows::kRope == 0;
        x[4 * j + i] = fmaf(share[4 * j + i], i % 2 ? scale.y : scale.x, first ? 0.f : x[4 * j + i]);
      }
    }
  }
  // Of this thread's rows 8j + 2c and the next.
  __device__ float2 scales(int stage, int scale_group, int j) const {
    return *reinterpret_cast<const float2*>(&s.scale[stage][scale_group][32 * group + 8 * j + 2 * c]);
  }

  // P in x.
  __device__ void softmax(int stage, int at) {
    const unsigned live = reinterpret_cast<const unsigned*>(s.live[stage])[group];
    const int first = at + 32 * group;
    const int visible[2] = {s.visible[row] - first, s.visible[row + 8] - first};
    if (live != ~0u || min(visible[0], visible[1]) < 32) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int token = i / 4 * 8 + 2 * c + i % 2;
        if (!(live >> token & 1) || token >= visible[i / 2 % 2]) x[i] = -INFINITY;
      }
    }
    float most[2] = {-INFINITY, -INFINITY}, rescale[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], x[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
      if (c == 0) s.shared[group][row + 8 * r] = most[r];
    }
    cuda::barrier_sync(3, kConsumers);
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], s.shared[1 - group][row + 8 * r]) * p.scale_log2;
      most[r] =
          most[r] > peak[r] + kSlack ? most[r] : peak[r];  // O is rescaled only where P would grow beyond 2^kSlack
      rescale[r] = most[r] == peak[r] ? 1.f : cuda::exp2_approx(peak[r] - most[r]);
      changed |= rescale[r] != 1.f;
      peak[r] = most[r];
      sum[r] *= rescale[r];
    }
    if (__any_sync(~0u, changed)) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 64; ++i) o[h][i] *= rescale[i / 2 % 2];
    }
    const float shift[2] = {peak[0] == -INFINITY ? 0.f : peak[0], peak[1] == -INFINITY ? 0.f : peak[1]};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = cuda::exp2_approx(fmaf(x[i], p.scale_log2, -shift[i / 2 % 2]));
      sum[i / 2 % 2] += x[i];
    }
  }
  // Whether some of P is so large a part of this group's sum so far that its rounding to bf16 would show.
  __device__ bool heavy() const {
    float largest[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 16; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x[i]);
    bool any = largest[0] * kHeavyPart > sum[0] || largest[1] * kHeavyPart > sum[1];  // of this thread's share
    if (__any_sync(~0u, any)) {
      const float all[2] = {quad_sum(sum[0]), quad_sum(sum[1])};
      any = largest[0] * kHeavyPart > all[0] || largest[1] * kHeavyPart > all[1];
    }
    return any;
  }
  __device__ static float quad_sum(float y) {
    y += __shfl_xor_sync(~0u, y, 1);
    return y + __shfl_xor_sync(~0u, y, 2);
  }

  // Where the P lies that `reader` reads.
  __device__ unsigned char* weights_for(int reader, int stage) {
    if constexpr (Smem::kBorrows) return reader == 1 ? s.weights[0] : s.rows[stage][8];
    return s.weights[Rows::kScaled ? reader : 0];
  }
  // P for 16 columns of scale group `scale_group`, rounded, or what rounding took from it.
  __device__ std::uint32_t weight(int stage, int scale_group, int j, int r, bool residue) const {
    float2 y = {x[4 * j + 2 * r], x[4 * j + 2 * r + 1]};
    if constexpr (Rows::kScaled) {
      const float2 scale = scales(stage, scale_group, j);
      y.x *= scale.x, y.y *= scale.y;
    }
    if (residue) {
      y.x -= __bfloat162float(__float2bfloat16_rn(y.x));
      y.y -= __bfloat162float(__float2bfloat16_rn(y.y));
    }
    return cuda::pack_bf16x2(y.x, y.y);
  }
  // O += P V. True: P has to go through V once more, as what rounding took from it.
  __device__ bool accumulate(int stage, bool residue) {
    unsigned char* const to = weights_for(1 - group, stage);
    std::uint32_t mine[kCopies][8];
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          mine[copy][2 * j + r] = weight(stage, 2 * group + copy, j, r, residue);
          const std::uint32_t other =
              Rows::kScaled ? weight(stage, 2 * (1 - group) + copy, j, r, residue) : mine[copy][2 * j + r];
          const int piece = 4 * (Rows::kScaled ? copy : group) + j;
          *reinterpret_cast<std::uint32_t*>(to + swizzled(row + 8 * r, piece) + 4 * c) = other;
        }
    cuda::fence_async();
    const bool again = cuda::barrier_any(3, kConsumers, !residue && heavy());

    cuda::hold(o[0]), cuda::hold(o[1]);
    cuda::wgmma_fence();
    const std::uint64_t others = cuda::matrix(cuda::shared_address(weights_for(group, stage)), 16, 1024);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned char* values = s.rows[stage][4 * group + 2 * h];
      const std::uint64_t own_v = cuda::matrix(cuda::shared_address(values + group * 4096), Smem::kBlockBytes, 1024),
                          other_v =
                              cuda::matrix(cuda::shared_address(values + (1 - group) * 4096), Smem::kBlockBytes, 1024);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        cuda::wgmma_64x128(o[h], &mine[kCopies == 2 ? h : 0][4 * step], own_v + (step * 2048 >> 4));
        cuda::wgmma_64x128(o[h], others + (64 * (Rows::kScaled ? h : 1 - group) + 32 * step >> 4),
                           other_v + (step * 2048 >> 4));
      }
    }
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::hold(o[0]), cuda::hold(o[1]);
    return again;
  }

  template <class T>
  __device__ void store(T* const (&to)[2], const float (&factor)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!to[r]) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 y = {o[h][4 * j + 2 * r] * factor[r], o[h][4 * j + 2 * r + 1] * factor[r]};
          T* const at = to[r] + 256 * group + 128 * h + 8 * j + 2 * c;
          if constexpr (sizeof(T) == 4) *reinterpret_cast<float2*>(at) = y;
          else *reinterpret_cast<unsigned*>(at) = cuda::pack_bf16x2(y.x, y.y);
        }
    }
  }

  __device__ void write(int item, int groups, int cta_group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(sum[r]);
      if (c == 0) s.shared[group][row + 8 * r] = sum[r];
    }
    cuda::barrier_sync(3, kConsumers);
    float factor[2];
    std::int64_t out_at[2];
    bool exists[2];
    const std::int64_t partial = (static_cast<std::int64_t>(item) * groups + cta_group) * kHeads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int local = row + 8 * r;
      exists[r] = first_head + local < p.fold * p.heads;
      const HeadPlace at = place_of(p, part.unit, head_of(local));
      out_at[r] = at.token * p.out_token + at.head * p.out_head;
      sum[r] = s.shared[0][local] + s.shared[1][local];
      const bool mine = exists[r] && group == 0 && c == 0;
      if (part.parts == 1) {
        factor[r] = inverse_with_sink(p, sum[r], peak[r], at.head) * kOutFactor;
        if (p.lse && mine) p.lse[at.token * p.lse_token + at.head * p.lse_head] = log2_of(sum[r], peak[r]) * kLn2;
      } else {
        factor[r] = sum[r] == 0.f ? 0.f : kOutFactor / sum[r];
        if (mine) p.partial_log2[partial + local] = log2_of(sum[r], peak[r]);
      }
    }
    if (part.parts == 1) {
      if (p.out_f32) {
        auto* out = static_cast<float*>(p.out);
        store<float>({exists[0] ? out + out_at[0] : nullptr, exists[1] ? out + out_at[1] : nullptr}, factor);
      } else {
        auto* out = static_cast<unsigned short*>(p.out);
        store<unsigned short>({exists[0] ? out + out_at[0] : nullptr, exists[1] ? out + out_at[1] : nullptr}, factor);
      }
      return;
    }
    float* to[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) to[r] = exists[r] ? p.partial + (partial + row + 8 * r) * kLatent : nullptr;
    store<float>(to, factor);
    if (!p.merge_here) return;

    // Store, fence, count; whoever counts last sees all parts and merges them.
    __threadfence();
    cuda::barrier_sync(3, kConsumers);
    unsigned* ticket = p.tickets + static_cast<std::int64_t>(part.unit) * groups + cta_group;
    if (thread == 0) s.is_last = atomicAdd(ticket, 1u) == static_cast<unsigned>(part.parts - 1);
    cuda::barrier_sync(3, kConsumers);
    if (!s.is_last) return;
    if (thread == 0) *ticket = 0;
    __threadfence();
    auto* const s_out_at = reinterpret_cast<std::int64_t*>(s.q[0]);  // no longer needed
    auto* const s_weight = reinterpret_cast<float*>(s.q[1]);
    static_assert(sizeof(s.q[1]) >= kMergeBytes / kHeadBytes * sizeof(float));
    if (group == 0 && c == 0) s_out_at[row] = out_at[0], s_out_at[row + 8] = out_at[1];
    merge_heads(p, part, cta_group, groups, kHeads, 0, kHeads, s_weight, s_out_at, kConsumers,
                [] { cuda::barrier_sync(3, kConsumers); });
  }

  __device__ void consume(int item, int groups, int cta_group) {
    if (thread < kHeads) s.visible[thread] = lanes_of_token(p, part.unit, head_of(thread) / p.heads) - s.begin;
    load_q();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % 2;
      cuda::mbarrier_wait(full(stage), tile / 2 & 1);
      cuda::fence_async();
      score(stage);
      softmax(stage, tile * kTokens);
      if (accumulate(stage, false)) {
        cuda::barrier_sync(3, kConsumers);  // P is no longer read
        accumulate(stage, true);
      }
      if (lane == 0) cuda::mbarrier_arrive(empty(stage));
    }
    write(item, groups, cta_group);
  }
};

#endif

template <class Arch, class Rows>
__global__ void __launch_bounds__(384, 1) hopper_kernel(const __grid_constant__ CudaParams p, int groups) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char hopper_smem[];
  auto& s = *reinterpret_cast<HopperSmem<Rows>*>(hopper_smem);
  constexpr int kTokens = 64, kProducers = 128;
  const int item = blockIdx.x / groups, group = blockIdx.x % groups;
  find_part(p, item, false, kTokens, s.plan);
  const Part& part = s.plan.part;
  if (part.parts == 0) return;  // the whole CTA
  if (threadIdx.x == 0) {
    s.list = list_of(p, part.unit);
    const std::int64_t all = (part.lanes + kTokens - 1) / kTokens;
    s.begin = static_cast<int>(all * part.index / part.parts) * kTokens;
    s.end = min(part.lanes, static_cast<int>(all * (part.index + 1) / part.parts) * kTokens);
    for (int stage = 0; stage < 2; ++stage) {
      cuda::mbarrier_init(cuda::shared_address(&s.full[stage]), 2 * kProducers);
      cuda::mbarrier_init(cuda::shared_address(&s.empty[stage]), Hopper<Rows>::kConsumerWarps);
    }
    cuda::fence_async();
  }
  __syncthreads();
  constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;
  if (threadIdx.x >= Hopper<Rows>::kFirstProducer) {
    cuda::give_registers<kProducerRegisters>();
    Hopper<Rows>(p, s, 0).produce();
  } else {
    cuda::take_registers<kConsumerRegisters>();
    Hopper<Rows>(p, s, group * 64).consume(item, groups, group);
  }
#endif
}

}  // namespace sievemla::stage::attention
