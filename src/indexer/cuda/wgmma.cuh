// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/wgmma.cuh -- sm_90: scores by warpgroup MMAs, where mma.sync has no fp8 (the compiler turns it into
// f16). Keys are A, in registers; 64 heads are B, in shared memory; sums are f32.
//
// Stages: 64 heads of 128 bytes, of as many rows as fit, in wgmma's layout: 16-byte piece i of head h lies at piece
// i ^ h % 8. Every 32 dimensions are one step; in a step keys and queries may be permuted alike. A lane's words of a
// step are (c, c + 4) if `Natural`, else (2 c, 2 c + 1), which it loads as one; c = lane % 4.
#pragma once
#include <cstdint>

#include "cuda/ptx/ptx.cuh"
#include "cuda/ptx/sm90a.cuh"
#include "indexer/cuda/params.h"

namespace sievemla::stage::indexer {

inline constexpr int kStageHeads = 64;

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

// Heads of a row in a stage: 8, 16, 32 or 64, zeros after the last.
constexpr int heads_of_stage(int heads) { return heads <= 8 ? 8 : heads <= 16 ? 16 : heads <= 32 ? 32 : 64; }

// Where 4-byte word i of a head goes, with permuted steps: word 2 c + h of a step to word 4 h + c.
__device__ inline std::uint32_t permuted_place(int head, int word) {
  return static_cast<std::uint32_t>(head * 128 + ((word / 8 * 2 + word % 2) ^ head % 8) * 16 + word % 8 / 2 * 4);
}
// Copies rows first .. end - 1, as many as fit, into a stage; rarely, so nothing is kept.
__device__ inline void copy_permuted(const CudaScoreParams& p, int first, int end, unsigned char* heads, float* weights,
                                     int thread, int threads) {
  const int padded = heads_of_stage(p.heads);
#pragma unroll 1
  for (int i = thread; i < kStageHeads * 32; i += threads) {
    const int at = i / 32, head = at & (padded - 1), row = first + at / padded;
    if (head < p.heads && row < end)
      cuda::cp_async_4(cuda::shared_address(heads) + permuted_place(at, i % 32),
                       p.q + row * p.q_row + head * p.q_head + i % 32 * 4, 4);
  }
  for (int at = thread; at < kStageHeads; at += threads) {
    const int head = at & (padded - 1), row = first + at / padded;
    if (head < p.heads && row < end)
      cuda::cp_async_4(cuda::shared_address(weights + at), p.weights + row * p.weights_row + head, 4);
  }
}

// The same in the natural order, again and again: what a thread copies is worked out once. What is left out keeps what
// it held.
template <int Threads>
struct StageCopy {
  static constexpr int kMine = (kStageHeads * 8 + Threads - 1) / Threads;
  const CudaScoreParams& p;
  const int padded;
  int row[kMine];            // of the stage; one that is never reached where the thread has no such piece
  std::int64_t from[kMine];  // behind the row
  std::uint32_t to[kMine];

  __device__ StageCopy(const CudaScoreParams& params) : p(params), padded(heads_of_stage(p.heads)) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = k * Threads + static_cast<int>(threadIdx.x), at = i / 8, piece = i % 8, head = at & (padded - 1);
      row[k] = at < kStageHeads && head < p.heads ? at / padded : INT32_MAX / 2;
      from[k] = head * p.q_head + piece * 16;
      to[k] = static_cast<std::uint32_t>(at * 128 + (piece ^ at % 8) * 16);
    }
  }
  __device__ void start(int first, int end, unsigned char* heads, float* weights) const {
    const std::uint32_t s_heads = cuda::shared_address(heads);
#pragma unroll
    for (int k = 0; k < kMine; ++k)
      if (row[k] < end - first) cuda::cp_async_16(s_heads + to[k], p.q + (first + row[k]) * p.q_row + from[k], 16);
    const int at = static_cast<int>(threadIdx.x), head = at & (padded - 1), r = first + at / padded;
    if (at < kStageHeads && head < p.heads && r < end)
      cuda::cp_async_4(cuda::shared_address(weights + at), p.weights + r * p.weights_row + head, 4);
  }
};
// Zeros, so that heads which are none add nothing. Before the first copy.
__device__ inline void clear_stage(unsigned char* heads, float* weights, int thread, int threads) {
  for (int i = thread; i < kStageHeads * 8; i += threads) reinterpret_cast<uint4*>(heads)[i] = {0u, 0u, 0u, 0u};
  for (int i = thread; i < kStageHeads; i += threads) weights[i] = 0.f;
}

// A warp's share of the keys of its warpgroup: 16 of each 64.
template <int Tiles, bool Natural>
struct GroupKeys {
  static constexpr int kTiles = Tiles, kKeys = 16 * Tiles;  // of a warp
  std::uint32_t word[kTiles][2][8];                         // rows g and g + 8, by step
  float scale[kTiles];                                      // of the row whose score this lane stores
  unsigned missing;                                         // bit per tile: its page lies nowhere

  __device__ static int stored_row(int lane) { return lane / 4 + lane % 4 / 2 * 8; }

  // Where the keys first .. first + kKeys - 1 of a source lie; those from `end` on need not exist.
  struct Place {
    int page[kTiles];  // physical, -1: nowhere
  };
  __device__ static Place locate(const CudaScoreParams& p, int source, int first, int end) {
    Place place;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {  // a page is a multiple of 16 keys, so a tile lies in one
      const int at = first + 16 * t, page = p.page_shift >= 0 ? at >> p.page_shift : at / p.page_size;
      place.page[t] = -1;
      if (p.table && source >= 0 && source < p.requests && at < end && page < p.table_pages)
        place.page[t] = __ldg(p.table + source * p.table_row + page);
    }
    return place;
  }
  // What is missing is read as some other key.
  __device__ void load(const CudaScoreParams& p, const Place& place, int source, int first, int lane) {
    missing = 0;
    const int g = lane / 4, mine = stored_row(lane);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int at = first + 16 * t;
      const unsigned char *low, *high;
      const float* scales;
      if (p.table) {
        const int inside = p.page_shift >= 0 ? at & (p.page_size - 1) : at % p.page_size;
        int page = place.page[t];
        if (page < 0 || page >= p.pages) missing |= 1u << t, page = 0;
        const unsigned char* base = p.keys + page * p.page_bytes;
        low = base + (inside + g) * 128, high = low + 8 * 128;
        scales = reinterpret_cast<const float*>(base + static_cast<std::int64_t>(p.page_size) * 128) + inside + mine;
      } else {
        low = p.keys + contiguous(p, source, at + g) * p.page_bytes;
        high = p.keys + contiguous(p, source, at + g + 8) * p.page_bytes;
        scales = p.scales + contiguous(p, source, at + mine);
      }
      load_row(word[t][0], low, lane);
      load_row(word[t][1], high, lane);
      scale[t] = __ldg(scales);
    }
  }

  // Scores of a stage's rows of 8 * Groups heads; store(row of the stage, column of the warp, score), by half of the
  // lanes. The whole warpgroup calls.
  template <int Groups, class Store>
  __device__ void scores(const unsigned char* heads, const float* weights, int lane, Store&& store) const {
    float dot[kTiles > 1 ? 2 : 1][32];
    const std::uint64_t b = wgmma_operand(heads);
    start(dot[0], 0, b);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t + 1 < kTiles) {
        start(dot[(t + 1) % 2], t + 1, b);
        cuda::wgmma_wait<1>();
      } else {
        cuda::wgmma_wait<0>();
      }
      finish<Groups>(dot[t % 2], t, weights, lane, store);
    }
  }
  // The same for heads_of_stage(heads) heads a row.
  template <class Store>
  __device__ void scores(int padded, const unsigned char* heads, const float* weights, int lane, Store&& store) const {
    if (padded == 64) scores<8>(heads, weights, lane, store);
    else if (padded == 32) scores<4>(heads, weights, lane, store);
    else if (padded == 16) scores<2>(heads, weights, lane, store);
    else scores<1>(heads, weights, lane, store);
  }

 private:
  __device__ void start(float (&d)[32], int t, std::uint64_t b) const {
    cuda::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_e4m3(d, word[t][0][2 * step], word[t][1][2 * step], word[t][0][2 * step + 1], word[t][1][2 * step + 1],
                 b + static_cast<std::uint64_t>(2 * step), step > 0);
    cuda::wgmma_commit();
  }
  template <int Groups, class Store>
  __device__ void finish(const float (&d)[32], int t, const float* weights, int lane, Store&& store) const {
    const int c = lane % 4;
    const bool upper = c & 2;
    const float scaled = 0.5f * scale[t];  // 2 relu(x) = x + |x|
    float sum[8 / Groups];
#pragma unroll
    for (int row = 0; row < 8 / Groups; ++row) {
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int n = row * Groups; n < (row + 1) * Groups; ++n) {
        const float2 w = *reinterpret_cast<const float2*>(weights + n * 8 + 2 * c);
        low = fmaf(w.x, d[4 * n] + fabsf(d[4 * n]), low);
        high = fmaf(w.x, d[4 * n + 2] + fabsf(d[4 * n + 2]), high);
        low = fmaf(w.y, d[4 * n + 1] + fabsf(d[4 * n + 1]), low);
        high = fmaf(w.y, d[4 * n + 3] + fabsf(d[4 * n + 3]), high);
      }
      // The four lanes of a row add up.
      sum[row] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
    }
#pragma unroll
    for (int row = 0; row < 8 / Groups; ++row) sum[row] += __shfl_xor_sync(~0u, sum[row], 1);
    if (c % 2) return;
#pragma unroll
    for (int row = 0; row < 8 / Groups; ++row)
      store(row, 16 * t + stored_row(lane), missing >> t & 1 ? -INFINITY : scaled * sum[row]);
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
