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

struct PlanSmem {
  int warp[32];
  Part part;
};

__device__ inline int warp_sum(int x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Works out the plan from the lengths.
__device__ __noinline__ inline void find_uneven_part(const CudaParams& p, int item, bool by_unit, int tile,
                                                     PlanSmem& s) {
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread / 32, warps = threads / 32, lane = thread % 32;
  const auto tiles_of = [&](int unit) { return unit < p.units ? (lanes_of_unit(p, unit) + tile - 1) / tile : 0; };

  int tiles = 0;
#pragma unroll 1
  for (int unit = thread; unit < p.units; unit += threads) tiles += tiles_of(unit);
  tiles = warp_sum(tiles);
  if (lane == 0) s.warp[warp] = tiles;
  __syncthreads();
  tiles = 0;
  for (int w = 0; w < warps; ++w) tiles += s.warp[w];
  const int chunk = max(1, (tiles + p.target - 1) / p.target);  // tiles of a part
  __syncthreads();

  if (thread == 0) s.part.parts = 0;
  int before = 0;  // items of the units passed so far
#pragma unroll 1
  for (int first = 0; first < p.units; first += threads) {
    const int unit = first + thread;
    const int parts = unit < p.units ? max(1, (tiles_of(unit) + chunk - 1) / chunk) : 0;
    int upto = parts;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int left = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += left;
    }
    if (lane == 31) s.warp[warp] = upto;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) upto += s.warp[w];
      all += s.warp[w];
    }
    const int begin = before + upto - parts;
    const bool mine = by_unit ? unit == item : item >= begin && item < begin + parts;
    if (parts > 0 && mine) s.part = {unit, by_unit ? 0 : item - begin, parts, begin, lanes_of_unit(p, unit)};
    before += all;
    __syncthreads();
  }
}

// Finds item `item` (by_unit: the first item of unit `item`) and leaves it in s.part; past the last item parts is 0.
// All threads of the CTA call.
__device__ inline void find_part(const CudaParams& p, int item, bool by_unit, int tile, PlanSmem& s) {
  if (p.parts == 0) {
    find_uneven_part(p, item, by_unit, tile, s);
  } else if (threadIdx.x == 0) {
    const int unit = by_unit ? item : item / p.parts;
    s.part = {unit, by_unit ? 0 : item % p.parts, p.parts, unit * p.parts, lanes_of_unit(p, unit)};
  }
  __syncthreads();
}

// The same, for every thread; equal parts need no shared memory.
__device__ inline Part part_of_item(const CudaParams& p, int item, int tile, PlanSmem& s) {
  if (p.parts > 0) {
    const int unit = item / p.parts;
    return {unit, item - unit * p.parts, p.parts, unit * p.parts, lanes_of_unit(p, unit)};
  }
  find_part(p, item, false, tile, s);
  return s.part;
}

}  // namespace sievemla::stage::attention
