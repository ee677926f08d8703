// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/hopper.cuh -- scores by warp group products (sm_90; mma.sync makes f16 of fp8 there).
//
// Keys are the rows of a product, 64 at a time, in registers; its columns are the heads of some rows, in shared memory.
// A score is four sums, one for each pair of heads in eight, each over heads in ascending order: (0 + 2) + (1 + 3).
// Heads are dealt to columns so that the lanes of a key share few rows: with four rows a lane adds up one alone.
//
// A lane's 16 bytes c and c + 4 of a key (c = lane % 4) go into steps of 32 dimensions as pairs of words; the words of
// heads are permuted alike.
#pragma once
#include <cstdint>

#include "cuda/ptx/ptx.cuh"
#include "cuda/ptx/sm90a.cuh"
#include "indexer/cuda/keys.cuh"
#include "indexer/cuda/params.h"
#include "indexer/cuda/scores.cuh"

namespace sievemla::stage::indexer {

inline constexpr int kProductKeys = 64;

// d[64 x 2 N] (+)= a[64 x 32] b[2 N x 32]^T, e4m3, for d[N]: a in registers, b in shared memory.
__device__ inline void wgmma_e4m3(float (&d)[16], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                  std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}
__device__ inline void wgmma_e4m3(float (&d)[32], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                  std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}
__device__ inline void wgmma_e4m3(float (&d)[64], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                  std::uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

// ---- heads in shared memory -------------------------------------------------------------------------

// The columns of a product: `Rows` rows of up to `Heads` heads.
template <int Heads, int Rows>
struct Columns {
  static constexpr int kHeads = Heads, kRows = Rows, kColumns = Heads * Rows;
  static constexpr int kLanes = 4 / Rows, kSums = Rows;  // lanes that share a row, and how many of its sums each has
  static_assert((Heads == 32 || Heads == 64) && (Rows == 1 || kColumns == 128));

  // 8 n + 2 c + e: of lane c.
  __device__ static int column_of(int row, int head) {
    if constexpr (Rows == 1) return head;
    const int pair = head % 8 / 2, e = head % 2, eight = head / 8;
    return (kSums * eight + pair / kLanes) * 8 + (kLanes * row + pair % kLanes) * 2 + e;
  }
  // Where its weight goes: a lane reads those of two n at once.
  __device__ static int weight_place(int column) {
    const int n = column / 8;
    return (n / 2 * 4 + column % 8 / 2) * 4 + n % 2 * 2 + column % 2;
  }
};

template <class Columns>
struct HeadBlock {
  // 128-byte swizzle: 16-byte piece i of a head at i ^ column % 8.
  alignas(1024) unsigned char heads[Columns::kColumns * kDim];
};

// Puts rows first .. end - 1 into `blocks` blocks, zeros where there are none; by `Threads` threads.
template <int Threads, class Columns>
__device__ inline void place_heads(const CudaScoreParams& p, int first, int end, int blocks, HeadBlock<Columns>* block,
                                   float (*weights)[Columns::kColumns], int thread) {
  constexpr int kHeads = Columns::kHeads, kRows = Columns::kRows;
#pragma unroll 4
  for (int i = thread; i < blocks * Columns::kColumns * 8; i += Threads) {
    const int piece = i % 8, head = i / 8 % kHeads, row = i / 8 / kHeads;
    uint4 x{0u, 0u, 0u, 0u};
    if (head < p.heads && first + row < end)
      x = __ldg(reinterpret_cast<const uint4*>(p.q + (first + row) * p.q_row + head * p.q_head + piece * 16));
    const int column = Columns::column_of(row % kRows, head);
    unsigned char* const to = block[row / kRows].heads + column * kDim + piece % 4 * 4;
    const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
      *reinterpret_cast<std::uint32_t*>(to + ((piece / 4 * 4 + k) ^ column % 8) * 16) = words[k];
  }
  for (int i = thread; i < blocks * Columns::kColumns; i += Threads) {
    const int head = i % kHeads, row = i / kHeads;
    const bool real = head < p.heads && first + row < end;
    weights[row / kRows][Columns::weight_place(Columns::column_of(row % kRows, head))] =
        real ? __ldg(p.weights + (first + row) * p.weights_row + head) : 0.f;
  }
  cuda::fence_async();
}
template <class Columns>
__device__ inline std::uint64_t block_matrix(const HeadBlock<Columns>& block) {
  return cuda::matrix(cuda::shared_address(block.heads), 16, 1024);
}

// ---- keys of a warp: 16 of the warp group's 64 ------------------------------------------------------

struct ProductKeys {
  std::uint32_t low[8], high[8];  // keys g and g + 8; words 2 s and 2 s + 1 are its part of step s
  float scale[2];                 // of these keys, halved: 2 relu(x) = x + |x|
  bool missing;                   // their page lies nowhere

  // Keys first .. first + 15 of a source; those from `end` on need not exist. What is missing is read as some other.
  __device__ void load(const CudaScoreParams& p, int source, int first, int end, int lane) {
    const int g = lane / 4, c = lane % 4;
    const unsigned char *key, *key8;
    const float *s, *s8;
    missing = false;
    if (p.table) {  // a page is a multiple of 16 keys
      const int page = p.page_shift >= 0 ? first >> p.page_shift : first / p.page_size;
      const int inside = first - page * p.page_size;
      int physical = -1;
      if (source >= 0 && source < p.requests && first < end && page < p.table_pages)
        physical = __ldg(p.table + source * p.table_row + page);
      if (physical < 0 || physical >= p.pages) missing = true, physical = 0;
      const unsigned char* base = p.keys + physical * p.page_bytes;
      key = base + (inside + g) * kDim, key8 = key + 8 * kDim;
      s = reinterpret_cast<const float*>(base + static_cast<std::int64_t>(p.page_size) * kDim) + inside + g, s8 = s + 8;
    } else {
      const std::int64_t at = min(max(std::int64_t{source} + first + g, std::int64_t{0}), p.n - 1);
      const std::int64_t at8 = min(max(std::int64_t{source} + first + g + 8, std::int64_t{0}), p.n - 1);
      key = p.keys + at * p.page_bytes, key8 = p.keys + at8 * p.page_bytes;
      s = p.scales + at, s8 = p.scales + at8;
    }
    set(low, key, c), set(high, key8, c);
    scale[0] = 0.5f * __ldg(s), scale[1] = 0.5f * __ldg(s8);
  }
  __device__ static void set(std::uint32_t (&w)[8], const unsigned char* key, int c) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(key) + c), y = __ldg(reinterpret_cast<const uint4*>(key) + c + 4);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w, w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
  }
};

template <int N>
__device__ inline void start_product(float (&d)[N], const ProductKeys& keys, std::uint64_t b) {
  cuda::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_e4m3(d, keys.low[2 * step], keys.high[2 * step], keys.low[2 * step + 1], keys.high[2 * step + 1],
               b + static_cast<std::uint64_t>(2 * step), step > 0);
  cuda::wgmma_commit();
}

// What a lane ends up with: scores of key g = lane / 4 and, if it has its row alone, of key g + 8; else of one of them.
template <class Columns>
struct Mine {
  static constexpr int kLanes = Columns::kLanes;
  __device__ static int row(int lane) { return lane % 4 / kLanes; }  // of the block
  __device__ static int key(int lane) {
    const bool second = kLanes == 4 ? lane & 2 : kLanes == 2 && lane & 1;
    return lane / 4 + (second ? 8 : 0);
  }
  __device__ static bool stores(int lane) { return kLanes < 4 || lane % 2 == 0; }
};

// store(0 or 8 keys on, score).
template <class Columns, class Store>
__device__ inline void sum_heads(const float (&d)[Columns::kColumns / 2], const float* weights,
                                 const ProductKeys& keys, int lane, Store&& store) {
  constexpr int kSums = Columns::kSums, kLanes = Columns::kLanes;
  float sum[kSums][2] = {};
#pragma unroll
  for (int j = 0; j < Columns::kColumns / 16; ++j) {
    const float4 w = *reinterpret_cast<const float4*>(weights + (j * 4 + lane % 4) * 4);
    const float of[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = 2 * j + i;
          const float x = d[4 * n + 2 * half + e];
          sum[n % kSums][half] = fmaf(of[2 * i + e], x + fabsf(x), sum[n % kSums][half]);
        }
  }
  float low = sum[0][0], high = sum[0][1];
  if constexpr (kSums == 2) low += sum[1][0], high += sum[1][1];
  if constexpr (kSums == 4)
    low = (low + sum[2][0]) + (sum[1][0] + sum[3][0]), high = (high + sum[2][1]) + (sum[1][1] + sum[3][1]);
  if constexpr (kLanes == 1) {
    store(0, keys.scale[0] * low), store(8, keys.scale[1] * high);
    return;
  }
  const bool second = lane & kLanes / 2;
  float score = (second ? high : low) + __shfl_xor_sync(~0u, second ? low : high, kLanes / 2);
  if constexpr (kLanes == 4) score += __shfl_xor_sync(~0u, score, 1);
  store(0, (second ? keys.scale[1] : keys.scale[0]) * score);
}

// ---- many rows: warp groups hold the heads of rows, keys pass by ------------------------------------

// Groups: warp groups of a CTA. Products: of a warp group in flight. Tiles: of keys.
template <int Blocks, int Groups, int Products, int Tiles, int Ctas>
struct RowsTile {
  static constexpr int kBlocks = Blocks, kGroups = Groups, kProducts = Products, kThreads = 128 * Groups, kCtas = Ctas;
  static constexpr int kRows = 4 * Blocks, kKeys = Tiles * kProductKeys;  // of a CTA; half the rows beyond 32 heads
  static_assert(Blocks % Products == 0 && kRows <= 64);
};

template <class Tile, class Columns>
struct RowsSmem {
  HeadBlock<Columns> block[Tile::kBlocks];
  float weights[Tile::kBlocks][Columns::kColumns];
  int length[4 * Tile::kGroups][Tile::kRows];  // of the rows of a source, 0 of others; a copy for each warp
};

template <class Tile, class Columns>
struct Rows {
  static constexpr int kBlockRows = Columns::kRows, kRows = Tile::kBlocks * kBlockRows;
  const CudaScoreParams& p;
  RowsSmem<Tile, Columns>& s;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, group = warp / 4;
  const int my_key = Mine<Columns>::key(lane), my_row = Mine<Columns>::row(lane);

  // Turns: a warp group starts its products after the one before it has started its own, so that sums of one go beside
  // products of another.
  __device__ void wait_turn() const {
    if constexpr (Tile::kGroups > 1) cuda::barrier_sync(1 + group, 256);
  }
  __device__ void pass_turn() const {
    if constexpr (Tile::kGroups > 1)
      asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % Tile::kGroups) : "memory");
  }

  __device__ void finish(const float (&d)[64], const ProductKeys& keys, int block, int limit, float* to) const {
    const int length = s.length[warp][block * kBlockRows + my_row];
    sum_heads<Columns>(d, s.weights[block], keys, lane, [&](int on, float score) {
      if (limit + on < length) to[on] = score;
    });
  }

  __device__ void run(int first_row, int first_key) const {
    const int end = min(first_row + kRows, p.rows), end_key = min(first_key + Tile::kKeys, p.width);
    int length[2], source[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane + 32 * i;
      const bool real = lane + 32 * i < kRows && row < end;
      length[i] = real ? length_of(p, row) : 0, source[i] = real ? source_of(p, row) : 0;
    }
    std::uint64_t todo = rows_where(length[0] > first_key, length[1] > first_key);
    if (todo) {
      place_heads<Tile::kThreads>(p, first_row, end, Tile::kBlocks, s.block, s.weights, thread);
      __syncthreads();
      if (group == Tile::kGroups - 1) pass_turn();
      // Rows that share a source go together: mostly all. A row of no length may name any.
#pragma unroll 1
      while (todo) {
        const int at = __ffsll(static_cast<long long>(todo)) - 1;
        const int chosen = __shfl_sync(~0u, at < 32 ? source[0] : source[1], at % 32);
        int longest = 0;
        bool mine[2];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mine[i] = length[i] > first_key && source[i] == chosen;
          if (mine[i]) longest = max(longest, length[i]);
          if (lane + 32 * i < Tile::kRows) s.length[warp][lane + 32 * i] = mine[i] ? length[i] : 0;
        }
        __syncwarp();
        const std::uint64_t rows = rows_where(mine[0], mine[1]);
        todo &= ~rows;
        pass(chosen, rows, first_row, first_key, end_key, __reduce_max_sync(~0u, longest));
      }
      if (group == 0) wait_turn();
    }
    if (p.fill)
      for (int r = warp; first_row + r < end; r += 4 * Tile::kGroups) {
        const int from = __shfl_sync(~0u, r < 32 ? length[0] : length[1], r % 32);
        fill_row(p, first_row + r, max(from, first_key), end_key, lane, 32);
      }
  }
  __device__ static std::uint64_t rows_where(bool low, bool high) {
    return __ballot_sync(~0u, low) | static_cast<std::uint64_t>(__ballot_sync(~0u, high)) << 32;
  }

  // Keys first_key .. end_key - 1, those below `longest`, of rows `mine`.
  __device__ void pass(int source, std::uint64_t mine, int first_row, int first_key, int end_key, int longest) const {
    constexpr std::uint64_t kOfProducts = (std::uint64_t{1} << Tile::kProducts * kBlockRows) - 1;
    constexpr int kStep = Tile::kGroups * kProductKeys;
    const int end = min(longest, end_key);
    const std::uint64_t b = block_matrix(s.block[0]);
    const std::int64_t row_step = kBlockRows * p.logits_row;
    int first = first_key + warp * 16;
    float* out = p.logits + (first_row + my_row) * p.logits_row + first + my_key;
    ProductKeys keys, next;
    next.load(p, source, first, longest, lane);
#pragma unroll 1
    for (int at = first_key; at < end; at += kStep, first += kStep, out += kStep) {  // as often in every warp group
      keys = next;
      next.load(p, source, first + kStep, longest, lane);
      if (keys.missing) lose(mine, first_row, first);
      const int limit = keys.missing ? INT32_MAX / 2 : first + my_key;
      float* to = out;
#pragma unroll 1
      for (int block = 0; block < Tile::kBlocks; block += Tile::kProducts, to += Tile::kProducts * row_step) {
        if (!(mine >> block * kBlockRows & kOfProducts)) continue;
        float d[Tile::kProducts][64];
        wait_turn();
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i)
          start_product(d[i], keys, b + static_cast<std::uint64_t>((block + i) * (sizeof(s.block[0]) >> 4)));
        pass_turn();
        if constexpr (Tile::kProducts == 2) {
          cuda::wgmma_wait<1>();
          finish(d[0], keys, block, limit, to);
        }
        cuda::wgmma_wait<0>();
        finish(d[Tile::kProducts - 1], keys, block + Tile::kProducts - 1, limit, to + (Tile::kProducts - 1) * row_step);
      }
    }
  }
  // Keys first .. first + 15 are nowhere.
  __device__ void lose(std::uint64_t mine, int first_row, int first) const {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r)
      if ((mine >> r & 1) && lane < 16 && first + lane < s.length[warp][r])
        p.logits[(first_row + r) * p.logits_row + first + lane] = -INFINITY;
  }
};

template <class Arch, class Tile, class Columns>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void rows_kernel(const __grid_constant__ CudaScoreParams p,
                                                                           int key_blocks) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<RowsSmem<Tile, Columns>*>(smem);
  const int block = static_cast<int>(blockIdx.x), rows = block / key_blocks, keys = block % key_blocks;
  Rows<Tile, Columns>{p, s}.run(rows * Rows<Tile, Columns>::kRows, keys * Tile::kKeys);
}

}  // namespace sievemla::stage::indexer
