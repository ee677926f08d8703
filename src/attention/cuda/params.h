// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/params.h -- what the attention kernels are told. Plain C++; strides and offsets are 64-bit.
//
// A unit is what shares a list of rows: a query token, or all `fold` query tokens of a request. Its heads are the
// fold * heads pairs (token of the unit, head), token-major. A lane is a place in the list: lane j of a slot list, row
// j of a request.
#pragma once
#include <cstdint>

namespace sievemla::stage::attention {

// n / divisor by a multiplication: exact for n * divisor < 2^64. "None" divides to 0 and leaves n as the remainder.
struct Divider {
  std::uint64_t factor = 0;  // ceil(2^64 / divisor)
  int divisor = 0;
};
constexpr Divider divider(int divisor) {
  return divisor <= 1 ? Divider{0, divisor}
                      : Divider{~std::uint64_t{0} / static_cast<std::uint64_t>(divisor) + 1, divisor};
}

// Who adds up the parts of a unit: the last CTA to arrive, a kernel of its own, or the parts together: as a cluster, or
// through memory.
enum class Merge { last, kernel, cluster, together };

// A call is one launch, or two of the same kernel that run side by side, each with units of its own.
//   first:  lets the second start when it may itself, so that the second need not wait for what lies ahead of both
//   second: waits for the first in its end, so that who waits for the second alone finds what both have written
enum class Launch { alone, first, second };

// Of a unit: its first item, and how many.
struct UnitParts {
  int first_item, parts;
};

struct CudaParams {
  // q: row (token, head) at q + token * q_token + head * q_head, in elements; the rope part has a place of its own.
  const void* q;
  const void* q_rope;
  std::int64_t q_token, q_head, q_rope_token, q_rope_head;

  // cache
  const unsigned char* rows;
  std::int64_t page_bytes, row_bytes, slots;
  bool read_once;  // most rows that are read are read once: they need not stay in L2
  Divider
      page;  // by the page size; none where pages follow each other without a gap: row_bytes alone then places a slot

  // slot list (indices not null): lane j of unit u at (u / unit_tokens) * request + (u % unit_tokens) * token + j *
  // lane, in elements
  const void* indices;
  bool wide_indices;  // i64
  std::int64_t index_request, index_token, index_lane;
  int unit_tokens;
  const int* topk_length;  // [tokens] or null
  // block table (indices null)
  const int* table;
  std::int64_t table_request, pages;
  int table_pages;
  Divider table_page;  // by the page size, always
  const int* lengths;  // [units]

  Launch launch;
  int first_unit;  // of this launch, whose items and tickets count from there
  int units, fold, heads;
  int lanes;          // the most a unit has
  float scale_log2;   // softmax scale * log2(e)
  float slack;        // log2: what a score may exceed its reference by before O is made relative to another
  float heavy;        // 1 / the part of the sum so far from which on a weight goes through V twice. Not 0
  const float* sink;  // [heads] or null
  void* out;
  bool out_f32;
  std::int64_t out_token, out_head;
  float* lse;  // or null
  std::int64_t lse_token, lse_head;

  // How a unit's lanes are cut into parts. Equal parts: `parts` of them, whatever the unit's length. Else (parts = 0)
  // each CTA works out the plan from the lengths: parts as long as spreads all units' tiles over `target` CTAs.
  int parts, target;
  Merge merge;
  // [items][head groups][heads of a group][512], normalised; items are the parts of all units in order. Of 64 heads of
  // fp8 rows that merge together, HalfPartials instead (merge.cuh).
  float* partial;
  UnitParts* unit_parts;  // [units]: what the CTAs found, for merge_kernel; of unequal parts only
  float* partial_log2;    // [items][head groups][heads of a group]: log2 of the sum of exp; -inf: nothing, and no row
  unsigned* tickets;      // [units][head groups]
  int* bad_index;         // debug: set to 1 by a slot outside the cache other than -1; null = not checked
};

}  // namespace sievemla::stage::attention
