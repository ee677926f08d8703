// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/pipeline.cc -- where the stages meet.
//
//   write latent row ─┐
//   write index key ──┴─► index_queries ─► [ index_scores ─► topk ] by chunks of rows ─► attention
//
// Workspace: the stages run one after another and share its front; the scores of a chunk lie behind.
#include "sievemla/pipeline.h"

#include <algorithm>
#include <cstddef>

#include "api/checks.h"
#include "api/rules.h"
#include "sievemla/error.h"

namespace sievemla {
namespace {

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// Rows [begin, begin + n) of a tensor, if it is given.
TensorView rows_of(TensorView view, std::int64_t begin, std::int64_t n) {
  if (!view || !view.data) return view;
  view.data = static_cast<std::byte*>(view.data) + begin * view.step(0) * size_of(view.dtype);
  view.shape[0] = n;
  return view;
}

// ---- a selection, cut into chunks of rows -----------------------------------------------------------

struct Plan {
  std::int64_t stride;       // of a row of scores, in elements: rows start on 16 bytes
  std::int64_t chunk;        // most rows whose scores are kept at a time
  std::int64_t stage_bytes;  // the workspace's front
  std::int64_t bytes;        // all of it; grows with every bound
};

Plan plan_of(const Backend& backend, const SelectBounds& bounds) {
  expects(bounds.score_budget_bytes >= 0, "the score budget must not be negative", "select: score_budget_bytes",
          bounds.score_budget_bytes);
  const std::int64_t scoring = index_scores_workspace_bytes(backend, {bounds.rows, bounds.heads, bounds.width});
  const std::int64_t selecting = topk_workspace_bytes(backend, {bounds.rows, bounds.width, bounds.k});
  const std::int64_t stride = round_up(std::max<std::int64_t>(bounds.width, 1), 4);
  const std::int64_t row_bytes = stride * size_of(DType::f32), fit = bounds.score_budget_bytes / row_bytes;
  const std::int64_t stage_bytes = round_up(std::max(scoring, selecting), kWorkspaceAlign);
  return {
      stride, std::clamp<std::int64_t>(bounds.rows, 1, std::max<std::int64_t>(fit, 1)), stage_bytes,
      stage_bytes + (bounds.rows <= fit ? bounds.rows * row_bytes : std::max(bounds.score_budget_bytes, row_bytes))};
}

// The two calls of a chunk.
struct Calls {
  IndexScoreArgs score;
  TopkArgs topk;
};

// As if all rows were one chunk: what the stages' rules are asked about, and what chunks are cut from.
Calls all_rows(const SelectArgs& args, const Plan& plan, Workspace workspace) {
  Calls calls{args.score, {}};
  calls.score.logits = tensor(reinterpret_cast<float*>(static_cast<std::byte*>(workspace.data) + plan.stage_bytes),
                              {args.score.q.dim(0), args.width}, args.score.q.device);
  calls.score.logits.stride[0] = plan.stride;
  calls.score.fill = false;  // topk reads nothing at or past the length
  calls.topk = {calls.score.logits, {}, args.score.lengths, args.positions, args.slots, args.map};
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

Calls rows_of(Calls calls, std::int64_t begin, std::int64_t n, std::int64_t dealt) {
  auto& [score, topk] = calls;
  for (TensorView* view : {&score.q, &score.weights, &score.lengths, &score.contiguous.starts, &topk.lengths,
                           &topk.positions, &topk.slots})
    *view = rows_of(*view, begin, n);
  if (score.paged.cache.pages) cut_requests(score.paged, begin, n, dealt);
  if (topk.slots) cut_requests(topk.map, begin, n, dealt);
  score.logits.shape[0] = topk.scores.shape[0] = n;  // every chunk's scores lie in the same place
  return calls;
}

SelectBounds bounds_of(const SelectArgs& args) {
  const std::int64_t k = args.positions ? args.positions.dim(1) : args.slots.dim(1);
  return {args.score.q.dim(0), args.score.q.dim(1), args.width, k, args.score_budget_bytes};
}

// What select throws, before anything is written.
Plan admit(const Backend& backend, const SelectArgs& args, Workspace workspace) {
  expects(!args.score.logits, "logits must be absent: select keeps them in its workspace", "select: score.logits",
          api::describe(args.score.logits));
  const Plan plan = plan_of(backend, bounds_of(args));
  api::check_workspace(workspace, plan.bytes, "select: workspace");
  const Workspace front{workspace.data, plan.stage_bytes};
  const Calls calls = all_rows(args, plan, workspace);
  api::admit(backend, calls.score, front);
  api::admit(backend, calls.topk, front);
  rows_dealt(args);
  return plan;
}

// What sparse_layer throws, before anything is written.
void admit(const Backend& backend, const SparseLayerArgs& args, Workspace workspace) {
  api::admit(backend, args.latent);
  if (args.indexer) {
    api::admit(backend, args.indexer->keys);
    api::admit(backend, args.indexer->queries);
    admit(backend, args.indexer->select, workspace);
  }
  api::admit(backend, args.attention, workspace);
}

}  // namespace

void select(const Backend& backend, const SelectArgs& args, Workspace workspace, Stream stream) {
  const Plan plan = admit(backend, args, workspace);
  const auto [rows, heads, width, k, budget] = bounds_of(args);
  if (k == 0) return;
  const Workspace front{workspace.data, plan.stage_bytes};
  const Calls all = all_rows(args, plan, workspace);
  const std::int64_t dealt = rows_dealt(args);
  for (std::int64_t begin = 0, n; begin < rows; begin += n) {
    n = chunk_rows(begin, std::min(plan.chunk, rows - begin), dealt);
    const Calls chunk = rows_of(all, begin, n, dealt);
    index_scores(backend, chunk.score, front, stream);
    topk(backend, chunk.topk, front, stream);
  }
}

std::int64_t select_workspace_bytes(const Backend& backend, const SelectBounds& bounds) {
  return plan_of(backend, bounds).bytes;
}

void sparse_layer(const Backend& backend, const SparseLayerArgs& args, Workspace workspace, Stream stream) {
  admit(backend, args, workspace);
  write_latent(backend, args.latent, stream);
  if (args.indexer) {
    write_index_keys(backend, args.indexer->keys, stream);
    index_queries(backend, args.indexer->queries, stream);
    select(backend, args.indexer->select, workspace, stream);
  }
  attention(backend, args.attention, workspace, stream);
}

std::int64_t sparse_layer_workspace_bytes(const Backend& backend, const SparseLayerBounds& bounds) {
  return std::max(select_workspace_bytes(backend, bounds.select), attention_workspace_bytes(backend, bounds.attention));
}

}  // namespace sievemla
