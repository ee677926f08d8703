// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/scores.cuh -- stage 1 on CUDA: two kernels around the same warp.
//
//   many rows a request (prefill): a CTA holds keys in registers, and rows pass by, staged in shared memory
//   few (decode):                  a CTA holds a request's rows in shared memory, and keys pass by
//
// A score is the sum over heads in ascending order in each of four lanes, then of the lanes: the same bits wherever the
// row and the key fall.
#pragma once
#include <type_traits>

#include "indexer/cuda/kernels.h"
#include "indexer/cuda/keys.cuh"

namespace sievemla::stage::indexer {

// ---- many rows --------------------------------------------------------------------------------------

// Rows that pass by a CTA; heads of a stage, and rows of it at most: their heads are padded to a multiple of sixteen.
inline constexpr int kHeldRows = 64, kStageHeads = 64, kStageRows = kStageHeads / 16;

// The longest of rows [row, end) with this source; by a warp.
__device__ inline int longest_of(const CudaScoreParams& p, int row, int end, int source, int lane) {
  int most = 0;
#pragma unroll 1
  for (int i = row + lane; i < end; i += 32)
    if (source_of(p, i) == source) most = max(most, length_of(p, i));
  return __reduce_max_sync(~0u, most);
}

template <class Arch, int Warps, int Ctas, int Stages>
struct HeldTile {
  using Words = std::conditional_t<Arch::kFp8Mma, Fp8Words, F16Words>;
  using Keys = WarpKeys<Words>;
  static constexpr bool kSets = Words::kHeadBytes > kDim;  // heads are set once, for all warps
  static constexpr int kWarps = Warps, kThreads = 32 * Warps, kCtas = Ctas, kStages = Stages;
  static constexpr int kKeys = Warps * Keys::kKeys;  // of a CTA
};

template <class Tile>
struct HeldSmem {
  alignas(128) unsigned char set[2][Tile::kSets ? kStageHeads * Tile::Words::kHeadBytes : 16];
  struct Stage {
    alignas(128) unsigned char heads[kStageHeads * kDim];
    float weights[kStageHeads];
    int2 row[kStageRows];  // lengths and sources
  } stage[Tile::kStages];
};

template <class Tile>
struct Held {
  using Keys = typename Tile::Keys;
  static constexpr int kPieces = kStageHeads * 8 / Tile::kThreads;  // of 16 bytes, that a thread copies of a stage
  static_assert(Tile::kThreads % 64 == 0 && Tile::kThreads >= kStageHeads + kStageRows);
  static constexpr unsigned kNone = ~0u;
  const CudaScoreParams& p;
  HeldSmem<Tile>& s;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int padded = padded_heads(p.heads), stage_rows = kStageHeads / padded;
  // What this thread copies of a stage: where it is from the first row on, in pieces of 16 bytes (so that 32 bits reach
  // 64 GiB) and in weights; kNone: zeros.
  unsigned piece_at[kPieces], weight_at;

  __device__ Held(const CudaScoreParams& p_, HeldSmem<Tile>& s_) : p(p_), s(s_) {
    const auto at = [&](int i, std::int64_t row, std::int64_t head, int first) {
      return i % padded < p.heads ? static_cast<unsigned>(i / padded * row + i % padded * head) + first : kNone;
    };
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      piece_at[i] = at((thread + i * Tile::kThreads) / 8, p.q_row / 16, p.q_head / 16, thread % 8);
    weight_at = at(thread, p.weights_row, 1, 0);
  }
  // Starts the copy of rows [row, ..) into a stage.
  __device__ void fetch(int row, int end, int at) const {
    auto& stage = s.stage[at];
    const int rows = min(stage_rows, end - row), heads = rows * padded;
    const uint4* const from = reinterpret_cast<const uint4*>(p.q + row * p.q_row);
    const std::uint32_t to = cuda::shared_address(stage.heads + place_of_piece(thread / 8, thread % 8));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool there = thread + i * Tile::kThreads < heads * 8 && piece_at[i] != kNone;
      cuda::cp_async_16(to + i * Tile::kThreads * 16, from + (there ? piece_at[i] : 0), there ? 16 : 0);
    }
    if (thread < kStageHeads) {
      const bool there = thread < heads && weight_at != kNone;
      cuda::cp_async_4(cuda::shared_address(stage.weights + thread),
                       p.weights + row * p.weights_row + (there ? weight_at : 0), there ? 4 : 0);
    } else if (const int i = thread - kStageHeads; i < rows) {
      int* const to_row = &stage.row[i].x;
      cuda::cp_async_4(cuda::shared_address(to_row), p.lengths + row + i, 4);
      if (p.source) cuda::cp_async_4(cuda::shared_address(to_row + 1), p.source + row + i, 4);
      else to_row[1] = source_of(p, row + i);
    }
  }
  // Sets the heads that this thread has copied.
  __device__ void set_heads(const unsigned char* copied, unsigned char* heads) const {
    const unsigned char* const from = copied + place_of_piece(thread / 8, thread % 8);
    uint4 piece[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) piece[i] = *reinterpret_cast<const uint4*>(from + i * Tile::kThreads * 16);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      set_piece(heads + i * Tile::kThreads / 8 * Tile::Words::kHeadBytes, thread / 8, thread % 8, piece[i]);
  }

  __device__ void run(int first_row, int first_key) const {
    const int end = min(first_row + kHeldRows, p.rows), first = first_key + warp * Keys::kKeys;
    Keys keys{};
    int loaded = 0, loaded_source = 0;  // keys up to here, of this source
    // The row before is stored while the first heads of this one are multiplied.
    typename Keys::Sums sums{};
    int row_of_sums = 0, length_of_sums = 0;
    const auto store = [&] {
      keys.store(p, sums, row_of_sums, length_of_sums, first, lane);
      sums.clear();
    };
    const auto finish = [&] {
      sums.add_waiting();
      store();
      sums = {}, length_of_sums = 0;
    };
#pragma unroll 1
    for (int i = 0; i < Tile::kStages - 1; ++i) {
      if (first_row + i * stage_rows < end) fetch(first_row + i * stage_rows, end, i);
      cuda::cp_async_commit();
    }
    int at = 0, set = 0;
#pragma unroll 1
    for (int row = first_row; row < end; row += stage_rows) {
      const auto& stage = s.stage[at];
      const unsigned char* heads = stage.heads;
      cuda::cp_async_wait<Tile::kStages - 2>();
      if constexpr (Tile::kSets) {
        heads = s.set[set];
        set_heads(stage.heads, s.set[set]);
        set ^= 1;
      }
      __syncthreads();
      const int ahead = row + (Tile::kStages - 1) * stage_rows;
      if (ahead < end) fetch(ahead, end, at == 0 ? Tile::kStages - 1 : at - 1);
      cuda::cp_async_commit();
      at = at + 1 == Tile::kStages ? 0 : at + 1;
      const float* weights = stage.weights;
#pragma unroll 1
      for (int i = 0; i < stage_rows && row + i < end;
           ++i, heads += padded * Tile::Words::kHeadBytes, weights += padded) {
        const auto [seen, source] = stage.row[i];
        const int length = min(max(seen, 0), p.width);
        const int visible = min(length - first, Keys::kKeys);
        if (visible > 0) {
          if (loaded < visible || loaded_source != source) {
            finish();
            loaded = min(longest_of(p, row + i, end, source, lane) - first, Keys::kKeys), loaded_source = source;
            keys.load(p, source, first, first + loaded, lane);
          }
          keys.add_heads(sums, heads, weights, 0, lane, store);
#pragma unroll 1
          for (int n = 2; n < padded / 8; n += 2) keys.add_heads(sums, heads, weights, n, lane, [] {});
          row_of_sums = row + i, length_of_sums = length;
        }
        if (p.fill && visible < Keys::kKeys)
          fill_row(p, row + i, first + max(visible, 0), min(first + Keys::kKeys, p.width), lane, 32);
      }
    }
    finish();
  }
};

template <class Arch, class Tile>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void held_kernel(const __grid_constant__ CudaScoreParams p,
                                                                           int key_blocks) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int block = static_cast<int>(blockIdx.x);
  std::uint32_t at = cuda::shared_address(smem);
  asm volatile("" : "+r"(at));  // one register instead of being worked out again and again
  Held<Tile>(p, *reinterpret_cast<HeldSmem<Tile>*>(__cvta_shared_to_generic(at)))
      .run(block / key_blocks * kHeldRows, block % key_blocks * Tile::kKeys);
}

// ---- few rows ---------------------------------------------------------------------------------------

// Units of tiles_of(unit) tiles each, of which CTAs get equal shares; all together below 2^31, as a tile has 32 keys or
// more.
template <class TilesOf>
struct Units {
  const int units;
  const TilesOf tiles_of;
  const int lane = static_cast<int>(threadIdx.x % 32);

  // The unit in which a tile lies, and its number there; by every warp for itself.
  struct Place {
    int unit, tile;
  };
  __device__ Place find(int tile) const {
#pragma unroll 1
    for (int base = 0; base < units; base += 32) {
      const int mine = base + lane < units ? tiles_of(base + lane) : 0;
      int upto = mine;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
      }
      const unsigned after = __ballot_sync(~0u, upto > tile);
      if (after) {
        const int at = __ffs(static_cast<int>(after)) - 1;
        return {base + at, tile - __shfl_sync(~0u, upto - mine, at)};
      }
      tile -= __shfl_sync(~0u, upto, 31);
    }
    return {units, 0};
  }
  __device__ int all_tiles() const {
    int sum = 0;
#pragma unroll 2
    for (int unit = lane; unit < units; unit += 32) sum += tiles_of(unit);
    return __reduce_add_sync(~0u, sum);
  }

  // body(unit, first tile, one past the last, whether this CTA has more) for the tiles of CTA `cta` of `ctas`.
  template <class Body>
  __device__ void share(int cta, int ctas, Body&& body) const {
    const int all = all_tiles(), each = all / ctas, more = all - each * ctas;
    int left = each + (cta < more);
    if (left <= 0) return;
#pragma unroll 1
    for (Place at = find(each * cta + min(cta, more)); left > 0; at = {at.unit + 1, 0}) {
      const int here = min(left, tiles_of(at.unit) - at.tile);
      left -= here;
      if (here > 0) body(at.unit, at.tile, at.tile + here, left > 0);
    }
  }
};
template <class TilesOf>
Units(int, TilesOf) -> Units<TilesOf>;

// A unit's rows share keys: `fold` of them.
__device__ inline int longest_of_unit(const CudaScoreParams& p, int unit, int fold) {
  int most = 0;
#pragma unroll 1
  for (int i = 0; i < fold; ++i) most = max(most, length_of(p, unit * fold + i));
  return most;
}

// -inf past the lengths of rows [begin, end), by some threads of all CTAs.
__device__ inline void fill_rows(const CudaScoreParams& p, int begin, int end, int thread, int threads) {
  constexpr int kColumns = 4096;
  const int pieces = (p.width + kColumns - 1) / kColumns;
#pragma unroll 1
  for (std::int64_t i = blockIdx.x; i < static_cast<std::int64_t>(end - begin) * pieces; i += gridDim.x) {
    const int row = begin + static_cast<int>(i / pieces), piece = static_cast<int>(i % pieces) * kColumns;
    fill_row(p, row, max(length_of(p, row), piece), min(piece + kColumns, p.width), thread, threads);
  }
}

// A warp's next keys are on their way to its own shared memory while these are multiplied.
template <class Arch, int Warps, int Ctas, int Tiles>
struct PassTile {
  using Words = std::conditional_t<Arch::kFp8Mma, Fp8Words, F16Words>;
  using Keys = WarpKeys<Words, Tiles>;
  static constexpr bool kSets = Words::kHeadBytes > kDim;
  static constexpr int kWarps = Warps, kThreads = 32 * Warps, kCtas = Ctas;
  static constexpr int kFixedBytes = Warps * Keys::kKeys * kDim;
  static constexpr int kColumnBytes = Words::kHeadBytes + 4;
};

// A warp's share of the tiles of a unit: every kWarps-th of [first, upto), in keys.
template <class Tile>
struct Pass {
  using Keys = typename Tile::Keys;
  using Sums = typename Keys::Sums;
  static constexpr int kHeadBytes = Tile::Words::kHeadBytes, kStep = Tile::kWarps * Keys::kKeys;
  const CudaScoreParams& p;
  const int unit, fold, padded, longest, source, first, upto, lane;
  unsigned char *const s_mine, *const s_heads;
  float* const s_weights;
  Keys next;                     // but for the keys themselves
  typename Keys::Place place{};  // of those after them

  // Starts the copy of the tile at `at`, whose place was found.
  __device__ void fetch(int at) {
    __syncwarp();
    next.copy(p, place, source, at, lane, s_mine);
    if (at + kStep < upto) place = Keys::find(p, source, at + kStep, longest, lane);
  }
  __device__ void start() {
    if (first >= upto) return;
    place = Keys::find(p, source, first, longest, lane);
    fetch(first);
  }
  __device__ void add_row(const Keys& keys, Sums& sums, int i, int n) const {
#pragma unroll 1
    for (; n < padded / 8; n += 2)
      keys.add_heads(sums, s_heads + i * padded * kHeadBytes, s_weights + i * padded, n, lane, [] {});
  }
  __device__ void finish_row(const Keys& keys, Sums& sums, int i, int at) const {
    const int row = unit * fold + i;
    sums.add_waiting();
    keys.store(p, sums, row, fold == 1 ? longest : length_of(p, row), at, lane);
  }
  __device__ void run() {
    int at = first;
#pragma unroll 1
    for (; at < upto; at += kStep) {
      cuda::cp_async_wait<0>();
      __syncwarp();
      Keys keys = next;
      typename Keys::Parts part;
      keys.take(part, s_mine, lane);
      if (at + kStep < upto) fetch(at + kStep);
      int i = 0;
      if constexpr (Tile::kSets) {
        Sums sums{};
        keys.set_and_add_heads(sums, part, s_heads, s_weights, lane, [](auto) {});
        add_row(keys, sums, 0, 2);
        finish_row(keys, sums, 0, at);
        i = 1;
      } else {
        keys.set(part);
      }
#pragma unroll 1
      for (; i < fold; ++i) {
        Sums sums{};
        add_row(keys, sums, i, 0);
        finish_row(keys, sums, i, at);
      }
    }
  }
  // Where one row has the keys and they lie in pages of a multiple of kKeys: without a branch, so that the next tile's
  // copies and the last one's scores find their places among the products.
  __device__ void run_whole() {
    typename Keys::Tail last{};
    Sums waiting{};
    int of_last = 0, upto_last = 0;  // the tile whose scores wait, and the length that it is stored by: none so far
    const std::uint32_t to = Keys::part_place(s_mine, lane);
    if (first < upto) place = Keys::find_whole(p, source, first + kStep, first + kStep < upto ? longest : 0);
    int at = first;
#pragma unroll 1
    for (; at < upto; at += kStep) {
      cuda::cp_async_wait<0>();
      __syncwarp();
      Keys keys = next;
      typename Keys::Parts part;
      keys.take(part, s_mine, lane);
      __syncwarp();
      const int bytes = at + kStep < upto ? 16 : 0;
      const unsigned char* const from = next.open(p, place, lane);
      place = Keys::find_whole(p, source, at + 2 * kStep, at + 2 * kStep < upto ? longest : 0);
      Sums sums{};
      keys.set_and_add_heads(sums, part, s_heads, s_weights, lane, [&](auto step) {
        constexpr int kEach = Keys::kParts / Tile::Words::kSteps;
#pragma unroll
        for (int i = 0; i < kEach; ++i) Keys::copy_part(step * kEach + i, from, to, bytes);
        if constexpr (step == 0) {
          waiting.add_waiting();
          last.store(p, waiting, unit, upto_last, of_last, lane);
        }
      });
      cuda::cp_async_commit();
      add_row(keys, sums, 0, 2);
      waiting = sums, last = keys, of_last = at, upto_last = longest;
    }
    cuda::cp_async_wait<0>();
    waiting.add_waiting();
    last.store(p, waiting, unit, upto_last, of_last, lane);
  }
};

template <class Arch, class Tile>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void pass_kernel(const __grid_constant__ CudaScoreParams p,
                                                                           int fold) {
  using Keys = typename Tile::Keys;
  constexpr int kHeadBytes = Tile::Words::kHeadBytes;
  extern __shared__ __align__(1024) unsigned char smem[];
  const int thread = threadIdx.x, lane = thread % 32, padded = padded_heads(p.heads);
  unsigned char* const s_mine = smem + thread / 32 * Keys::kKeys * kDim;  // of this warp's keys
  unsigned char* const s_heads = smem + Tile::kFixedBytes;
  float* const s_weights = reinterpret_cast<float*>(s_heads + fold * padded * kHeadBytes);
  cuda::wait_for_kernel();
  cuda::let_next_start();
  const Units units{p.rows / fold,
                    [&](int unit) { return (longest_of_unit(p, unit, fold) + Keys::kKeys - 1) / Keys::kKeys; }};
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  units.share(cta, ctas, [&](int unit, int begin, int end, bool) {
    QueryPart<typename Tile::Words, Tile::kThreads> query;
    query.read(p, unit * fold, thread);  // before the keys, behind which it would wait
    Pass<Tile> pass{p,
                    unit,
                    fold,
                    padded,
                    longest_of_unit(p, unit, fold),
                    source_of(p, unit * fold),
                    (begin + thread / 32) * Keys::kKeys,
                    end * Keys::kKeys,
                    lane,
                    s_mine,
                    s_heads,
                    s_weights};
    pass.start();
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < fold; ++i) {
      if (i > 0) query.read(p, unit * fold + i, thread);
      query.write(padded, s_heads + i * padded * kHeadBytes, s_weights + i * padded, thread);
    }
    __syncthreads();
    if constexpr (Tile::kSets) {
      if (fold == 1 && p.table && p.page_shift >= Keys::kShift) return pass.run_whole();
    }
    pass.run();
  });
  if (p.fill) fill_rows(p, 0, p.rows, thread, Tile::kThreads);
}

}  // namespace sievemla::stage::indexer
