// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/merge.h -- merging ranks' selections by the backend's own topk.
//
//   order   the candidates of a row, laid out in ascending position: the order of ties is then topk's
//   topk    columns of that layout
//   pick    columns -> positions, and this shard's slots
//
// The layout takes a fixed budget; rows go through in chunks.
#pragma once
#include <cstdint>

#include "topk/candidates.h"

namespace sievemla::stage::topk {

// Rows [first, first + n) of a merge, in the workspace.
struct MergeChunk {
  std::int64_t first;
  TensorView scores;     // [n, ranks * lanes] f32
  TensorView positions;  // [n, ranks * lanes] i32
  TensorView lengths;    // [n] i32: candidates
  TensorView columns;    // [n, k] i32: the selected ones
  CandidateRow* heads;   // [threads, ranks], of the host
};

struct MergeSteps {
  void (*order)(const MergeTopkArgs& args, const MergeChunk& chunk, const base::Exec& exec);
  void (*pick)(const MergeTopkArgs& args, const MergeChunk& chunk, const base::Exec& exec);
};

void merge_by_topk(const MergeSteps& steps, const MergeTopkArgs& args, const base::Exec& exec);

inline MergeTopkBounds bounds_of(const MergeTopkArgs& args) {
  return {args.scores.dim(0), args.scores.dim(1), args.scores.dim(2),
          args.selected ? args.selected.dim(1) : args.slots.dim(1)};
}

}  // namespace sievemla::stage::topk
