// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/row_source.cuh -- where the main loop's rows come from: a slot list or a block table, seen as lanes.
#pragma once
#include "attention/cuda/params.h"

namespace sievemla::stage::attention {

// What lane `lane` of a unit names: a slot, or a physical page; any value outside the cache is a hole. Only lanes below
// the unit's length are asked for. The read is kept apart from what is made of it, so that it can run a tile ahead.
__device__ inline std::int64_t read_lane(const CudaParams& p, int unit, int lane) {
  if (p.indices) {
    const std::int64_t at = (unit / p.unit_tokens) * p.index_request + (unit % p.unit_tokens) * p.index_token +
                            lane * p.index_lane;
    return p.wide_indices ? static_cast<const std::int64_t*>(p.indices)[at] : static_cast<const int*>(p.indices)[at];
  }
  const int page = lane / p.table_page_size;
  return p.table[unit * p.table_request + page];
}

// Byte offset of the lane's row in the cache, -1 for a hole.
__device__ inline std::int64_t row_offset(const CudaParams& p, std::int64_t named, int lane) {
  const std::int64_t end = p.indices ? p.slots : p.pages;
  if (named < 0 || named >= end) {
    if (p.bad_index && named != -1) *p.bad_index = 1;
    return -1;
  }
  if (!p.indices) return named * p.page_bytes + (lane % p.table_page_size) * p.row_bytes;
  if (p.page_size == 1) return named * p.row_bytes;
  const std::int64_t page = p.slots <= 0x7FFFFFFF ? static_cast<unsigned>(named) / static_cast<unsigned>(p.page_size)
                                                  : named / p.page_size;
  return page * p.page_bytes + (named - page * p.page_size) * p.row_bytes;
}

// Lanes that query token `i` of the unit may see.
__device__ inline int lanes_of_token(const CudaParams& p, int unit, int i) {
  if (p.indices) {
    if (!p.topk_length) return p.lanes;
    return max(0, min(p.topk_length[static_cast<std::int64_t>(unit) * p.fold + i], p.lanes));
  }
  const std::int64_t rows = p.lengths[unit] - p.fold + 1 + i, held = static_cast<std::int64_t>(p.table_pages) * p.table_page_size;
  return static_cast<int>(max(std::int64_t{0}, min(min(rows, held), static_cast<std::int64_t>(p.lanes))));
}

// Lanes that any query token of the unit sees.
__device__ inline int lanes_of_unit(const CudaParams& p, int unit) {
  if (!p.indices || !p.topk_length) return lanes_of_token(p, unit, p.fold - 1);
  int most = 0;
  for (int i = 0; i < p.fold; ++i) most = max(most, lanes_of_token(p, unit, i));
  return most;
}

}  // namespace sievemla::stage::attention
