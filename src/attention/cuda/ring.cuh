// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/ring.cuh -- cache rows on their way into shared memory, as they lie in the cache: a ring of slots
// of 16 rows, which a warp group fills by bulk copies (sm_90).
//
// Tiles have 64 rows; warp w of the four copies rows 16 w .. of every tile into a slot. Slots follow each other in the
// order of tiles and warps. A loop has p, s, begin, end (lanes of the unit), tiles, lane and warp, and s has:
//   rows[slots][16 * Rows::kStride], full[slots], empty[slots] (mbarriers), live[slots] (bit per row: not a hole),
//   names[4][kNames][32] (of rows to come, by warp)
// kFirstAlone: a warp asks for the second tile's rows when it has its own of the first, which else would come among
// them. For loops that give no row of the first tile back before they have waited for the second's.
// Where a slot's rounds belong to different warps, a warp waits by parity for one that another has seen complete: its
// own wait for the tile before says so.
#pragma once
#include <cstdint>

#include "attention/cuda/row_source.cuh"
#include "cuda/ptx/sm90a.cuh"

namespace sievemla::stage::attention {

inline constexpr int kNames = 4;  // pairs of tiles whose rows are known by name at a time

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Loop, class Rows, int Slots>
struct Ring {
  static constexpr int kTokens = 64, kGroup = 128, kSlots = Slots;
  static_assert(kSlots < kGroup);

  __device__ const Loop& loop() const { return static_cast<const Loop&>(*this); }
  __device__ static int slot_of(int tile, int i) {
    return static_cast<int>(static_cast<unsigned>(4 * tile + i) % kSlots);
  }
  __device__ static unsigned round_of(int tile, int i) { return static_cast<unsigned>(4 * tile + i) / kSlots; }
  __device__ std::uint32_t full(int slot) const { return cuda::shared_address(&loop().s.full[slot]); }
  __device__ std::uint32_t empty(int slot) const { return cuda::shared_address(&loop().s.empty[slot]); }

  // ---- the warp group that fills it -----------------------------------------------------------------

  // What names the rows is fetched for two tiles at a time, six tiles ahead and past the registers, since the compiler
  // waits for those: lane l has row l % 16 of the warp's slot of tile 2 pair + l / 16.
  __device__ int lane_of(int pair) const {
    const Loop& l = loop();
    return l.begin + (2 * pair + l.lane / 16) * kTokens + l.warp * 16 + l.lane % 16;
  }
  __device__ void fetch_names(const void* list, int pair) {
    const Loop& l = loop();
    const int at = lane_of(pair);
    if (at < l.end) fetch_lane(l.p, list, at, cuda::shared_address(&l.s.names[l.warp][pair % kNames][l.lane]));
    cuda::cp_async_commit();
  }
  __device__ std::int64_t offset_of(int pair) const {
    const Loop& l = loop();
    cuda::cp_async_wait<kNames - 2>();
    const int at = lane_of(pair);
    return at < l.end ? row_offset(l.p, fetched_lane(l.p, &l.s.names[l.warp][pair % kNames][l.lane]), at) : -1;
  }

  // Starts the copy of the rows that lanes `first` .. first + 15 have the offsets of; a hole becomes zeros.
  __device__ void gather(std::int64_t offset, int first, int slot, std::uint64_t policy) {
    const Loop& l = loop();
    const bool mine = l.lane / 16 == first / 16;
    const unsigned live = __ballot_sync(~0u, offset >= 0) >> first & 0xFFFF;
    if (live != 0xFFFF) {
#pragma unroll 1
      for (int i = l.lane; i < 16 * Rows::kStride / 16; i += 32) reinterpret_cast<uint4*>(l.s.rows[slot])[i] = {};
      cuda::fence_async();
      __syncwarp();  // before one lane tells of them
    }
    if (l.lane == 0) {
      l.s.live[slot] = static_cast<unsigned short>(live);
      cuda::mbarrier_arrive_expecting(full(slot), __popc(live) * Rows::kBytes);
    }
    __syncwarp();
    if (mine && offset >= 0)
      cuda::bulk_copy(cuda::shared_address(l.s.rows[slot]) + l.lane % 16 * Rows::kStride, l.p.rows + offset,
                      Rows::kBytes, full(slot), policy);
  }

  // Rows of `unit`. A slot is given back by `readers` arrivals. init(kSlots) sets the loop's other mbarriers meanwhile.
  // The group meets at barrier `met`, then arrives at `ready`, where all `threads` of the CTA are counted.
  template <class Init>
  __device__ void fill(int unit, int readers, int met, int ready, int threads, Init init) {
    const Loop& l = loop();
    const void* const list = list_of(l.p, unit);
#pragma unroll 1
    for (int pair = 0; pair < kNames - 1; ++pair) fetch_names(list, pair);
    // Meanwhile; lane by lane, so by all warps.
    if (const int i = 4 * l.lane + l.warp; i < kSlots) {
      cuda::mbarrier_init(full(i), 1), cuda::mbarrier_init(empty(i), readers);
    } else {
      init(i);
    }
    cuda::fence_async();
    const std::uint64_t policy = cuda::l2_policy(l.p.read_once);
    cuda::barrier_sync(met, kGroup);
    cuda::barrier_arrive(ready, threads);
    std::int64_t offset = -1;
#pragma unroll 1
    for (int tile = 0; tile < l.tiles; ++tile) {
      if (tile % 2 == 0) {
        offset = offset_of(tile / 2);
        fetch_names(list, tile / 2 + kNames - 1);
      }
      if (Loop::kFirstAlone && tile == 1) cuda::mbarrier_wait(full(slot_of(0, l.warp)), 0);
      const int slot = slot_of(tile, l.warp);
      const unsigned round = round_of(tile, l.warp);
      if (round > 0) cuda::mbarrier_wait(empty(slot), (round - 1) & 1);
      gather(offset, tile % 2 * 16, slot, policy);
    }
  }
};

#endif

}  // namespace sievemla::stage::attention
