// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/merge_reference.cc -- context_parallel.h as its definitions: a merge sorts all candidates of a row, best
// first, and keeps the first k.
#include <algorithm>

#include "topk/merge.h"

namespace sievemla::stage::topk {
void topk_candidates_reference(const CandidatesArgs& args, const base::Exec&) {
  for (std::int64_t t = 0; t < args.local.dim(0); ++t) candidates_row(args, t);
}

void merge_topk_reference(const MergeTopkArgs& args, const base::Exec& exec) {
  auto* const all = static_cast<Candidate*>(exec.workspace.data);
  for (std::int64_t t = 0; t < args.scores.dim(1); ++t) {
    Candidate* end = all;
    for (std::int64_t rank = 0; rank < args.scores.dim(0); ++rank) {
      const CandidateRow row(args, rank, t);
      for (std::int64_t i = 0; i < row.count; ++i) *end++ = {row.scores[i], row.positions[i]};
    }
    Candidate* const kept = all + std::min(bounds_of(args).k, end - all);
    std::partial_sort(all, kept, end, better);
    std::sort(all, kept, [](const Candidate& a, const Candidate& b) { return a.position < b.position; });
    store_merged_row(args, t, [&](std::int64_t lane) { return lane < kept - all ? all[lane].position : -1; });
  }
}

std::int64_t merge_topk_reference_bytes(const Backend&, const MergeTopkBounds& bounds) {
  return bounds.rows > 0 && bounds.k > 0 ? bounds.ranks * bounds.n * static_cast<std::int64_t>(sizeof(Candidate)) : 0;
}

void shard_slots_reference(const ShardSlotsArgs& args, const base::Exec&) {
  for (std::int64_t t = 0; t < args.positions.dim(0); ++t) shard_slots_row(args, t);
}

}  // namespace sievemla::stage::topk
