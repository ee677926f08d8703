// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/params.h -- what the score kernels are told. Plain C++; strides are 64-bit, and in bytes where
// the elements are bytes.
//
// A row's source says which keys it sees: its request with paged keys, its first key with contiguous ones.
#pragma once
#include <cstdint>

#include "base/shortlist.h"
#include "cuda/latent.h"
#include "sievemla/indexer.h"

namespace sievemla::stage::indexer {

inline constexpr int kPositionBits = 26;  // of a score on its way; its row has the other six

struct CudaScoreParams {
  const unsigned char* q;  // [rows, heads, 128] e4m3
  std::int64_t q_row, q_head;
  const float* weights;  // [rows, heads]
  std::int64_t weights_row;

  // Keys: page j / page_size of the source's table, or side by side (table null).
  const unsigned char* keys;
  std::int64_t page_bytes;           // contiguous: from key to key
  int page_size, page_shift, pages;  // page_shift: log2 of page_size, -1 where that is no integer
  const int* table;                  // [requests, table_pages]
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

  int stride;                   // of groups of 16 keys: 1 all of them, 2 every other one, in columns side by side
  base::Shortlist* shortlists;  // [rows]: instead of logits
};

inline constexpr int kHeadWarps = 4;  // of a CTA, a key or a head each
inline constexpr int kLayerThreads = 192;

struct CudaRope {
  RopeStyle style;
  const void* positions;
  bool wide;
  std::int64_t positions_step;
  const void* cos_sin;
  bool f32;
  std::int64_t table_row, table_step, most;
};

// Strides in elements.
struct WriteKeysParams {
  cuda::SlotList at;
  cuda::Pages cache;
  bool fp8;  // else bf16
  ScaleRule rule;
  float floor;
  std::int64_t tokens;
  const void *k, *weight, *bias;
  bool k_f32, weight_f32, bias_f32;
  std::int64_t k_row, k_step, weight_step, bias_step;
  float eps;
  CudaRope rope;
  bool hadamard, round_bf16;
};
// `latent` and `keys` as the separate writers get them; keys.k null: none.
struct WriteLayerParams {
  cuda::LatentParams latent;
  std::int64_t tokens;
  const void* weight;
  bool weight_f32;
  std::int64_t weight_step;
  float eps;
  CudaRope rope;
  WriteKeysParams keys;
  int* indices;  // [index_rows, index_width]
  std::int64_t index_rows, index_row;
  int index_width;
};
struct QueryParams {
  std::int64_t tokens, heads;
  const void *q, *weights;
  bool q_f32, weights_f32;
  std::int64_t q_token, q_head, q_step, weights_token, weights_head;
  float weight_scale;
  CudaRope rope;
  bool hadamard, round_bf16;
  ScaleRule rule;
  float floor;
  bool fp8;  // else bf16
  void* out;
  std::int64_t out_token, out_head;
  float* out_weights;
  std::int64_t out_weights_token, out_weights_head;
  WriteKeysParams keys;  // k null: none
};

}  // namespace sievemla::stage::indexer
