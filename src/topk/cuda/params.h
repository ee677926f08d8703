// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/params.h -- what the top-k kernels are told. Plain C++; strides and offsets are 64-bit.
#pragma once
#include <cstdint>

#include "base/shortlist.h"

namespace sievemla::stage::topk {

inline constexpr int kListEntries = 8192;  // a row up to here is its own list

// SlotMap on the device.
struct CudaSlotMap {
  const int* table;        // [requests, pages]
  std::int64_t table_row;  // in elements
  int requests, pages;
  const int* row_request;  // [rows], or null: request = row / rows_per_request
  int rows_per_request;
  int page_size;  // at most 2^31 - 1
  int rank, ranks, interleave;
};

// One id per place of [rows, width]: its position, its slot, or both.
struct CudaIds {
  int* positions;  // or null
  std::int64_t positions_row;
  void* slots;  // i32 or i64, or null
  std::int64_t slots_row;
  bool wide_slots;
  CudaSlotMap map;
};

using ListEntry = base::Shortlisted;

struct CudaParams {
  const float* scores;
  std::int64_t scores_row, width;
  const int* starts;   // [rows] or null
  const int* lengths;  // [rows]
  int rows, k;
  int ahead;  // short rows: so many rows ahead are brought into L2
  CudaIds out;

  int parts;          // CTAs that share a long row
  unsigned* tickets;  // [rows], with parts > 1
  int* counts;        // [rows][parts]
  ListEntry* lists;   // [rows][parts][entries of a list]

  base::Shortlist* shortlists;  // [rows]: instead of scores
  int stride;                   // of the sample they come from
  int* left;                    // [rows]: the length of a row whose shortlist is too short or too long, else 0
  bool skip_empty;              // nothing is stored for rows of no length
};

struct PoolParams {
  const int* pools;  // [rows, n]
  std::int64_t pools_row;
  int n;
  const int* lengths;  // [rows]
  int kpool;
  int* positions;  // [rows, width]
  std::int64_t positions_row, width;
};

}  // namespace sievemla::stage::topk
