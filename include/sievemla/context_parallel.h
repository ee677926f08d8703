// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/context_parallel.h -- decode context parallel: ranks that hold parts of every context agree on one
// selection.
//
//   every rank:  index_scores ─► topk ─► topk_candidates ──┐   of the positions that it holds (Shard); or select
//   the caller:                              exchange  ◄───┘
//   every rank:  merge_topk ─► attention over its own slots ─► exchange of (out, lse) ─► combine
//
// What is among the k best of all is among the k best of its rank. So the merged selection is, ties too, the one of a
// rank that holds everything.
#pragma once
#include "sievemla/topk.h"

namespace sievemla {

// What a rank sends: the scores of its own selection, and its positions in the whole sequence. Both outputs are lane by
// lane; where a position has no column of `scores` (-1 has none), they are -inf and -1. Ascending positions stay so.
struct CandidatesArgs {
  TensorView scores;           // [rows, width] f32, as topk read it; width * ranks < 2^31
  TensorView starts;           // [rows] i32, optional: 0; as topk read it
  TensorView local;            // [rows, k] i32, as topk wrote it: positions on this rank
  Shard shard;                 // of this rank
  TensorView selected_scores;  // [rows, k] f32, out
  TensorView positions;        // [rows, k] i32, out; may be `local` itself
};
void topk_candidates(const Backend& backend, const CandidatesArgs& args, Stream stream = {});

// All ranks' candidates -> the selection among all positions, by the rules of topk.h.
struct MergeTopkArgs {
  TensorView scores;     // [ranks, rows, n] f32; rank and row stride free
  TensorView positions;  // [ranks, rows, n] i32, in the whole sequence: ascending, then -1; rank and row stride free
  TensorView lengths;    // [ranks, rows] i32, optional: n. Lanes at or past it are never used, whatever they hold.
  TensorView selected;   // [rows, k] i32, out, optional if slots is given: ascending, then -1
  TensorView slots;      // [rows, k] i32 or i64, out, optional: as shard_slots
  TensorView counts;     // [rows] i32, out, optional: as shard_slots
  SlotMap map;           // read with slots only
};
void merge_topk(const Backend& backend, const MergeTopkArgs& args, Workspace workspace, Stream stream = {});

struct MergeTopkBounds {
  std::int64_t ranks, rows, n, k;
};
std::int64_t merge_topk_workspace_bytes(const Backend& backend, const MergeTopkBounds& bounds);

// positions_to_slots without gaps: the slots of those positions that have one here (on this shard) come first, in the
// order of their lanes, then -1. `counts` is what attention takes for topk_length.
struct ShardSlotsArgs {
  TensorView positions;  // [rows, k] i32
  SlotMap map;
  TensorView slots;   // [rows, k] i32 or i64, out
  TensorView counts;  // [rows] i32, out, optional: slots of each row
};
void shard_slots(const Backend& backend, const ShardSlotsArgs& args, Stream stream = {});

}  // namespace sievemla
