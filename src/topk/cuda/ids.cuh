// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/ids.cuh -- positions to slots on the device, and how an id is stored.
#pragma once
#include <cstdint>

#include "topk/cuda/params.h"

namespace sievemla::stage::topk {

// The block table's row of a row of ids; null where its request is none.
__device__ inline const int* pages_of(const CudaSlotMap& map, int row) {
  const int request = map.row_request ? map.row_request[row] : row / map.rows_per_request;
  return request >= 0 && request < map.requests ? map.table + request * map.table_row : nullptr;
}

// SlotMap's formula; -1 where the position has no slot, or one above `most`.
__device__ inline std::int64_t slot_of(const CudaSlotMap& map, const int* pages, int position, std::int64_t most) {
  if (position < 0 || !pages) return -1;
  auto at = static_cast<unsigned>(position);
  if (map.ranks > 1) {
    const unsigned run = static_cast<unsigned>(map.interleave), turn = at / run,
                   ranks = static_cast<unsigned>(map.ranks);
    if (turn % ranks != static_cast<unsigned>(map.rank)) return -1;
    at = turn / ranks * run + at % run;
  }
  const unsigned size = static_cast<unsigned>(map.page_size);
  // Page sizes are powers of two, mostly.
  const unsigned page = (size & (size - 1)) == 0 ? at >> (31 - __clz(static_cast<int>(size))) : at / size;
  if (page >= static_cast<unsigned>(map.pages)) return -1;
  const std::int64_t physical = __ldg(pages + page);
  const std::int64_t slot = physical * size + (at - page * size);
  return physical < 0 || slot > most ? -1 : slot;
}

// Stores ids of one row.
struct IdRow {
  int* positions = nullptr;
  void* slots = nullptr;
  const int* pages = nullptr;

  __device__ IdRow(const CudaIds& out, int row) {
    if (out.positions) positions = out.positions + row * out.positions_row;
    if (!out.slots) return;
    slots = static_cast<char*>(out.slots) + row * out.slots_row * (out.wide_slots ? 8 : 4);
    pages = pages_of(out.map, row);
  }
  __device__ void store(const CudaIds& out, int lane, int position) const {
    if (positions) positions[lane] = position;
    if (slots) store_slot(out, lane, position);
  }
  // Slots of 32 bits, not sharded, in pages of powers of two: by page_of and plain_slot, apart, so that the loads from
  // the block table of several positions do not wait for each other.
  __device__ bool plain(const CudaIds& out) const {
    return pages && out.map.ranks == 1 && (out.map.page_size & (out.map.page_size - 1)) == 0 && !out.wide_slots;
  }
  // The physical page of a position; -1 of none, and of -1.
  __device__ int page_of(const CudaIds& out, int position) const {
    const int page = position >> (31 - __clz(out.map.page_size));
    return static_cast<unsigned>(page) < static_cast<unsigned>(out.map.pages) ? __ldg(pages + page) : -1;
  }
  __device__ static int plain_slot(const CudaIds& out, int position, int page) {
    const unsigned size = static_cast<unsigned>(out.map.page_size);
    const std::int64_t slot = static_cast<std::int64_t>(page) * size + (static_cast<unsigned>(position) & (size - 1));
    return page < 0 || slot > INT32_MAX ? -1 : static_cast<int>(slot);
  }
  __device__ void store_plain(const CudaIds& out, int lane, int position, int page) const {
    if (positions) positions[lane] = position;
    static_cast<int*>(slots)[lane] = plain_slot(out, position, page);
  }
  // Lanes lane, lane + step, .. below end, position(lane) each.
  template <class Position>
  __device__ void store_slots(const CudaIds& out, int lane, int end, int step, Position&& position) const {
    if (plain(out)) {
      constexpr int kMany = 4;
#pragma unroll 1
      for (; lane < end; lane += kMany * step) {
        int from[kMany], page[kMany], slot[kMany];
#pragma unroll
        for (int i = 0; i < kMany; ++i) from[i] = lane + i * step < end ? position(lane + i * step) : -1;
#pragma unroll
        for (int i = 0; i < kMany; ++i) page[i] = page_of(out, from[i]);
#pragma unroll
        for (int i = 0; i < kMany; ++i) slot[i] = plain_slot(out, from[i], page[i]);
#pragma unroll
        for (int i = 0; i < kMany; ++i)
          if (lane + i * step < end) static_cast<int*>(slots)[lane + i * step] = slot[i];
      }
      return;
    }
#pragma unroll 1
    for (; lane < end; lane += step) store_slot(out, lane, position(lane));
  }
  __device__ void store_slot(const CudaIds& out, int lane, int position) const {
    if (out.wide_slots) static_cast<std::int64_t*>(slots)[lane] = slot_of(out.map, pages, position, INT64_MAX);
    else static_cast<int*>(slots)[lane] = static_cast<int>(slot_of(out.map, pages, position, INT32_MAX));
  }
};

}  // namespace sievemla::stage::topk
