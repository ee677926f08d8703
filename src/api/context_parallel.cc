// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/context_parallel.cc -- the public functions of context_parallel.h: check, pick, run.
#include "sievemla/context_parallel.h"

#include <algorithm>
#include <limits>

#include "api/checks.h"
#include "api/rules.h"
#include "base/view.h"
#include "topk/merge.h"

namespace sievemla {
namespace {

constexpr std::int64_t kMostPositions = std::numeric_limits<std::int32_t>::max();  // positions are i32

// On a host backend: every row of candidates ascends up to its first -1.
void check_ascending(const Backend& backend, const MergeTopkArgs& args) {
  if (!api::on_host(backend)) return;
  for (std::int64_t rank = 0; rank < args.scores.dim(0); ++rank)
    for (std::int64_t t = 0; t < args.scores.dim(1); ++t) {
      std::int64_t before = -1, n = args.positions.dim(2);
      if (args.lengths) n = std::min(n, base::load_int(args.lengths, rank, t));
      for (std::int64_t lane = 0; lane < n; ++lane) {
        const std::int64_t position = base::load_int(args.positions, rank, t, lane);
        if (position < 0) break;
        expects(position > before, "a rank's positions must ascend", "merge_topk: positions", before, " before ",
                position, " in row ", t, " of rank ", rank);
        before = position;
      }
    }
}

void check_slots(const Backend& backend, const TensorView& slots, const TensorView& counts, const SlotMap& map,
                 std::int64_t rows, std::int64_t k, const Where& where) {
  api::check_output(backend, slots, {rows, k}, {DType::i32, DType::i64}, where + "slots");
  if (counts) api::check_output(backend, counts, {rows}, {DType::i32}, where + "counts");
  api::check_slot_map(backend, map, rows, where + "map");
}

}  // namespace

const stage::topk::CandidatesKernel& api::admit(const Backend& backend, const CandidatesArgs& args) {
  const Where where = "topk_candidates: ";
  check_tensor(backend, args.scores, {kAny, kAny}, {DType::f32}, where + "scores");
  check_contiguous_rows(args.scores, where + "scores");
  check_tensor(backend, args.local, {args.scores.dim(0), kAny}, {DType::i32}, where + "local");
  const std::int64_t rows = args.local.dim(0), k = args.local.dim(1);
  if (args.starts) check_tensor(backend, args.starts, {rows}, {DType::i32}, where + "starts");
  check_output(backend, args.selected_scores, {rows, k}, {DType::f32}, where + "selected_scores");
  check_output(backend, args.positions, {rows, k}, {DType::i32}, where + "positions");
  check_shard(args.shard, where + "shard");
  // The last position: of a whole turn of the ranks behind the width.
  expects(args.scores.dim(1) / args.shard.interleave < kMostPositions / args.shard.ranks / args.shard.interleave,
          "positions of the whole sequence must fit 32 bits", where + "scores", "width ", args.scores.dim(1),
          ", ranks ", args.shard.ranks, ", interleave ", args.shard.interleave);
  return base::pick(stage::topk::topk_candidates_kernels(), backend, args, "topk_candidates");
}

void topk_candidates(const Backend& backend, const CandidatesArgs& args, Stream stream) {
  const auto& kernel = api::admit(backend, args);
  if (args.local.dim(0) > 0 && args.local.dim(1) > 0) kernel.run(args, {backend, {}, stream});
}

void merge_topk(const Backend& backend, const MergeTopkArgs& args, Workspace workspace, Stream stream) {
  const Where where = "merge_topk: ";
  constexpr auto kAny = api::kAny;
  api::check_tensor(backend, args.scores, {kAny, kAny, kAny}, {DType::f32}, where + "scores");
  api::check_contiguous_rows(args.scores, where + "scores");
  const std::int64_t ranks = args.scores.dim(0), rows = args.scores.dim(1), n = args.scores.dim(2);
  expects(ranks >= 1, "there must be at least 1 rank", where + "scores", ranks);
  api::check_tensor(backend, args.positions, {ranks, rows, n}, {DType::i32}, where + "positions");
  api::check_contiguous_rows(args.positions, where + "positions");
  if (args.lengths) api::check_tensor(backend, args.lengths, {ranks, rows}, {DType::i32}, where + "lengths");
  expects(args.selected || args.slots, "selected or slots must be given", "merge_topk", "neither");
  expects(args.slots || !args.counts, "counts go with slots", where + "slots", "none");
  const MergeTopkBounds bounds = stage::topk::bounds_of(args);
  if (args.selected) api::check_output(backend, args.selected, {rows, bounds.k}, {DType::i32}, where + "selected");
  if (args.slots) check_slots(backend, args.slots, args.counts, args.map, rows, bounds.k, where);
  const std::int64_t needed = merge_topk_workspace_bytes(backend, bounds);
  check_ascending(backend, args);
  const auto& kernel = base::pick(stage::topk::merge_topk_kernels(), backend, args, "merge_topk");
  api::check_workspace(workspace, needed, where + "workspace");
  if (rows > 0 && bounds.k > 0) kernel.run(args, {backend, workspace, stream});
}

std::int64_t merge_topk_workspace_bytes(const Backend& backend, const MergeTopkBounds& bounds) {
  const Where where = "merge_topk_workspace_bytes: ";
  api::check_bound(bounds.ranks, kMostPositions, "ranks must fit 32 bits", where + "ranks");
  api::check_bound(bounds.rows, api::kMostRows, "rows must be 0 to 2^40", where + "rows");
  api::check_bound(bounds.n, kMostPositions, "n must fit 32 bits", where + "n");
  api::check_bound(bounds.k, api::kMostRows, "k must be 0 to 2^40", where + "k");
  expects(bounds.ranks * bounds.n <= kMostPositions, "a row's candidates must fit 32 bits", where + "n",
          bounds.ranks * bounds.n);
  return base::workspace_bytes(stage::topk::merge_topk_kernels(), backend, bounds);
}

void shard_slots(const Backend& backend, const ShardSlotsArgs& args, Stream stream) {
  const Where where = "shard_slots: ";
  api::check_tensor(backend, args.positions, {api::kAny, api::kAny}, {DType::i32}, where + "positions");
  const std::int64_t rows = args.positions.dim(0), k = args.positions.dim(1);
  check_slots(backend, args.slots, args.counts, args.map, rows, k, where);
  const auto& kernel = base::pick(stage::topk::shard_slots_kernels(), backend, args, "shard_slots");
  if (rows > 0 && (k > 0 || args.counts)) kernel.run(args, {backend, {}, stream});
}

}  // namespace sievemla
