// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/wgmma.cuh -- sm_90: scores by warpgroup MMAs, where mma.sync has no fp8 (the compiler turns it into
// f16). Keys are A, in registers; 64 heads are B, in shared memory; sums are f32.
//
// Stages: 64 heads of 128 bytes, of as many rows as fit, in wgmma's layout: 16-byte piece i of head h lies at piece
// i ^ h % 8. Every 32 dimensions are one step; within a step keys and queries may be permuted alike. A lane's words of a
// step are (c, c + 4) if `Natural`, else (2 c, 2 c + 1), which it loads as one; c = lane % 4.
#pragma once
#include <cstdint>

#include "cuda/ptx/ptx.cuh"
#include "indexer/cuda/params.h"

namespace sievemla::stage::indexer {

inline constexpr int kStageHeads = 64;

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

// Of a stage in shared memory: rows of 128 bytes in groups of eight, 128-byte swizzle.
__device__ inline std::uint64_t wgmma_operand(const void* s_stage) {
  return static_cast<std::uint64_t>(cuda::shared_address(s_stage) >> 4 & 0x3FFF) | std::uint64_t{1} << 16 |
         std::uint64_t{64} << 32 | std::uint64_t{1} << 62;
}

// d[64 x 64] = a[64 x 32] b[32 x 64] (+ d), e4m3.
__device__ inline void wgmma_e4m3(float (&d)[32], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                  std::uint32_t a3, std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

// Starts the copies of heads [from, to) of a stage, `padded` a row from `row` on, and of their weights; zeros where there
// is no such head, or row `end` is reached.
template <bool Natural>
__device__ inline void copy_stage(const CudaScoreParams& p, int row, int end, int padded, unsigned char* heads,
                                  float* weights, int thread, int threads) {
  constexpr int kPieces = Natural ? 8 : 32;  // of a head, of 16 or 4 bytes
#pragma unroll 1
  for (int i = thread; i < kStageHeads * kPieces; i += threads) {
    const int at = i / kPieces, piece = i % kPieces, r = row + at / padded, head = at % padded;
    const bool there = r < end && head < p.heads && at / padded < kStageHeads / padded;
    const unsigned char* from = there ? p.q + r * p.q_row + head * p.q_head + piece * (128 / kPieces) : p.q;
    if constexpr (Natural) {
      cuda::cp_async_16(cuda::shared_address(heads + at * 128 + (piece ^ at % 8) * 16), from, there ? 16 : 0);
    } else {
      // Word 2 c + h of a step goes to word 4 h + c.
      const int step = piece / 8, c = piece % 8 / 2, to = 2 * step + piece % 2;
      cuda::cp_async_4(cuda::shared_address(heads + at * 128 + (to ^ at % 8) * 16 + c * 4), from, there ? 4 : 0);
    }
  }
  for (int at = thread; at < kStageHeads; at += threads) {
    const int r = row + at / padded, head = at % padded;
    const bool there = r < end && head < p.heads && at / padded < kStageHeads / padded;
    cuda::cp_async_4(cuda::shared_address(weights + at), there ? p.weights + r * p.weights_row + head : p.weights,
                     there ? 4 : 0);
  }
}

// A warp's share of the keys of its warpgroup: 16 of each 64.
template <int Tiles, bool Natural>
struct GroupKeys {
  static constexpr int kTiles = Tiles, kKeys = 16 * Tiles;  // of a warp
  std::uint32_t word[kTiles][2][8];                         // rows g and g + 8, by step
  float scale[kTiles];  // of the row whose score this lane stores
  unsigned missing;     // bit per tile: its page lies nowhere

  __device__ static int stored_row(int lane) { return lane / 4 + lane % 4 / 2 * 8; }

  // Keys first .. first + kKeys - 1 of a source; those from `end` on need not exist. What is missing is read as some
  // other key.
  __device__ void load(const CudaScoreParams& p, int source, int first, int end, int lane) {
    missing = 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int at = first + 16 * t, g = lane / 4, mine = stored_row(lane);
      if (p.table) {  // a page is a multiple of 16 keys, so a tile lies in one
        const int page = p.page_shift >= 0 ? at >> p.page_shift : at / p.page_size, inside = at - page * p.page_size;
        int physical = -1;
        if (source >= 0 && source < p.requests && at < end && page < p.table_pages)
          physical = __ldg(p.table + source * p.table_row + page);
        if (physical < 0 || physical >= p.pages) missing |= 1u << t, physical = 0;
        const unsigned char* base = p.keys + physical * p.page_bytes;
        load_row(word[t][0], base + (inside + g) * 128, lane);
        load_row(word[t][1], base + (inside + g + 8) * 128, lane);
        scale[t] = 0.5f * __ldg(reinterpret_cast<const float*>(base + static_cast<std::int64_t>(p.page_size) * 128) + inside + mine);
      } else {
        load_row(word[t][0], p.keys + contiguous(p, source, at + g) * p.page_bytes, lane);
        load_row(word[t][1], p.keys + contiguous(p, source, at + g + 8) * p.page_bytes, lane);
        scale[t] = 0.5f * __ldg(p.scales + contiguous(p, source, at + mine));
      }
    }
  }

  // Scores of a stage's rows; store(row of the stage, column of the warp, score), by half of the lanes. The whole
  // warpgroup calls.
  template <class Store>
  __device__ void scores(const unsigned char* heads, const float* weights, int padded, int rows, int lane, Store&& store) {
    float dot[kTiles > 1 ? 2 : 1][32];
    const std::uint64_t b = wgmma_operand(heads);
    start(dot[0], 0, b);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t + 1 < kTiles) {
        start(dot[(t + 1) % 2], t + 1, b);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      finish(dot[t % 2], t, weights, padded, rows, lane, store);
    }
  }

 private:
  __device__ void start(float (&d)[32], int t, std::uint64_t b) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_e4m3(d, word[t][0][2 * step], word[t][1][2 * step], word[t][0][2 * step + 1], word[t][1][2 * step + 1],
                 b + static_cast<std::uint64_t>(2 * step), step > 0);
    wgmma_commit();
  }
  template <class Store>
  __device__ void finish(const float (&d)[32], int t, const float* weights, int padded, int rows, int lane, Store&& store) {
    const int c = lane % 4;
    float low = 0.f, high = 0.f;
    int left = padded / 8, row = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 w = *reinterpret_cast<const float2*>(weights + n * 8 + 2 * c);
      low = fmaf(w.x, d[4 * n] + fabsf(d[4 * n]), low);
      high = fmaf(w.x, d[4 * n + 2] + fabsf(d[4 * n + 2]), high);
      low = fmaf(w.y, d[4 * n + 1] + fabsf(d[4 * n + 1]), low);
      high = fmaf(w.y, d[4 * n + 3] + fabsf(d[4 * n + 3]), high);
      if (--left > 0) continue;
      // The four lanes of a row add up.
      const bool upper = c & 2;
      float sum = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
      sum += __shfl_xor_sync(~0u, sum, 1);
      if (row < rows && c % 2 == 0)
        store(row, 16 * t + stored_row(lane), missing >> t & 1 ? -INFINITY : scale[t] * sum);
      low = high = 0.f, left = padded / 8, ++row;
    }
  }
  __device__ static void load_row(std::uint32_t (&w)[8], const unsigned char* key, int lane) {
    const int c = lane % 4;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (Natural) {
        w[2 * step] = __ldg(reinterpret_cast<const std::uint32_t*>(key) + 8 * step + c);
        w[2 * step + 1] = __ldg(reinterpret_cast<const std::uint32_t*>(key) + 8 * step + c + 4);
      } else {
        const uint2 pair = __ldg(reinterpret_cast<const uint2*>(key) + 4 * step + c);
        w[2 * step] = pair.x, w[2 * step + 1] = pair.y;
      }
    }
  }
  __device__ static std::int64_t contiguous(const CudaScoreParams& p, int source, std::int64_t key) {
    return min(max(source + key, std::int64_t{0}), p.n - 1);
  }
};

}  // namespace sievemla::stage::indexer
