// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/topk.h -- stage 2 of 4: exactly the k best positions of each row, and the cache slots they lie in.
//
//   indexer -> [topk] -> attention -> combine
//
// The selection is a pure function of the scores, on every backend, split count, batch and rank:
//   larger f32 first; -0 equals +0; ties go to the lowest position; NaN ranks equal to -inf, below every finite score;
//   exactly min(k, visible) ids, in ascending position, then -1. A length <= 0 (a padded speculative row) gives all -1.
// Equal score bits give equal ids, so tensor-parallel ranks agree.
#pragma once
#include "sievemla/backend.h"

namespace sievemla {

// Which positions of a sequence this decode-context-parallel rank holds: position p is on rank
// (p / interleave) % ranks, at local position p / (interleave * ranks) * interleave + p % interleave.
struct Shard {
  int rank = 0;
  int ranks = 1;
  int interleave = 1;
};

// position -> slot = block_table[request, p / page_size] * page_size + p % page_size, with p the shard-local position.
// -1 for a position < 0, on another rank, beyond the table's width, or on a table entry < 0; also for a slot that an i32
// output cannot hold, and in a row whose request is outside [0, requests).
struct SlotMap {
  TensorView block_table;  // [requests, max_pages] i32, row stride free
  TensorView row_request;  // [rows] i32, optional: rows are dealt evenly, request = t / (rows / requests)
  std::int64_t page_size = 0;
  Shard shard{};
};

struct TopkArgs {
  TensorView scores;     // [rows, width] f32, row stride free. Columns outside [start, start + length) are never read.
  TensorView starts;     // [rows] i32, optional: 0
  TensorView lengths;    // [rows] i32: visible scores; <= 0 none; start + length <= width
  TensorView positions;  // [rows, k] i32, out, relative to the row's start; optional if slots is given
  TensorView slots;      // [rows, k] i32 or i64, out, optional
  SlotMap map;           // read with slots only
};
void topk(const Backend& backend, const TopkArgs& args, Workspace workspace, Stream stream = {});

struct TopkBounds {
  std::int64_t rows, width, k;
};
std::int64_t topk_workspace_bytes(const Backend& backend, const TopkBounds& bounds);

// positions [rows, k] i32 -> slots [rows, k] i32 or i64, lane by lane.
void positions_to_slots(const Backend& backend, const TensorView& positions, const SlotMap& map,
                        const TensorView& slots, Stream stream = {});

// Pooled keys (GLM-5.3-Flash): pool p stands for positions p * kpool .. p * kpool + kpool - 1. Each selected pool that
// lies whole inside the row's length is expanded in place, any other id is dropped; then comes the visible tail that
// fills no pool. A -1 or dropped pool leaves no gap: ids first, -1 after.
struct ExpandPoolsArgs {
  TensorView pools;      // [rows, n] i32
  TensorView lengths;    // [rows] i32, in tokens
  int kpool = 0;         // tokens per pool, >= 1
  TensorView positions;  // [rows, >= n * kpool + kpool - 1] i32, out
};
void expand_pools(const Backend& backend, const ExpandPoolsArgs& args, Stream stream = {});

}  // namespace sievemla
