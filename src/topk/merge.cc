// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/merge.cc -- a merge in chunks of rows. Workspace: topk's own front, then what MergeChunk says.
#include "topk/merge.h"

#include <algorithm>
#include <cstddef>

#include "base/scratch.h"

namespace sievemla::stage::topk {
namespace {

constexpr std::int64_t kBudget = std::int64_t{64} << 20;  // bytes of candidates and columns at a time
constexpr std::int64_t kElement = 4;                      // bytes of each of them

using base::round_up;

struct Plan {
  Plan(const Backend& backend, const MergeTopkBounds& bounds)
      : width(round_up(bounds.ranks * bounds.n, 4)), lanes(round_up(bounds.k, 4)) {
    const std::int64_t row_bytes = std::max((2 * width + lanes) * kElement, kElement), fit = kBudget / row_bytes;
    chunk = std::clamp<std::int64_t>(bounds.rows, 1, std::max<std::int64_t>(fit, 1));
    front = round_up(base::workspace_bytes(topk_kernels(), backend, {bounds.rows, bounds.ranks * bounds.n, bounds.k}),
                     kWorkspaceAlign);
    base::Scratch scratch;
    scratch.take<CandidateRow>(backend.threads() * bounds.ranks);
    scratch.take<std::int32_t>(bounds.rows);
    small = scratch.bytes();
    bytes = front + small + (bounds.rows <= fit ? bounds.rows * row_bytes : std::max(kBudget, row_bytes));
  }
  std::int64_t width, lanes;  // strides of a row of candidates, and of columns: rows start on 16 bytes
  std::int64_t chunk = 0;     // most rows at a time
  std::int64_t front = 0;     // topk's
  std::int64_t small = 0;     // heads and lengths
  std::int64_t bytes = 0;     // all of it; grows with every bound
};

template <class T>
TensorView rows_at(T* data, std::int64_t rows, std::int64_t width, std::int64_t stride, Device device) {
  TensorView view = tensor(data, {rows, width}, device);
  view.stride[0] = stride;
  return view;
}

}  // namespace

void merge_by_topk(const MergeSteps& steps, const MergeTopkArgs& args, const base::Exec& exec) {
  const MergeTopkBounds bounds = bounds_of(args);
  const Plan plan(exec.backend, bounds);
  const Device device = exec.backend.device();
  auto* const space = static_cast<std::byte*>(exec.workspace.data) + plan.front;
  base::Scratch scratch(space);
  MergeChunk chunk{};
  chunk.heads = scratch.take<CandidateRow>(exec.backend.threads() * bounds.ranks);
  auto* const lengths = scratch.take<std::int32_t>(bounds.rows);
  auto* const scores = reinterpret_cast<float*>(space + plan.small);
  auto* const positions = reinterpret_cast<std::int32_t*>(scores + plan.chunk * plan.width);
  auto* const columns = positions + plan.chunk * plan.width;
  const base::Exec select{exec.backend, {exec.workspace.data, plan.front}, exec.stream};
  for (std::int64_t n; chunk.first < bounds.rows; chunk.first += n) {
    n = std::min(plan.chunk, bounds.rows - chunk.first);
    chunk.scores = rows_at(scores, n, bounds.ranks * bounds.n, plan.width, device);
    chunk.positions = rows_at(positions, n, bounds.ranks * bounds.n, plan.width, device);
    chunk.lengths = tensor(lengths, {n}, device);
    chunk.columns = rows_at(columns, n, bounds.k, plan.lanes, device);
    const TopkArgs topk{chunk.scores, {}, chunk.lengths, chunk.columns, {}, {}};
    steps.order(args, chunk, exec);
    base::pick(topk_kernels(), exec.backend, topk, "merge_topk").run(topk, select);
    steps.pick(args, chunk, exec);
  }
}

std::int64_t merge_topk_bytes(const Backend& backend, const MergeTopkBounds& bounds) {
  return bounds.rows > 0 && bounds.k > 0 ? Plan(backend, bounds).bytes : 0;
}

}  // namespace sievemla::stage::topk
