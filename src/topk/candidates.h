// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/candidates.h -- what host kernels do with one row of context_parallel.h: name a rank's candidates, list the
// candidates of all ranks, store slots without gaps.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "topk/rows.h"

namespace sievemla::stage::topk {

// Where a rank's position lies in the whole sequence: the inverse of SlotMap's formula.
inline std::int64_t whole_position(const Shard& shard, std::int64_t local) {
  const std::int64_t run = shard.interleave;
  return (local / run * shard.ranks + shard.rank) * run + local % run;
}

inline void candidates_row(const CandidatesArgs& args, std::int64_t t) {
  const std::int64_t start = args.starts ? base::load_int(args.starts, t) : 0, width = args.scores.dim(1);
  for (std::int64_t lane = 0; lane < args.local.dim(1); ++lane) {
    const std::int64_t local = base::load_int(args.local, t, lane), column = start + local;
    const bool given = local >= 0 && column >= 0 && column < width;
    *base::at<float>(args.selected_scores, t, lane) =
        given ? *base::at<float>(args.scores, t, column) : -std::numeric_limits<float>::infinity();
    base::store_int(args.positions, given ? whole_position(args.shard, local) : -1, t, lane);
  }
}

// Row t of one rank's candidates.
struct CandidateRow {
  CandidateRow(const MergeTopkArgs& args, std::int64_t rank, std::int64_t t)
      : scores(base::at<float>(args.scores, rank, t)), positions(base::at<std::int32_t>(args.positions, rank, t)) {
    const std::int64_t n = args.positions.dim(2), given = args.lengths ? base::load_int(args.lengths, rank, t) : n;
    const std::int32_t* end = positions + std::clamp<std::int64_t>(given, 0, n);
    count = std::find_if(positions, end, [](std::int32_t p) { return p < 0; }) - positions;
  }
  const float* scores;
  const std::int32_t* positions;
  std::int64_t count = 0;  // of candidates
};

// Stores row t's slots of position(0) ... position(k - 1).
template <class Position>
void store_slots_without_gaps(const SlotMap& map, const TensorView& slots, const TensorView& counts, std::int64_t t,
                              Position&& position) {
  const RowSlots slot_of(map, slots, t, slots.dim(0));
  const std::int64_t k = slots.dim(1);
  std::int64_t count = 0;
  for (std::int64_t lane = 0; lane < k; ++lane)
    if (const std::int64_t slot = slot_of(position(lane)); slot >= 0) base::store_int(slots, slot, t, count++);
  for (std::int64_t lane = count; lane < k; ++lane) base::store_int(slots, -1, t, lane);
  if (counts) base::store_int(counts, count, t);
}

inline void shard_slots_row(const ShardSlotsArgs& args, std::int64_t t) {
  store_slots_without_gaps(args.map, args.slots, args.counts, t,
                           [&](std::int64_t lane) { return base::load_int(args.positions, t, lane); });
}

// Stores row t of a merge: position(lane) is -1 past the last.
template <class Position>
void store_merged_row(const MergeTopkArgs& args, std::int64_t t, Position&& position) {
  if (args.selected)
    for (std::int64_t lane = 0; lane < args.selected.dim(1); ++lane)
      base::store_int(args.selected, position(lane), t, lane);
  if (args.slots) store_slots_without_gaps(args.map, args.slots, args.counts, t, position);
}

}  // namespace sievemla::stage::topk
