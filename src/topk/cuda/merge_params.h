// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/merge_params.h -- what the kernels of context_parallel.h are told. Plain C++; strides are 64-bit.
#pragma once
#include <cstdint>

#include "topk/cuda/params.h"

namespace sievemla::stage::topk {

inline constexpr int kIdThreads = 256;  // of all kernels but top-k's own

struct CandidatesParams {
  const float* scores;
  std::int64_t scores_row;
  int width;
  const int* starts;  // [rows] or null
  const int* local;
  std::int64_t local_row;
  int k;
  int rank, ranks, interleave;
  float* selected_scores;
  std::int64_t selected_scores_row;
  int* positions;
  std::int64_t positions_row;
};

// Of rows [first, first + rows) of a merge.
struct OrderParams {
  int first, ranks, n;
  const float* scores;  // [ranks, rows, n]
  std::int64_t scores_rank, scores_row;
  const int* positions;  // [ranks, rows, n]
  std::int64_t positions_rank, positions_row;
  const int* lengths;  // [ranks, rows] or null
  std::int64_t lengths_rank;
  float* to_scores;  // [rows, ranks * n]
  int* to_positions;
  std::int64_t to_row;
  int* to_lengths;  // [rows]
};

// CTAs of kIdThreads for n candidates; one that only counts them, where there are none.
constexpr int pieces_of(int n) { return n > 0 ? (n - 1) / kIdThreads + 1 : 1; }

// Positions of rows [first, first + rows), and their slots without gaps.
struct PickParams {
  int first, k;
  const int* columns;  // [rows, k] of `positions`; null: positions are taken lane by lane
  std::int64_t columns_row;
  const int* positions;
  std::int64_t positions_row;
  CudaIds out;
  int* counts;  // or null
};

}  // namespace sievemla::stage::topk
