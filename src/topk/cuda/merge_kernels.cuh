// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/merge_kernels.cuh -- context_parallel.h on CUDA: what a rank sends, all ranks' candidates in ascending
// position, and the selected positions with their slots.
#pragma once
#include "topk/cuda/ids.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/merge_params.h"

namespace sievemla::stage::topk {

template <class Arch>
__global__ void candidates_kernel(const __grid_constant__ CandidatesParams p) {
  const int row = static_cast<int>(blockIdx.x), start = p.starts ? p.starts[row] : 0;
  const float* scores = p.scores + row * p.scores_row;
  const int* local = p.local + row * p.local_row;
  float* to_scores = p.selected_scores + row * p.selected_scores_row;
  int* to_positions = p.positions + row * p.positions_row;
  for (int i = static_cast<int>(threadIdx.x); i < p.k; i += static_cast<int>(blockDim.x)) {
    const int at = local[i];
    const std::int64_t column = std::int64_t{start} + at;
    const bool given = at >= 0 && column >= 0 && column < p.width;
    to_scores[i] = given ? scores[column] : -INFINITY;
    to_positions[i] = given ? (at / p.interleave * p.ranks + p.rank) * p.interleave + at % p.interleave : -1;
  }
}

// ---- order: a thread a candidate ---------------------------------------------------------------------

inline constexpr int kSearches = 8;  // that a thread has under way

// How many of a rank's positions lie below `bound`, of up to kSearches ranks at once. A -1 lies above all.
struct RankRows {
  const OrderParams& p;
  const int row;  // of the merge

  __device__ const int* positions(int rank) const {
    return p.positions + rank * p.positions_rank + row * p.positions_row;
  }
  __device__ int length(int rank) const {
    return p.lengths ? min(max(p.lengths[rank * p.lengths_rank + row], 0), p.n) : p.n;
  }
  template <class Bound>
  __device__ int below(int first, Bound&& bound) const {
    int at[kSearches]{}, n[kSearches];
#pragma unroll
    for (int j = 0; j < kSearches; ++j) n[j] = first + j < p.ranks ? length(first + j) : 0;
    for (unsigned step = 1u << 31 >> __clz(p.n | 1); step > 0; step >>= 1) {
#pragma unroll
      for (int j = 0; j < kSearches; ++j) {
        const int next = at[j] + static_cast<int>(step);
        if (next <= n[j] && static_cast<unsigned>(positions(first + j)[next - 1]) < bound(first + j)) at[j] = next;
      }
    }
    int all = 0;
#pragma unroll
    for (int j = 0; j < kSearches; ++j) all += at[j];
    return all;
  }
};

// Its place is its own index and how many candidates of other ranks lie before it. Positions that two ranks name are
// two candidates, the lower rank's first.
template <class Arch>
__global__ void order_kernel(const __grid_constant__ OrderParams p) {
  const int pieces = pieces_of(p.n), piece = static_cast<int>(blockIdx.x) % pieces;
  const int rank = static_cast<int>(blockIdx.x) / pieces % p.ranks,
            row = static_cast<int>(blockIdx.x) / pieces / p.ranks;
  const RankRows rows{p, p.first + row};
  const int i = piece * kIdThreads + static_cast<int>(threadIdx.x);
  const int position = i < rows.length(rank) ? rows.positions(rank)[i] : -1;
  if (position >= 0) {
    int place = i;
    for (int first = 0; first < p.ranks; first += kSearches)
      place += rows.below(
          first, [&](int r) { return r == rank ? 0u : static_cast<unsigned>(position) + (r < rank ? 1u : 0u); });
    p.to_positions[row * p.to_row + place] = position;
    p.to_scores[row * p.to_row + place] = p.scores[rank * p.scores_rank + rows.row * p.scores_row + i];
  }
  if (rank > 0 || piece > 0 || threadIdx.x > 0) return;
  int all = 0;
  for (int first = 0; first < p.ranks; first += kSearches) all += rows.below(first, [](int) { return 1u << 31; });
  p.to_lengths[row] = all;
}

// ---- pick: a CTA a row -------------------------------------------------------------------------------

template <class Arch>
__global__ void pick_kernel(const __grid_constant__ PickParams p) {
  constexpr int kWarps = kIdThreads / 32;
  __shared__ int sums[2][kWarps];
  const int block = static_cast<int>(blockIdx.x), row = p.first + block;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const IdRow ids(p.out, row);
  const int* positions = p.positions + block * p.positions_row;
  const int* columns = p.columns ? p.columns + block * p.columns_row : nullptr;
  auto store = [&](int at, std::int64_t slot) {
    if (p.out.wide_slots) static_cast<std::int64_t*>(ids.slots)[at] = slot;
    else static_cast<int*>(ids.slots)[at] = static_cast<int>(slot);
  };
  int count = 0;
  for (int first = 0, turn = 0; first < p.k; first += kIdThreads, turn ^= 1) {
    const int i = first + thread;
    int position = -1;
    if (i < p.k) {
      const int from = columns ? columns[i] : i;
      if (from >= 0) position = positions[from];
      if (ids.positions) ids.positions[i] = position;
    }
    if (!ids.slots) continue;
    const std::int64_t slot = slot_of(p.out.map, ids.pages, position, p.out.wide_slots ? INT64_MAX : INT32_MAX);
    const unsigned good = __ballot_sync(~0u, slot >= 0);
    if (lane == 0) sums[turn][warp] = __popc(good);
    __syncthreads();
    int before = count + __popc(good & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int of_warp = sums[turn][w];
      before += w < warp ? of_warp : 0, count += of_warp;
    }
    if (slot >= 0) store(before, slot);
  }
  if (!ids.slots) return;
  for (int i = count + thread; i < p.k; i += kIdThreads) store(i, -1);
  if (p.counts && thread == 0) p.counts[row] = count;
}

}  // namespace sievemla::stage::topk
