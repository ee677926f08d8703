// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/keys.cuh -- keys and queries as matrix fragments, and the scores of a warp's keys.
//
// Keys are MMA rows, heads MMA columns. Any permutation of the 128 dimensions serves, if keys and queries share it: a
// lane takes 16 bytes at 16 c and 16 bytes at 64 + 16 c of a key or head (c = lane % 4), as they lie in memory, and a
// pair of 4-byte words is its part of one step. So keys go from global memory to registers with nothing in between.
#pragma once
#include <cstdint>

#include "cuda/ptx/ptx.cuh"
#include "indexer/cuda/params.h"

namespace sievemla::stage::indexer {

inline constexpr int kDim = 128;

// d = a b + d, or a b for the first step of a sum.
template <bool First>
__device__ inline void mma_e4m3(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                std::uint32_t b0, std::uint32_t b1) {
  if constexpr (First)
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <bool First>
__device__ inline void mma_f16(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                               std::uint32_t b0, std::uint32_t b1) {
  if constexpr (First)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// e4m3 s eeee mmm -> f16 s 0eeee mmm0000000 = value * 2^-8, subnormals too. The codes 0x7F and 0xFF read as +-480.
template <std::uint32_t Pick>
__device__ inline std::uint32_t f16_pair(std::uint32_t codes) {
  return (cuda::prmt<Pick>(codes) << 7) & 0xBF80BF80u;
}

// What a lane holds of one key or head of 128 values, by the instruction that multiplies it.
struct Fp8Words {                         // sm_89 on
  static constexpr float kFactor = 0.5f;  // 2 relu(x) = x + |x|
  std::uint32_t w[8];
  __device__ void set(uint4 low, uint4 high) {
    w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w, w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
  }
  static constexpr int kHeadBytes = kDim;  // in shared memory, as lanes read them
  static constexpr int kSteps = 4;
  template <int Step>
  __device__ static void mma(float (&d)[4], const Fp8Words& a, const Fp8Words& a8, const Fp8Words& b) {
    mma_e4m3<Step == 0>(d, a.w[2 * Step], a8.w[2 * Step], a.w[2 * Step + 1], a8.w[2 * Step + 1], b.w[2 * Step],
                        b.w[2 * Step + 1]);
  }
};
struct F16Words {                            // sm_80, sm_86
  static constexpr float kFactor = 0x1p15f;  // and 2^-8 of a key and of a query
  std::uint32_t w[16];
  __device__ void set(uint4 low, uint4 high) {
    const std::uint32_t raw[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) w[2 * i] = f16_pair<0x9180u>(raw[i]), w[2 * i + 1] = f16_pair<0xB3A2u>(raw[i]);
  }
  static constexpr int kHeadBytes = 2 * kDim;
  static constexpr int kSteps = 8;
  template <int Step>
  __device__ static void mma(float (&d)[4], const F16Words& a, const F16Words& a8, const F16Words& b) {
    mma_f16<Step == 0>(d, a.w[2 * Step], a8.w[2 * Step], a.w[2 * Step + 1], a8.w[2 * Step + 1], b.w[2 * Step],
                       b.w[2 * Step + 1]);
  }
};

// ---- queries in shared memory: heads of 128 bytes, whose 16-byte pieces 0 .. 3 and 4 .. 7 change places in odd heads,
// so that eight lanes' loads meet no bank twice.

__device__ inline int place_of_piece(int head, int piece) { return head * kDim + (piece ^ (head & 1) << 2) * 16; }

template <class Words>
__device__ inline void load_heads(Words& b, const unsigned char* heads, int head, int c) {
  b.set(*reinterpret_cast<const uint4*>(heads + place_of_piece(head, c)),
        *reinterpret_cast<const uint4*>(heads + place_of_piece(head, c + 4)));
}

// Head 8 n + lane / 4 as this lane multiplies it: of those that were copied, or of those that were set from them, where
// eight heads are four times 16 bytes a lane.
__device__ inline void load_head(Fp8Words& b, const unsigned char* heads, int n, int lane) {
  load_heads(b, heads, n * 8 + lane / 4, lane % 4);
}
__device__ inline void load_head(F16Words& b, const unsigned char* heads, int n, int lane) {
  const uint4* const from = reinterpret_cast<const uint4*>(heads + n * 8 * F16Words::kHeadBytes) + lane;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 x = from[32 * k];
    b.w[4 * k] = x.x, b.w[4 * k + 1] = x.y, b.w[4 * k + 2] = x.z, b.w[4 * k + 3] = x.w;
  }
}
__device__ inline void set_heads(const unsigned char* copied, unsigned char* heads, int groups, int thread,
                                 int threads) {
#pragma unroll 1
  for (int i = thread; i < groups * 32; i += threads) {
    const int n = i / 32, lane = i % 32;
    F16Words b;
    load_heads(b, copied, n * 8 + lane / 4, lane % 4);
    uint4* const to = reinterpret_cast<uint4*>(heads + n * 8 * F16Words::kHeadBytes) + lane;
#pragma unroll
    for (int k = 0; k < 4; ++k) to[32 * k] = {b.w[4 * k], b.w[4 * k + 1], b.w[4 * k + 2], b.w[4 * k + 3]};
  }
}

// Starts the copies of a row's heads and weights, zeros up to `padded` heads; by the threads from `thread` on.
__device__ inline void copy_query(const CudaScoreParams& p, int row, int padded, unsigned char* heads, float* weights,
                                  int thread, int threads) {
  for (int i = thread; i < padded * 8; i += threads) {
    const int head = i / 8, piece = i % 8, bytes = head < p.heads ? 16 : 0;
    cuda::cp_async_16(cuda::shared_address(heads + place_of_piece(head, piece)),
                      p.q + row * p.q_row + (bytes ? head * p.q_head : 0) + piece * 16, bytes);
  }
  for (int i = thread; i < padded; i += threads)
    cuda::cp_async_4(cuda::shared_address(weights + i), p.weights + row * p.weights_row + (i < p.heads ? i : 0),
                     i < p.heads ? 4 : 0);
}

// ---- keys of a warp ---------------------------------------------------------------------------------

// Tiles: of 16 keys.
template <class Words, int Tiles>
struct WarpKeys {
  static_assert(Tiles == 2 || Tiles == 4);
  static constexpr int kTiles = Tiles, kKeys = 16 * kTiles;
  // The scores that a lane ends up with: kMine of the warp's keys.
  static constexpr int kMine = kKeys / 32;
  Words key[kTiles][2];  // rows g and g + 8
  float scale[kMine];
  bool missing;  // the page of this lane's scores lies nowhere

  // This lane's scores are of keys row, and row + 8 if kMine is 2, of this tile.
  __device__ static int tile_of(int lane) { return kMine == 2 ? lane % 4 : lane % 4 / 2; }
  __device__ static int row_of(int lane) { return lane / 4 + (kMine == 2 ? 0 : lane % 2 * 8); }

  // What a lane loads of the keys, as it lies in memory.
  struct Raw {
    uint4 part[kTiles][2][2];
    float scale[kMine];
    bool missing;
  };
  __device__ void set(const Raw& raw) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) key[t][half].set(raw.part[t][half][0], raw.part[t][half][1]);
#pragma unroll
    for (int i = 0; i < kMine; ++i) scale[i] = Words::kFactor * raw.scale[i];
    missing = raw.missing;
  }
  __device__ void load(const CudaScoreParams& p, int source, int first, int end, int lane) {
    set(fetch(p, source, first, end, lane));
  }

  // Keys first .. first + kKeys - 1 of a source; those from `end` on need not exist. What is missing is read as some
  // other key.
  __device__ static Raw fetch(const CudaScoreParams& p, int source, int first, int end, int lane) {
    const int g = lane / 4, c = lane % 4, mine = first + 16 * tile_of(lane);
    Raw raw;
    raw.missing = false;
    const float* scales;
    int physical = 0, inside = 0;
    if (p.table) {  // a page is a multiple of 16 keys, so a tile lies in one
      const int page = p.page_shift >= 0 ? mine >> p.page_shift : mine / p.page_size;
      inside = mine - page * p.page_size;
      raw.missing = source < 0 || source >= p.requests || mine >= end || page >= p.table_pages;
      if (!raw.missing) physical = __ldg(p.table + source * p.table_row + page);
      raw.missing |= physical < 0 || physical >= p.pages;
      if (raw.missing) physical = 0;
      scales = reinterpret_cast<const float*>(p.keys + physical * p.page_bytes +
                                              static_cast<std::int64_t>(p.page_size) * kDim) +
               inside;
    } else {
      scales = p.scales;
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const unsigned char* row[2];  // keys g and g + 8 of the tile
      if (p.table) {
        constexpr int kOwner = kMine == 2 ? 1 : 2;
        row[0] = p.keys + __shfl_sync(~0u, physical, t * kOwner) * p.page_bytes +
                 (__shfl_sync(~0u, inside, t * kOwner) + g) * kDim;
        row[1] = row[0] + 8 * kDim;
      } else {
        row[0] = p.keys + contiguous(p, source, first + 16 * t + g) * p.page_bytes;
        row[1] = p.keys + contiguous(p, source, first + 16 * t + g + 8) * p.page_bytes;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        raw.part[t][half][0] = load_16(row[half] + c * 16), raw.part[t][half][1] = load_16(row[half] + c * 16 + 64);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const std::int64_t at = row_of(lane) + 8 * i;
      raw.scale[i] = __ldg(scales + (p.table ? at : contiguous(p, source, mine + at)));
    }
    return raw;
  }

  // score[i] of this lane: over `groups` groups of eight heads.
  __device__ void scores(const unsigned char* heads, const float* weights, int groups, int lane,
                         float (&score)[kMine]) const {
    const int c = lane % 4;
    float sum[kTiles][2] = {};
#pragma unroll kTiles / 2
    for (int n = 0; n < groups; ++n) {
      Words b;
      load_head(b, heads, n, lane);
      const float2 w = *reinterpret_cast<const float2*>(weights + n * 8 + 2 * c);
      float dot[kTiles][4];
      steps<0>(dot, b);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        sum[t][0] = fmaf(w.x, dot[t][0] + fabsf(dot[t][0]), sum[t][0]);
        sum[t][1] = fmaf(w.x, dot[t][2] + fabsf(dot[t][2]), sum[t][1]);
        sum[t][0] = fmaf(w.y, dot[t][1] + fabsf(dot[t][1]), sum[t][0]);
        sum[t][1] = fmaf(w.y, dot[t][3] + fabsf(dot[t][3]), sum[t][1]);
      }
    }
    // The four lanes of a row add up, and each keeps its share of the keys.
    const bool upper = c & 2, odd = c & 1;
    if constexpr (kMine == 2) {
      float pair[2][2];
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) pair[t][half] = exchange(sum[t][half], sum[t + 2][half], upper, 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) score[half] = scale[half] * exchange(pair[0][half], pair[1][half], odd, 1);
    } else {
      const float low = exchange(sum[0][0], sum[1][0], upper, 2), high = exchange(sum[0][1], sum[1][1], upper, 2);
      score[0] = scale[0] * exchange(low, high, odd, 1);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      if (missing) score[i] = -INFINITY;
  }

  // Stores a row's scores, for columns first .. first + kKeys - 1.
  __device__ static void store(const CudaScoreParams& p, int row, int length, int first, int lane,
                               const float (&score)[kMine]) {
    float* logits = p.logits + row * p.logits_row + first;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int mine = 16 * tile_of(lane) + row_of(lane) + 8 * i;
      if (first + mine < length) logits[mine] = score[i];
    }
  }

 private:
  __device__ static std::int64_t contiguous(const CudaScoreParams& p, int source, std::int64_t key) {
    return min(max(source + key, std::int64_t{0}), p.n - 1);
  }
  __device__ static uint4 load_16(const void* from) { return __ldg(static_cast<const uint4*>(from)); }
  template <int Step>
  __device__ void steps(float (&dot)[kTiles][4], const Words& b) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) Words::template mma<Step>(dot[t], key[t][0], key[t][1], b);
    if constexpr (Step + 1 < Words::kSteps) steps<Step + 1>(dot, b);
  }
  // This lane's share of two sums over it and its partner.
  __device__ static float exchange(float first, float second, bool take_second, int partner) {
    const float mine = take_second ? second : first, other = take_second ? first : second;
    return mine + __shfl_xor_sync(~0u, other, partner);
  }
};

// Sets columns [from, p.width) of a row to -inf; by some threads.
__device__ inline void fill_row(const CudaScoreParams& p, int row, int from, int to, int thread, int threads) {
  for (int i = from + thread; i < to; i += threads) p.logits[row * p.logits_row + i] = -INFINITY;
}

__device__ inline int length_of(const CudaScoreParams& p, int row) { return min(max(p.lengths[row], 0), p.width); }
__device__ inline int source_of(const CudaScoreParams& p, int row) {
  return p.source ? p.source[row] : p.table ? row / p.rows_per_source : 0;
}

}  // namespace sievemla::stage::indexer
