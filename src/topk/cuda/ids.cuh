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

// Several positions at once, where slots are not sharded and page sizes are powers of two: no branches, so that the
// loads from the block table do not wait for each other.
template <int N>
__device__ inline void plain_slots_of(const CudaSlotMap& map, const int* pages, const int (&position)[N],
                                      std::int64_t most, std::int64_t (&slot)[N]) {
  const unsigned size = static_cast<unsigned>(map.page_size);
  const int shift = 31 - __clz(static_cast<int>(size));
  int physical[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int page = position[i] >> shift;  // -1 of -1
    physical[i] = -1;
    if (page >= 0 && page < map.pages) physical[i] = __ldg(pages + page);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    slot[i] = static_cast<std::int64_t>(physical[i]) * size + (static_cast<unsigned>(position[i]) & (size - 1));
    if (physical[i] < 0 || slot[i] > most) slot[i] = -1;
  }
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
  // Slots of plain_slots_of.
  __device__ bool plain(const CudaIds& out) const {
    return pages && out.map.ranks == 1 && (out.map.page_size & (out.map.page_size - 1)) == 0 && !out.wide_slots;
  }
  // The physical page of a position, and its id stored by that: apart, so that others can come between.
  __device__ int page_of(const CudaIds& out, int position) const {
    const int page = position >> (31 - __clz(out.map.page_size));
    return page < out.map.pages ? __ldg(pages + page) : -1;
  }
  __device__ void store_plain(const CudaIds& out, int lane, int position, int page) const {
    if (positions) positions[lane] = position;
    const std::int64_t slot =
        static_cast<std::int64_t>(page) * out.map.page_size + (position & (out.map.page_size - 1));
    static_cast<int*>(slots)[lane] = page < 0 || slot > INT32_MAX ? -1 : static_cast<int>(slot);
  }
  // Lanes lane, lane + step, .. below end, position(lane) each.
  template <class Position>
  __device__ void store_slots(const CudaIds& out, int lane, int end, int step, Position&& position) const {
    if (plain(out)) {
      constexpr int kMany = 4;
#pragma unroll 1
      for (; lane < end; lane += kMany * step) {
        int from[kMany];
        std::int64_t slot[kMany];
#pragma unroll
        for (int i = 0; i < kMany; ++i) from[i] = lane + i * step < end ? position(lane + i * step) : -1;
        plain_slots_of(out.map, pages, from, INT32_MAX, slot);
#pragma unroll
        for (int i = 0; i < kMany; ++i)
          if (lane + i * step < end) static_cast<int*>(slots)[lane + i * step] = static_cast<int>(slot[i]);
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
