// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/select.cc -- scores and selection together, by chunks of rows in a fixed byte budget.
//
//   by scores      of a chunk of rows all scores are kept, then selected from
//   by shortlists  a threshold is guessed from a sample of the keys, the scores that reach it are kept, and selected
//                  from. Rows for which the guess was bad go by scores. A chunk has more rows, and few scores are
//                  written. On devices that have the kernels, where rows are long and many.
//
// Workspace: both stages share its front; the scores or shortlists of a chunk lie behind.
#include "sievemla/pipeline.h"

#include <algorithm>
#include <cstddef>

#include "api/checks.h"
#include "api/rules.h"
#include "base/scratch.h"
#include "base/shortlist.h"
#include "sievemla/error.h"

namespace sievemla {
namespace {

using base::round_up;

// Rows [begin, begin + n) of a tensor, if it is given.
TensorView rows_of(TensorView view, std::int64_t begin, std::int64_t n) {
  if (!view) return view;
  if (view.data) view.data = static_cast<std::byte*>(view.data) + begin * view.step(0) * size_of(view.dtype);
  view.shape[0] = n;
  return view;
}

// ---- a selection, cut into chunks of rows -----------------------------------------------------------

struct Plan {
  std::int64_t stride;       // of a row of scores, in elements: rows start on 16 bytes
  std::int64_t chunk;        // most rows whose scores are kept at a time
  std::int64_t shortlists;   // most rows whose shortlists are
  std::int64_t left;         // where the lengths of rows are kept that have none
  std::int64_t stage_bytes;  // the workspace's front
  std::int64_t bytes;        // all of it; grows with every bound
};

Plan plan_of(const Backend& backend, const SelectBounds& bounds) {
  api::check_bound(bounds.score_budget_bytes, api::kMostRows, "the score budget must be 0 to 2^40 bytes",
                   "select: score_budget_bytes");
  const std::int64_t scoring = index_scores_workspace_bytes(backend, {bounds.rows, bounds.heads, bounds.width});
  const std::int64_t selecting = topk_workspace_bytes(backend, {bounds.rows, bounds.width, bounds.k});
  const std::int64_t stride = round_up(std::max<std::int64_t>(bounds.width, 1), 4);
  const std::int64_t row_bytes = stride * size_of(DType::f32), fit = bounds.score_budget_bytes / row_bytes;
  const std::int64_t left = round_up(std::max(scoring, selecting), kWorkspaceAlign);
  const std::int64_t stage_bytes =
      left + (backend.kind() == BackendKind::cuda ? round_up(bounds.rows * size_of(DType::i32), kWorkspaceAlign) : 0);
  return {
      stride,
      std::clamp<std::int64_t>(bounds.rows, 1, std::max<std::int64_t>(fit, 1)),
      bounds.score_budget_bytes / static_cast<std::int64_t>(sizeof(base::Shortlist)),
      left,
      stage_bytes,
      stage_bytes + (bounds.rows <= fit ? bounds.rows * row_bytes : std::max(bounds.score_budget_bytes, row_bytes))};
}

// The calls of a chunk.
struct Calls {
  IndexScoreArgs score;
  TopkArgs topk;
  CandidatesArgs candidates;
};

// As if all rows were one chunk: what the stages' rules are asked about, and what chunks are cut from.
Calls all_rows(const SelectArgs& args, const Plan& plan, Workspace workspace) {
  Calls calls{args.score, {}, {}};
  calls.score.logits = tensor(reinterpret_cast<float*>(static_cast<std::byte*>(workspace.data) + plan.stage_bytes),
                              {args.score.q.dim(0), args.width}, args.score.q.device);
  calls.score.logits.stride[0] = plan.stride;
  calls.score.fill = false;  // topk reads nothing at or past the length
  calls.topk = {calls.score.logits, {}, args.score.lengths, args.positions, args.slots, args.map};
  calls.candidates = {calls.score.logits, {}, args.positions, args.shard, args.selected_scores, args.positions};
  return calls;
}

// Rows per request, where a block table deals its rows evenly; 0 where every row names its request or has none. A chunk
// that is whole requests, or part of one, deals its rows to the same requests as the whole call.
std::int64_t rows_dealt(const SelectArgs& args) {
  const bool by_keys = args.score.paged.cache.pages && !args.score.paged.row_request;
  const bool by_slots = args.slots && !args.map.row_request;
  const std::int64_t of_keys = args.score.paged.block_table.dim(0), of_slots = args.map.block_table.dim(0);
  expects(!by_keys || !by_slots || of_keys == of_slots, "keys and slots must be of the same requests", "select: map",
          of_slots, " requests of slots, ", of_keys, " of keys");
  const std::int64_t rows = args.score.q.dim(0);
  return rows == 0 ? 0 : by_keys ? rows / of_keys : by_slots ? rows / of_slots : 0;
}

std::int64_t chunk_rows(std::int64_t begin, std::int64_t most, std::int64_t dealt) {
  if (dealt == 0) return most;
  const std::int64_t left = dealt - begin % dealt;  // of the request that `begin` lies in
  return left == dealt && most >= dealt ? most / dealt * dealt : std::min(most, left);
}

template <class RequestMap>  // PagedKeys or SlotMap
void cut_requests(RequestMap& map, std::int64_t begin, std::int64_t n, std::int64_t dealt) {
  if (map.row_request) map.row_request = rows_of(map.row_request, begin, n);
  else map.block_table = rows_of(map.block_table, begin / dealt, std::max<std::int64_t>(n / dealt, 1));
}

// Chunks of rows [begin, end): f(the first, how many).
template <class F>
void each_chunk(std::int64_t begin, std::int64_t end, std::int64_t most, std::int64_t dealt, F&& f) {
  for (std::int64_t n; begin < end; begin += n) {
    n = chunk_rows(begin, std::min(most, end - begin), dealt);
    f(begin, n);
  }
}

Calls rows_of(Calls calls, std::int64_t begin, std::int64_t n, std::int64_t dealt) {
  auto& [score, topk, candidates] = calls;
  for (TensorView* view : {&score.q, &score.weights, &score.lengths, &score.contiguous.starts, &topk.lengths,
                           &topk.positions, &topk.slots, &candidates.selected_scores})
    *view = rows_of(*view, begin, n);
  if (score.paged.cache.pages) cut_requests(score.paged, begin, n, dealt);
  if (topk.slots) cut_requests(topk.map, begin, n, dealt);
  // Every chunk's scores lie in the same place.
  score.logits.shape[0] = topk.scores.shape[0] = candidates.scores.shape[0] = n;
  candidates.local = candidates.positions = topk.positions;
  return calls;
}

constexpr std::int64_t kLeastShortlists = 256;  // of a chunk: fewer are not worth it

SelectBounds bounds_of(const SelectArgs& args) {
  const std::int64_t k = args.positions ? args.positions.dim(1) : args.slots.dim(1);
  return {args.score.q.dim(0), args.score.q.dim(1), args.width, k, args.score_budget_bytes};
}

}  // namespace

api::Selection api::admit(const Backend& backend, const SelectArgs& args, Workspace workspace) {
  expects(!args.score.logits, "logits must be absent: select keeps them in its workspace", "select: score.logits",
          describe(args.score.logits));
  check_tensor(backend, args.score.q, {kAny, kAny, kIndexDim}, {DType::f32, DType::bf16, DType::u8}, "select: score.q");
  expects(args.positions || args.slots, "positions or slots must be given", "select", "neither");
  const Plan plan = plan_of(backend, bounds_of(args));
  check_workspace(workspace, plan.bytes, "select: workspace");
  const Workspace front{workspace.data, plan.stage_bytes};
  const Calls calls = all_rows(args, plan, workspace);
  rows_dealt(args);
  Selection kernels{admit(backend, calls.score, front), admit(backend, calls.topk, front),
                    args.selected_scores ? &admit(backend, calls.candidates) : nullptr, nullptr, nullptr};
  // What ranks exchange is read from all scores.
  if (!kernels.candidates && plan.chunk < args.score.q.dim(0) && plan.shortlists >= kLeastShortlists) {
    kernels.score_shortlist =
        base::first_serving(stage::indexer::index_shortlist_kernels(), backend, {calls.score, {}, {}});
    kernels.choose = base::first_serving(stage::topk::choose_kernels(), backend, {calls.topk, {}, {}, {}});
    if (!kernels.choose) kernels.score_shortlist = nullptr;
  }
  return kernels;
}

void api::run(const Backend& backend, const Selection& kernels, const SelectArgs& args, Workspace workspace,
              Stream stream) {
  const SelectBounds bounds = bounds_of(args);
  if (bounds.k == 0) return;
  const Plan plan = plan_of(backend, bounds);
  const base::Exec exec{backend, {workspace.data, plan.stage_bytes}, stream};
  const Calls all = all_rows(args, plan, workspace);
  const std::int64_t dealt = rows_dealt(args);
  if (!kernels.score_shortlist) {
    each_chunk(0, bounds.rows, plan.chunk, dealt, [&](std::int64_t begin, std::int64_t n) {
      const Calls chunk = rows_of(all, begin, n, dealt);
      kernels.scores.run(chunk.score, exec);
      kernels.topk.run(chunk.topk, exec);
      if (kernels.candidates) kernels.candidates->run(chunk.candidates, exec);
    });
    return;
  }
  using stage::topk::ShortlistStep;
  auto* const space = static_cast<std::byte*>(workspace.data);
  auto* const shortlists = reinterpret_cast<base::Shortlist*>(space + plan.stage_bytes);
  const TensorView left =
      tensor(reinterpret_cast<std::int32_t*>(space + plan.left), {bounds.rows}, args.score.q.device);
  each_chunk(0, bounds.rows, plan.shortlists, dealt, [&](std::int64_t first, std::int64_t rows) {
    const Calls chunk = rows_of(all, first, rows, dealt);
    const TensorView rest = rows_of(left, first, rows);
    kernels.score_shortlist->run({chunk.score, shortlists, true}, exec);
    kernels.choose->run({chunk.topk, ShortlistStep::guess, shortlists, rest}, exec);
    kernels.score_shortlist->run({chunk.score, shortlists, false}, exec);
    kernels.choose->run({chunk.topk, ShortlistStep::choose, shortlists, rest}, exec);
  });
  // Rows of which there is nothing left have length 0 here, and are not touched.
  each_chunk(0, bounds.rows, plan.chunk, dealt, [&](std::int64_t begin, std::int64_t n) {
    Calls chunk = rows_of(all, begin, n, dealt);
    chunk.score.lengths = chunk.topk.lengths = rows_of(left, begin, n);
    kernels.scores.run(chunk.score, exec);
    kernels.choose->run({chunk.topk, ShortlistStep::rest, nullptr, chunk.topk.lengths}, exec);
  });
}

void select(const Backend& backend, const SelectArgs& args, Workspace workspace, Stream stream) {
  api::run(backend, api::admit(backend, args, workspace), args, workspace, stream);
}

std::int64_t select_workspace_bytes(const Backend& backend, const SelectBounds& bounds) {
  return plan_of(backend, bounds).bytes;
}

}  // namespace sievemla
