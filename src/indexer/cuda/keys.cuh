// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/keys.cuh -- keys and queries as matrix fragments, and the scores of a warp's keys.
//
// Keys are MMA rows, heads MMA columns. Any permutation of the 128 dimensions serves, if keys and queries share it: a
// lane takes 16 bytes at 16 c and 16 bytes at 64 + 16 c of a key or head (c = lane % 4), as they lie in memory, and a
// pair of 4-byte words is its part of one step. So keys go from global memory to registers with nothing in between.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/ptx/ptx.cuh"
#include "indexer/cuda/kernels.h"
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
// Sixteen codes, in the order of the products' steps.
__device__ inline void f16_words(std::uint32_t* w, uint4 codes) {
  const std::uint32_t raw[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) w[2 * i] = f16_pair<0x9180u>(raw[i]), w[2 * i + 1] = f16_pair<0xB3A2u>(raw[i]);
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
  __device__ void set(uint4 low, uint4 high) { f16_words(w, low), f16_words(w + 8, high); }
  static constexpr int kHeadBytes = 2 * kDim;
  static constexpr int kSteps = 8;
  // The words of a step alone, of the same sixteen bytes twice.
  template <int Step>
  __device__ void set_step(uint4 low, uint4 high) {
    const uint4 x = Step < 4 ? low : high;
    const std::uint32_t codes = Step % 4 == 0 ? x.x : Step % 4 == 1 ? x.y : Step % 4 == 2 ? x.z : x.w;
    w[2 * Step] = f16_pair<0x9180u>(codes), w[2 * Step + 1] = f16_pair<0xB3A2u>(codes);
  }
  template <int Step>
  __device__ static void mma(float (&d)[4], const F16Words& a, const F16Words& a8, const F16Words& b) {
    mma_f16<Step == 0>(d, a.w[2 * Step], a8.w[2 * Step], a.w[2 * Step + 1], a8.w[2 * Step + 1], b.w[2 * Step],
                       b.w[2 * Step + 1]);
  }
};

// ---- queries in shared memory: heads of 128 bytes, whose 16-byte pieces 0 .. 3 and 4 .. 7 change places in odd heads,
// so that eight lanes' loads meet no bank twice.

__device__ inline int place_of_piece(int head, int piece) { return head * kDim + (piece ^ (head & 1) << 2) * 16; }

// Head 8 n + lane / 4 as this lane multiplies it: of those that were copied, or of those that were set from them, where
// eight heads are four times 16 bytes a lane.
__device__ inline void load_head(Fp8Words& b, const unsigned char* heads, int n, int lane) {
  const int head = n * 8 + lane / 4, c = lane % 4;
  b.set(*reinterpret_cast<const uint4*>(heads + place_of_piece(head, c)),
        *reinterpret_cast<const uint4*>(heads + place_of_piece(head, c + 4)));
}
__device__ inline void load_head(F16Words& b, const unsigned char* heads, int n, int lane) {
  const uint4* const from = reinterpret_cast<const uint4*>(heads + n * 8 * F16Words::kHeadBytes) + lane;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 x = from[32 * k];
    b.w[4 * k] = x.x, b.w[4 * k + 1] = x.y, b.w[4 * k + 2] = x.z, b.w[4 * k + 3] = x.w;
  }
}
__device__ inline void set_piece(unsigned char* heads, int head, int piece, uint4 x) {
  std::uint32_t w[8];
  f16_words(w, x);
  uint4* const to =
      reinterpret_cast<uint4*>(heads + head / 8 * 8 * F16Words::kHeadBytes) + piece / 4 * 64 + head % 8 * 4 + piece % 4;
  to[0] = {w[0], w[1], w[2], w[3]}, to[32] = {w[4], w[5], w[6], w[7]};
}
__device__ inline void put_piece(Fp8Words, unsigned char* heads, int head, int piece, uint4 x) {
  *reinterpret_cast<uint4*>(heads + place_of_piece(head, piece)) = x;
}
__device__ inline void put_piece(F16Words, unsigned char* heads, int head, int piece, uint4 x) {
  set_piece(heads, head, piece, x);
}
// What a thread of a CTA takes of a row's heads and weights, from global to shared memory; zeros up to `padded` heads.
template <class Words, int Threads>
struct QueryPart {
  static constexpr int kPieces = kMostHeads * 8 / Threads;
  static_assert(kMostHeads * 8 % Threads == 0 && Threads >= kMostHeads);
  uint4 piece[kPieces];
  float weight;

  __device__ void read(const CudaScoreParams& p, int row, int thread) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int head = (thread + i * Threads) / 8;
      piece[i] = uint4{};
      if (head < p.heads)
        piece[i] = __ldg(reinterpret_cast<const uint4*>(p.q + row * p.q_row + head * p.q_head) + thread % 8);
    }
    weight = thread < p.heads ? __ldg(p.weights + row * p.weights_row + thread) : 0.f;
  }
  __device__ void write(int padded, unsigned char* heads, float* weights, int thread) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int head = (thread + i * Threads) / 8;
      if (head < padded) put_piece(Words{}, heads, head, thread % 8, piece[i]);
    }
    if (thread < padded) weights[thread] = weight;
  }
};

// ---- keys of a warp ---------------------------------------------------------------------------------

// Tiles of 16 keys: two, or four. Heads come sixteen at a time.
template <int Tiles>
using Dots = float[Tiles][4];

// Of a row: over heads in ascending order, by pairs of heads in eight. Of sixteen heads the second eight wait, to be
// added up while the next are multiplied.
template <int Tiles>
struct Sums {
  float sum[Tiles][2] = {};
  Dots<Tiles> waiting = {};
  float2 weights = {0, 0};  // of those that wait

  __device__ void add(float2 w, const Dots<Tiles>& dot) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      sum[t][0] = fmaf(w.x, dot[t][0] + fabsf(dot[t][0]), sum[t][0]);
      sum[t][1] = fmaf(w.x, dot[t][2] + fabsf(dot[t][2]), sum[t][1]);
      sum[t][0] = fmaf(w.y, dot[t][1] + fabsf(dot[t][1]), sum[t][0]);
      sum[t][1] = fmaf(w.y, dot[t][3] + fabsf(dot[t][3]), sum[t][1]);
    }
  }
  __device__ void add_waiting() { add(weights, waiting); }
  __device__ void clear() {
#pragma unroll
    for (auto& of_tile : sum) of_tile[0] = of_tile[1] = 0;
  }
};

// What of a warp's keys outlives their products.
template <int Tiles>
struct KeyTail {
  static_assert(Tiles == 2 || Tiles == 4);
  static constexpr int kScores = Tiles / 2;  // of a lane
  float scale[kScores];
  bool missing;  // their page lies nowhere

  // The key of score i of a lane: g and g + 8 of tile c, or, of two tiles, g + 8 (c / 2) of tile c % 2.
  __device__ static int scored(int lane, int i) {
    const int c = lane % 4;
    return lane / 4 + (Tiles == 4 ? 16 * c + 8 * i : 16 * (c % 2) + 8 * (c / 2));
  }
  // Stores a row's scores: the four lanes of a key add up, and each keeps its share of the keys.
  __device__ void store(const CudaScoreParams& p, const Sums<Tiles>& sums, int row, int length, int first,
                        int lane) const {
    const auto& sum = sums.sum;
    float pair[2][kScores];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if constexpr (Tiles == 2) {
        pair[t][0] = exchange(sum[t][0], sum[t][1], lane & 2, 2);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) pair[t][half] = exchange(sum[t][half], sum[t + 2][half], lane & 2, 2);
      }
    }
    const int mine = first + scored(lane, 0);
    float* const logits = p.logits + row * p.logits_row + mine;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float score = scale[i] * exchange(pair[0][i], pair[1][i], lane & 1, 1);
      if (mine + 8 * i < length) logits[8 * i] = missing ? -INFINITY : score;
    }
  }

 private:
  // This lane's share of two sums over it and its partner.
  __device__ static float exchange(float first, float second, bool take_second, int partner) {
    const float mine = take_second ? second : first, other = take_second ? first : second;
    return mine + __shfl_xor_sync(~0u, other, partner);
  }
};

template <class Words, int Tiles = 4>
struct WarpKeys : KeyTail<Tiles> {
  static constexpr int kTiles = Tiles, kKeys = 16 * kTiles, kShift = Tiles == 4 ? 6 : 5;
  static constexpr int kParts = 4 * kTiles;  // of 16 bytes, that a lane has
  using Tail = KeyTail<Tiles>;
  using Sums = indexer::Sums<Tiles>;
  using Dots = indexer::Dots<Tiles>;
  using Tail::missing, Tail::scale, Tail::kScores, Tail::scored;
  Words key[kTiles][2];  // rows g and g + 8

  // Where the page of a tile lies, -1 for nowhere, and the tile in it.
  struct Place {
    int physical, inside;
  };
  // Of keys first .. first + kKeys - 1 of a source; those from `end` on need not exist.
  __device__ static Place find(const CudaScoreParams& p, int source, int first, int end, int lane) {
    Place place{-1, 0};
    if (!p.table) return place;
    const int mine = first + 16 * (lane % kTiles);  // a page is a multiple of 16 keys, so a tile lies in one
    const int page = p.page_shift >= 0 ? mine >> p.page_shift : mine / p.page_size;
    place.inside = mine - page * p.page_size;
    if (source >= 0 && source < p.requests && mine < end && page < p.table_pages)
      place.physical = __ldg(p.table + source * p.table_row + page);
    return place;
  }
  // The same where a page has a multiple of kKeys keys, as `first` is one: all of them lie in one page.
  __device__ static Place find_whole(const CudaScoreParams& p, int source, int first, int end) {
    const int page = first >> p.page_shift;
    Place place{-1, first & (p.page_size - 1)};
    if (source >= 0 && source < p.requests && first < end && page < p.table_pages)
      place.physical = __ldg(p.table + source * p.table_row + page);
    return place;
  }
  // Parts of 16 bytes of a lane, of 16 keys: key and byte. As registers want them, and as memory does.
  struct ForRegisters {
    __device__ static int key(int lane, int i) { return lane / 4 + 8 * (i / 2); }
    __device__ static int byte(int lane, int i) { return lane % 4 * 16 + i % 2 * kDim / 2; }
  };
  struct ForMemory {
    __device__ static int key(int lane, int i) { return lane / 8 + 4 * i; }
    __device__ static int byte(int lane, int) { return lane % 8 * 16; }
  };
  // take(i, address) of each part; scales and what is missing. What is missing is read as some other key.
  template <class Order, class Take>
  __device__ void fetch(const CudaScoreParams& p, Place place, int source, int first, int lane, Take&& take) {
    missing = p.table && (place.physical < 0 || place.physical >= p.pages);
    const float* scales[kScores];
    if (p.table) {
      const unsigned char* const page = p.keys + (missing ? 0 : place.physical) * p.page_bytes;
      scales[0] = reinterpret_cast<const float*>(page + static_cast<std::int64_t>(p.page_size) * kDim) + place.inside +
                  scored(lane, 0) - 16 * (lane % kTiles);
      scales[kScores - 1] = scales[0] + 8 * (kScores - 1);
      const auto mine = reinterpret_cast<unsigned long long>(page + static_cast<std::int64_t>(place.inside) * kDim);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const auto* const keys = reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, mine, t));
#pragma unroll
        for (int i = 0; i < 4; ++i) take(4 * t + i, keys + Order::key(lane, i) * kDim + Order::byte(lane, i));
      }
    } else {
      const auto at = [&](int key) { return contiguous(p, source, first + key); };
#pragma unroll
      for (int i = 0; i < kScores; ++i) scales[i] = p.scales + at(scored(lane, i));
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        take(i, p.keys + at(i / 4 * 16 + Order::key(lane, i % 4)) * p.page_bytes + Order::byte(lane, i % 4));
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) scale[i] = __ldg(scales[i]);
  }
  // By the lanes of a warp, to s_keys, laid out as heads are; committed.
  __device__ void copy(const CudaScoreParams& p, Place place, int source, int first, int lane, unsigned char* s_keys) {
    const std::uint32_t to = part_place(s_keys, lane);
    fetch<ForMemory>(p, place, source, first, lane, [&](int i, const unsigned char* from) {
      cuda::cp_async_16(to + static_cast<unsigned>(i) * 4 * kDim, from, 16);
    });
    cuda::cp_async_commit();
  }
  // Of a tile in one page: its scales; where the lane's first part is. The others, as copy takes them, by copy_part.
  __device__ const unsigned char* open(const CudaScoreParams& p, Place place, int lane) {
    missing = place.physical < 0 || place.physical >= p.pages;
    const unsigned char* const page = p.keys + (missing ? 0 : place.physical) * p.page_bytes;
    const float* const scales = reinterpret_cast<const float*>(page + static_cast<std::int64_t>(p.page_size) * kDim) +
                                place.inside + scored(lane, 0);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scale[i] = __ldg(scales + 8 * i);
    return page + (place.inside + ForMemory::key(lane, 0)) * kDim + ForMemory::byte(lane, 0);
  }
  __device__ static void copy_part(int i, const unsigned char* from, std::uint32_t to, int bytes) {
    cuda::cp_async_16(to + static_cast<unsigned>(i) * 4 * kDim, from + i * 4 * kDim, bytes);
  }
  __device__ static std::uint32_t part_place(unsigned char* s_keys, int lane) {
    return cuda::shared_address(s_keys) + static_cast<unsigned>(place_of_piece(lane / 8, lane % 8));
  }
  using Parts = uint4[kParts];
  __device__ void take(Parts& part, const unsigned char* s_keys, int lane) {
    const unsigned char* const from[2] = {s_keys + place_of_piece(lane / 4, lane % 4),
                                          s_keys + place_of_piece(lane / 4, lane % 4 + 4)};
#pragma unroll
    for (int i = 0; i < kParts; ++i) part[i] = *reinterpret_cast<const uint4*>(from[i % 2] + i / 2 * 8 * kDim);
    apply_factor();
  }
  __device__ void set(const Parts& part) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) key[t][half].set(part[4 * t + 2 * half], part[4 * t + 2 * half + 1]);
  }
  __device__ void load(const CudaScoreParams& p, int source, int first, int end, int lane) {
    Parts part;
    fetch<ForRegisters>(
        p, find(p, source, first, end, lane), source, first, lane,
        [&](int i, const unsigned char* from) { part[i] = __ldg(reinterpret_cast<const uint4*>(from)); });
    apply_factor();
    set(part);
  }

  // Adds heads 8 n .. 8 n + 15; between() is called when what waited has been added.
  template <class Between>
  __device__ void add_heads(Sums& sums, const unsigned char* heads, const float* weights, int n, int lane,
                            Between&& between) const {
    const auto weights_of = [&](int i) { return *reinterpret_cast<const float2*>(weights + i * 8 + 2 * (lane % 4)); };
    Dots dot;
    multiply(heads, n, lane, dot);
    sums.add_waiting();
    between();
    multiply(heads, n + 1, lane, sums.waiting);
    sums.add(weights_of(n), dot);
    sums.weights = weights_of(n + 1);
  }

  // The first sixteen heads of a row, while keys become words, each before its first product. between(step) is called
  // after the products of each step.
  template <class Between>
  __device__ void set_and_add_heads(Sums& sums, const Parts& part, const unsigned char* heads, const float* weights,
                                    int lane, Between&& between) {
    const auto weights_of = [&](int i) { return *reinterpret_cast<const float2*>(weights + i * 8 + 2 * (lane % 4)); };
    Dots dot;
    Words b[2];
    load_head(b[0], heads, 0, lane), load_head(b[1], heads, 1, lane);
    setting_steps<0>(part, dot, sums.waiting, b, between);
    sums.add(weights_of(0), dot);
    sums.weights = weights_of(1);
  }

 private:
  __device__ void apply_factor() {
#pragma unroll
    for (float& x : scale) x *= Words::kFactor;
  }
  __device__ static std::int64_t contiguous(const CudaScoreParams& p, int source, std::int64_t key) {
    return min(max(source + key, std::int64_t{0}), p.n - 1);
  }
  __device__ void multiply(const unsigned char* heads, int n, int lane, Dots& dot) const {
    Words b;
    load_head(b, heads, n, lane);
    steps<0>(dot, b);
  }
  template <int Step, class Between>
  __device__ void setting_steps(const Parts& part, Dots& dot, Dots& second, const Words (&b)[2], Between& between) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        key[t][half].template set_step<Step>(part[4 * t + 2 * half], part[4 * t + 2 * half + 1]);
      Words::template mma<Step>(dot[t], key[t][0], key[t][1], b[0]);
      Words::template mma<Step>(second[t], key[t][0], key[t][1], b[1]);
    }
    between(std::integral_constant<int, Step>{});
    if constexpr (Step + 1 < Words::kSteps) setting_steps<Step + 1>(part, dot, second, b, between);
  }
  template <int Step>
  __device__ void steps(Dots& dot, const Words& b) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) Words::template mma<Step>(dot[t], key[t][0], key[t][1], b);
    if constexpr (Step + 1 < Words::kSteps) steps<Step + 1>(dot, b);
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
