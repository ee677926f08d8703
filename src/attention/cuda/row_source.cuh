// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/row_source.cuh -- where the main loop's rows come from: a slot list or a block table, seen as
// lanes.
#pragma once
#include <climits>

#include "attention/cuda/params.h"
#include "cuda/ptx/ptx.cuh"

namespace sievemla::stage::attention {

// A page size of 1 has no factor: n / 1 = n.
__device__ inline std::int64_t quotient(std::int64_t n, Divider by) {
  return by.divisor == 1 ? n : static_cast<std::int64_t>(__umul64hi(static_cast<std::uint64_t>(n), by.factor));
}

// The list of a unit: its slots, or its row of the block table.
__device__ inline const void* list_of(const CudaParams& p, int unit) {
  if (!p.indices) return p.table + unit * p.table_request;
  const int request = p.unit_tokens == 1 ? unit : unit / p.unit_tokens, token = unit - request * p.unit_tokens;
  const std::int64_t at = request * p.index_request + token * p.index_token;
  return static_cast<const char*>(p.indices) + at * (p.wide_indices ? 8 : 4);
}

// What lane `lane` of a list names: a slot, or a physical page; any value outside the cache is a hole. Only lanes below
// the unit's length are asked for. The read is kept apart from what is made of it, so that it can run tiles ahead.
__device__ inline const void* lane_in_list(const CudaParams& p, const void* list, int lane) {
  const std::int64_t at = p.indices ? lane * p.index_lane : quotient(lane, p.table_page);
  return static_cast<const char*>(list) + at * (p.indices && p.wide_indices ? 8 : 4);
}
__device__ inline std::int64_t fetched_lane(const CudaParams& p, const void* from) {
  return p.indices && p.wide_indices ? *static_cast<const std::int64_t*>(from) : *static_cast<const int*>(from);
}
__device__ inline std::int64_t read_lane(const CudaParams& p, const void* list, int lane) {
  return fetched_lane(p, lane_in_list(p, list, lane));
}
// The same by cp.async, into eight bytes from which fetched_lane takes it.
__device__ inline void fetch_lane(const CudaParams& p, const void* list, int lane, std::uint32_t s_to) {
  const auto* from = static_cast<const char*>(lane_in_list(p, list, lane));
  cuda::cp_async_4(s_to, from, 4);
  if (p.indices && p.wide_indices) cuda::cp_async_4(s_to + 4, from + 4, 4);
}

// The same, read ahead: nothing but `of` waits for it.
struct Name {
  std::uint32_t low = ~0u, high = ~0u;  // -1

  __device__ void read(const CudaParams& p, const void* list, int lane, bool there) {
    const std::int64_t at = p.indices ? lane * p.index_lane : quotient(lane, p.table_page);
    asm volatile(
        "{\n.reg .pred wide, narrow;\nsetp.ne.s32 wide, %3, 0;\nsetp.eq.s32 narrow, %3, 0;\n"
        "setp.ne.and.s32 wide, %4, 0, wide;\nsetp.ne.and.s32 narrow, %4, 0, narrow;\n"
        "@wide ld.global.v2.u32 {%0, %1}, [%2];\n@narrow ld.global.u32 %0, [%2];\n}"
        : "+r"(low), "+r"(high)
        : "l"(static_cast<const char*>(list) + at * (p.wide_indices ? 8 : 4)), "r"(static_cast<int>(p.wide_indices)),
          "r"(static_cast<int>(there)));
  }
  __device__ std::int64_t of(const CudaParams& p) const {
    return p.wide_indices ? static_cast<std::int64_t>(std::uint64_t{high} << 32 | low)
                          : static_cast<std::int64_t>(static_cast<int>(low));
  }
};

// Byte offset of the lane's row in the cache, -1 for a hole.
__device__ inline std::int64_t row_offset(const CudaParams& p, std::int64_t named, int lane) {
  const bool slot = p.indices != nullptr;
  if (named < 0 || named >= (slot ? p.slots : p.pages)) {
    if (p.bad_index && named != -1) *p.bad_index = 1;
    return -1;
  }
  const std::int64_t n = slot ? named : lane, whole = quotient(n, slot ? p.page : p.table_page);
  return (slot ? whole : named) * p.page_bytes + (n - whole * (slot ? p.page : p.table_page).divisor) * p.row_bytes;
}

// Lanes that query token `i` of the unit may see.
__device__ inline int lanes_of_token(const CudaParams& p, int unit, int i) {
  if (p.indices) {
    if (!p.topk_length) return p.lanes;
    return max(0, min(p.topk_length[static_cast<std::int64_t>(unit) * p.fold + i], p.lanes));
  }
  const std::int64_t held = static_cast<std::int64_t>(p.table_pages) * p.table_page.divisor;
  const int most = static_cast<int>(min(held, static_cast<std::int64_t>(p.lanes)));
  return max(0, min(p.lengths[unit] - (p.fold - 1 - i), most));
}

// Lanes that any query token of the unit sees.
__device__ inline int lanes_of_unit(const CudaParams& p, int unit) {
  int most = lanes_of_token(p, unit, p.fold - 1);  // of a block table that is all
  if (p.indices && p.topk_length) {
#pragma unroll 1
    for (int i = 0; i < p.fold - 1; ++i) most = max(most, lanes_of_token(p, unit, i));
  }
  return most;
}

// Lanes that every query token of the unit sees, where tokens differ in what they see.
__device__ inline int lanes_of_all(const CudaParams& p, int unit) {
  if (p.fold == 1 || (p.indices && !p.topk_length)) return INT_MAX;
  int least = lanes_of_token(p, unit, 0);  // of a block table that is all
  if (p.indices) {
#pragma unroll 1
    for (int i = 1; i < p.fold; ++i) least = min(least, lanes_of_token(p, unit, i));
  }
  return least;
}

}  // namespace sievemla::stage::attention
