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

// Rows that pass by a CTA; heads of a stage, padded to a multiple of 8 a row, and rows of it at most.
inline constexpr int kHeldRows = 64, kStageHeads = 64, kStageRows = 8;

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
  static constexpr int kWarps = Warps, kThreads = 32 * Warps, kCtas = Ctas, kStages = Stages;
  using Keys = WarpKeys<Words, 4>;
  static constexpr int kKeys = Warps * Keys::kKeys;  // of a CTA
};

template <class Tile>
struct HeldSmem {
  static constexpr bool kSets = Tile::Words::kHeadBytes > kDim;  // heads are converted once, for all warps
  alignas(128) unsigned char heads[kSets ? kStageHeads * Tile::Words::kHeadBytes : 16];
  struct Stage {
    alignas(128) unsigned char heads[kStageHeads * kDim];
    float weights[kStageHeads];
    int length[kStageRows], source[kStageRows];
  } stage[Tile::kStages];
};

template <class Tile>
struct Held {
  const CudaScoreParams& p;
  HeldSmem<Tile>& s;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int padded = (p.heads + 7) / 8 * 8, stage_rows = min(kStageHeads / padded, kStageRows);

  // Starts the copy of rows [row, ..) into a stage.
  __device__ void fetch(int row, int end, int at) {
    auto& stage = s.stage[at];
#pragma unroll 1
    for (int i = 0; i < stage_rows && row + i < end; ++i)
      copy_query(p, row + i, padded, stage.heads + i * padded * kDim, stage.weights + i * padded, thread,
                 Tile::kThreads);
    if (thread < stage_rows && row + thread < end) {
      cuda::cp_async_4(cuda::shared_address(&stage.length[thread]), p.lengths + row + thread, 4);
      if (p.source) cuda::cp_async_4(cuda::shared_address(&stage.source[thread]), p.source + row + thread, 4);
      else stage.source[thread] = p.table ? (row + thread) / p.rows_per_source : 0;
    }
  }

  __device__ void run(int first_row, int first_key) {
    using Keys = typename Tile::Keys;
    const int end = min(first_row + kHeldRows, p.rows), first = first_key + warp * Keys::kKeys;
    Keys keys;
    int loaded = 0, loaded_source = 0;  // keys up to here, of this source
#pragma unroll 1
    for (int i = 0; i < Tile::kStages - 1; ++i) {
      if (first_row + i * stage_rows < end) fetch(first_row + i * stage_rows, end, i);
      cuda::cp_async_commit();
    }
    int at = 0;
    for (int row = first_row; row < end; row += stage_rows) {
      cuda::cp_async_wait<Tile::kStages - 2>();
      __syncthreads();
      const int ahead = row + (Tile::kStages - 1) * stage_rows;
      if (ahead < end) fetch(ahead, end, at == 0 ? Tile::kStages - 1 : at - 1);
      cuda::cp_async_commit();
      const auto& stage = s.stage[at];
      at = at + 1 == Tile::kStages ? 0 : at + 1;
      const unsigned char* heads = stage.heads;
      if constexpr (HeldSmem<Tile>::kSets) {
        set_heads(stage.heads, s.heads, kStageHeads / 8, thread, Tile::kThreads);
        __syncthreads();
        heads = s.heads;
      }
#pragma unroll 1
      for (int i = 0; i < stage_rows && row + i < end; ++i) {
        const int length = min(max(stage.length[i], 0), p.width), source = stage.source[i];
        const int visible = min(length - first, Keys::kKeys);
        if (visible > 0) {
          if (loaded < visible || loaded_source != source) {
            loaded = min(longest_of(p, row + i, end, source, lane) - first, Keys::kKeys), loaded_source = source;
            keys.load(p, source, first, first + loaded, lane);
          }
          float score[Keys::kMine];
          keys.scores(heads + i * padded * Tile::Words::kHeadBytes, stage.weights + i * padded, padded / 8, lane,
                      score);
          Keys::store(p, row + i, length, first, lane, score);
        }
        if (p.fill && visible < Keys::kKeys)
          fill_row(p, row + i, first + max(visible, 0), min(first + Keys::kKeys, p.width), lane, 32);
      }
    }
  }
};

template <class Arch, class Tile>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void held_kernel(const __grid_constant__ CudaScoreParams p,
                                                                           int key_blocks) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int block = static_cast<int>(blockIdx.x);
  Held<Tile>{p, *reinterpret_cast<HeldSmem<Tile>*>(smem)}.run(block / key_blocks * kHeldRows,
                                                              block % key_blocks * Tile::kKeys);
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

// Tiles: of 16 keys a warp. Ahead: the next keys are on their way while these are multiplied.
template <class Arch, int Warps, int Ctas, int Tiles, bool Ahead>
struct PassTile {
  using Words = std::conditional_t<Arch::kFp8Mma, Fp8Words, F16Words>;
  using Keys = WarpKeys<Words, Tiles>;
  static constexpr bool kSets = Words::kHeadBytes > kDim;  // heads are converted once, for all keys
  static constexpr int kColumnBytes = Words::kHeadBytes + 4, kFixedBytes = kSets ? kMostHeads * kDim : 0;
  static constexpr int kWarps = Warps, kThreads = 32 * Warps, kCtas = Ctas;
  static constexpr bool kAhead = Ahead;
};

template <class Arch, class Tile>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void pass_kernel(const __grid_constant__ CudaScoreParams p,
                                                                           int fold) {
  using Keys = typename Tile::Keys;
  extern __shared__ __align__(1024) unsigned char smem[];
  const int thread = threadIdx.x, lane = thread % 32, padded = (p.heads + 7) / 8 * 8;
  constexpr int kHeadBytes = Tile::Words::kHeadBytes;
  float* const weights = reinterpret_cast<float*>(smem + fold * padded * kHeadBytes);
  unsigned char* const copied = smem + fold * padded * (kHeadBytes + 4);  // of one row
  cuda::wait_for_kernel();
  cuda::let_next_start();
  const Units units{p.rows / fold,
                    [&](int unit) { return (longest_of_unit(p, unit, fold) + Keys::kKeys - 1) / Keys::kKeys; }};
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  units.share(cta, ctas, [&](int unit, int begin, int end, bool) {
    const int longest = longest_of_unit(p, unit, fold), source = source_of(p, unit * fold);
    const int begin_mine = begin + thread / 32;
    typename Keys::Raw ahead{};
    if (Tile::kAhead && begin_mine < end) ahead = Keys::fetch(p, source, begin_mine * Keys::kKeys, longest, lane);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < fold; ++i) {
      unsigned char* const heads = smem + i * padded * kHeadBytes;
      copy_query(p, unit * fold + i, padded, Tile::kSets ? copied : heads, weights + i * padded, thread,
                 Tile::kThreads);
      if constexpr (Tile::kSets) {
        cuda::cp_async_commit();
        cuda::cp_async_wait<0>();
        __syncthreads();
        set_heads(copied, heads, padded / 8, thread, Tile::kThreads);
        __syncthreads();
      }
    }
    cuda::cp_async_commit();
    cuda::cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int tile = begin_mine; tile < end; tile += Tile::kWarps) {
      const int first = tile * Keys::kKeys;
      Keys keys;
      if constexpr (Tile::kAhead) {
        keys.set(ahead);
        if (tile + Tile::kWarps < end)
          ahead = Keys::fetch(p, source, first + Tile::kWarps * Keys::kKeys, longest, lane);
      } else {
        keys.load(p, source, first, longest, lane);
      }
#pragma unroll 1
      for (int i = 0; i < fold; ++i) {
        float score[Keys::kMine];
        keys.scores(smem + i * padded * kHeadBytes, weights + i * padded, padded / 8, lane, score);
        Keys::store(p, unit * fold + i, length_of(p, unit * fold + i), first, lane, score);
      }
    }
  });
  if (p.fill) fill_rows(p, 0, p.rows, thread, Tile::kThreads);
}

}  // namespace sievemla::stage::indexer
