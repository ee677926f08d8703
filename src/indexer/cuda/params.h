// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/params.h -- what the score kernels are told. Plain C++; strides and offsets are 64-bit, in bytes where
// the elements are bytes.
//
// A row's source says which keys it sees: its request with paged keys, its first key with contiguous ones.
#pragma once
#include <cstdint>

namespace sievemla::stage::indexer {

struct CudaScoreParams {
  const unsigned char* q;  // [rows, heads, 128] e4m3
  std::int64_t q_row, q_head;
  const float* weights;  // [rows, heads]
  std::int64_t weights_row;

  // Keys: page j / page_size of the source's table, or side by side (table null).
  const unsigned char* keys;
  std::int64_t page_bytes;  // contiguous: from key to key
  int page_size, page_shift, pages;  // page_shift: log2 of page_size, -1 where that is no integer
  const int* table;  // [requests, table_pages]
  std::int64_t table_row;
  int requests, table_pages;
  const float* scales;  // contiguous keys: [n]
  std::int64_t n;

  const int* source;  // [rows]: request or first key; null: row / rows_per_source with paged keys, else 0
  int rows_per_source;
  const int* lengths;  // [rows]
  int rows, heads;
  float* logits;  // [rows, width]
  std::int64_t logits_row;
  int width;
  bool fill;
};

}  // namespace sievemla::stage::indexer
