// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/reference.cc -- stage 2 as its definition: sort the visible positions, keep the first k.
#include <algorithm>

#include "topk/rows.h"

namespace sievemla::stage::topk {

void select_reference(const TopkArgs& args, const base::Exec& exec) {
  auto* ids = static_cast<std::int32_t*>(exec.workspace.data);
  for (std::int64_t t = 0; t < args.scores.dim(0); ++t) {
    const std::span<const float> scores = visible_scores(args, t);
    auto candidate = [&](std::int32_t p) { return Candidate{scores[static_cast<std::size_t>(p)], p}; };
    auto better = [&](std::int32_t a, std::int32_t b) { return stage::topk::better(candidate(a), candidate(b)); };
    const std::int64_t n = static_cast<std::int64_t>(scores.size()), k = std::min(width_of_outputs(args), n);
    for (std::int32_t p = 0; p < n; ++p) ids[p] = p;
    std::partial_sort(ids, ids + k, ids + n, better);
    std::sort(ids, ids + k);
    store_row(args, t, {ids, static_cast<std::size_t>(k)});
  }
}

std::int64_t select_reference_workspace_bytes(const Backend&, const TopkBounds& bounds) {
  return bounds.rows > 0 && bounds.k > 0 ? bounds.width * static_cast<std::int64_t>(sizeof(std::int32_t)) : 0;
}

void positions_to_slots_reference(const PositionsToSlotsArgs& args, const base::Exec&) {
  for (std::int64_t t = 0; t < args.positions.dim(0); ++t) positions_to_slots_row(args, t);
}

void expand_pools_reference(const ExpandPoolsArgs& args, const base::Exec&) {
  for (std::int64_t t = 0; t < args.pools.dim(0); ++t) expand_pools_row(args, t);
}

}  // namespace sievemla::stage::topk
