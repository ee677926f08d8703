// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/plan.cuh -- which part of which unit a CTA works on. Items are the parts of all units, in order.
#pragma once
#include "attention/cuda/row_source.cuh"

namespace sievemla::stage::attention {

struct Part {
  int unit;
  int index, parts;  // part `index` of `parts` of the unit
  int first_item;    // of the unit
  int lanes;         // of the unit
};

// The part and the head group of a CTA. Equal parts: the parts of a unit and group are neighbours, so that a cluster
// may hold them.
struct Place {
  Part part;  // parts = 0: past the last
  int item, group;
};

inline constexpr int kPlanTries = 8;

struct PlanSmem {
  int items[kPlanTries];
  Place place;
};

__device__ inline int warp_sum(int x) { return static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(x))); }

// Works out from the lengths which part item `item` is, and leaves it in s.place.part; past the last, parts is 0. Parts
// are as short as lets all of them run at once (to an eighth); where units alone are too many for that, an even share
// of the tiles. Every warp does the same work, but for the lengths of a part, of which each tries some. All threads of
// the CTA call.
__device__ __noinline__ inline void find_uneven_part(const CudaParams& p, int item, int tile, PlanSmem& s) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const auto tiles_of = [&](int unit) { return unit < p.units ? (lanes_of_unit(p, unit) + tile - 1) / tile : 0; };
  const auto parts_of = [&](int unit, int chunk) {
    return unit < p.units ? max(1, (tiles_of(unit) + chunk - 1) / chunk) : 0;
  };

  int tiles = 0;
#pragma unroll 1
  for (int unit = lane; unit < p.units; unit += 32) tiles += tiles_of(unit);
  tiles = warp_sum(tiles);
  const int even = max(1, (tiles + p.target - 1) / p.target);  // tiles of a part
  const auto longer = [&](int i) { return even + (even * i + kPlanTries - 1) / kPlanTries; };
#pragma unroll 1
  for (int i = warp; i < kPlanTries; i += warps) {
    int items = 0;
#pragma unroll 1
    for (int unit = lane; unit < p.units; unit += 32) items += parts_of(unit, longer(i));
    items = warp_sum(items);
    if (lane == 0) s.items[i] = items;
  }
  __syncthreads();
  int chunk = even;
  for (int i = kPlanTries - 1; i >= 0; --i)
    if (s.items[i] <= p.target) chunk = longer(i);

  if (threadIdx.x == 0) s.place.part.parts = 0;
  int before = 0;  // items of the units passed so far
#pragma unroll 1
  for (int first = 0; first < p.units; first += 32) {
    const int parts = parts_of(first + lane, chunk);
    int upto = parts;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int left = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += left;
    }
    const int begin = before + upto - parts;
    const unsigned here = __ballot_sync(~0u, item >= begin && item < begin + parts);
    if (here != 0) {
      const int at = __ffs(static_cast<int>(here)) - 1, from = __shfl_sync(~0u, begin, at);
      const int of = __shfl_sync(~0u, parts, at);
      if (threadIdx.x == 0) s.place.part = {first + at, item - from, of, from, lanes_of_unit(p, first + at)};
      break;
    }
    before += __shfl_sync(~0u, upto, 31);
  }
  __syncthreads();
}

// Whether the parameters alone say what a CTA works on: nothing need be read, so nothing waited for.
__device__ inline bool plan_is_told(const CudaParams& p) { return p.parts > 0 && p.indices && !p.topk_length; }

__device__ inline int quotient_of(int n, int by) {
  return by == 1 ? n : static_cast<int>(static_cast<unsigned>(n) / static_cast<unsigned>(by));
}

// Before anything is read. Kernels whose CTAs fill a multiprocessor let the next start at once.
__device__ inline void begin_launch(const CudaParams& p) {
  if (p.launch == Launch::alone) cuda::let_next_start();
  if (p.launch == Launch::second) __threadfence();  // what the first waited for is there: not as L1 has it from before
  else cuda::wait_for_kernel();
  if (p.launch != Launch::alone) cuda::let_next_start();
}
// When the CTA's results are written. One thread calls.
__device__ inline void end_launch(const CudaParams& p) {
  if (p.launch == Launch::second) cuda::wait_for_kernel();
}

// All threads of the CTA call.
__device__ inline Place find_place(const CudaParams& p, int groups, int tile, PlanSmem& s) {
  const int cta = static_cast<int>(blockIdx.x);
  if (p.parts == 0) {
    const int item = quotient_of(cta, groups);
    find_uneven_part(p, item, tile, s);
    return {s.place.part, item, cta - item * groups};
  }
  const int list = quotient_of(cta, p.parts), index = cta - list * p.parts;
  const int mine = quotient_of(list, groups), group = list - mine * groups, first = mine * p.parts;
  const int unit = p.first_unit + mine;
  return {{unit, index, p.parts, first, lanes_of_unit(p, unit)}, first + index, group};
}

// What the merge kernel needs to know of a plan that was worked out here. One thread calls.
__device__ inline void tell_merger(const CudaParams& p, const Place& place) {
  if (p.parts == 0 && place.part.index == 0 && place.group == 0)
    p.unit_parts[place.part.unit] = {place.part.first_item, place.part.parts};
}
__device__ inline Part parts_of_unit(const CudaParams& p, int unit) {
  if (p.parts > 0) return {unit, 0, p.parts, unit * p.parts, 0};
  return {unit, 0, __ldcg(&p.unit_parts[unit].parts), __ldcg(&p.unit_parts[unit].first_item), 0};
}

// Lanes [begin, end) of the unit are the part's.
struct LaneRange {
  int begin, end;
};
__device__ inline LaneRange range_of(const Part& part, int tile) {
  if (part.parts == 1) return {0, part.lanes};
  const unsigned parts = static_cast<unsigned>(part.parts), index = static_cast<unsigned>(part.index);
  const unsigned all = static_cast<unsigned>(max(0, part.lanes) + tile - 1) / tile, each = all / parts,
                 left = all - each * parts;
  const auto upto = [=](unsigned i) { return static_cast<int>(each * i + min(left, i)) * tile; };
  return {upto(index), min(part.lanes, upto(index + 1))};
}

}  // namespace sievemla::stage::attention
