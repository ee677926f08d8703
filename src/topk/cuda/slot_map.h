// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/slot_map.h -- a call's outputs as the kernels take them. Plain C++.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/layout.h"
#include "topk/cuda/params.h"
#include "topk/registry.h"

namespace sievemla::stage::topk {

using cuda::kMost;

inline base::Lack lacks_map(const SlotMap& map) {
  if (map.page_size > kMost) return "a page must hold at most 2^30 tokens";
  if (map.shard.ranks > kMost || map.shard.interleave > kMost / std::max(map.shard.ranks, 1))
    return "ranks * interleave must be at most 2^30";
  if (map.block_table.dim(0) > kMost) return "there must be at most 2^30 requests";
  const base::Lack table = cuda::spread(map.block_table, "the block table");
  return table.empty() ? cuda::spread(map.row_request, "row_request") : table;
}

inline CudaIds ids_of(const TensorView& positions, const TensorView& slots, const SlotMap& map, std::int64_t rows) {
  CudaIds out{};
  if (positions) out.positions = static_cast<int*>(positions.data), out.positions_row = positions.step(0);
  if (!slots) return out;
  out.slots = slots.data, out.slots_row = slots.step(0), out.wide_slots = slots.dtype == DType::i64;
  const std::int64_t requests = map.block_table.dim(0);
  out.map.table = static_cast<const int*>(map.block_table.data), out.map.table_row = map.block_table.step(0);
  out.map.requests = static_cast<int>(requests);
  out.map.pages = static_cast<int>(std::min<std::int64_t>(map.block_table.dim(1), INT32_MAX));
  if (map.row_request) out.map.row_request = static_cast<const int*>(map.row_request.data);
  out.map.rows_per_request = static_cast<int>(requests > 0 ? std::max<std::int64_t>(rows / requests, 1) : 1);
  out.map.page_size = static_cast<int>(map.page_size);
  out.map.rank = map.shard.rank, out.map.ranks = map.shard.ranks, out.map.interleave = map.shard.interleave;
  return out;
}

}  // namespace sievemla::stage::topk
