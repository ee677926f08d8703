// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/topk.cc -- the public functions of topk.h: check, pick, run.
#include "sievemla/topk.h"

#include <cstdint>
#include <limits>

#include "api/checks.h"
#include "api/rules.h"
#include "base/view.h"
#include "sievemla/error.h"
#include "topk/registry.h"

namespace sievemla {
namespace {

using stage::topk::PositionsToSlotsArgs;
constexpr std::int64_t kMostPositions = std::numeric_limits<std::int32_t>::max();  // positions are i32

TopkBounds bounds_of(const TopkArgs& args) {
  return {args.scores.dim(0), args.scores.dim(1), args.positions ? args.positions.dim(1) : args.slots.dim(1)};
}

}  // namespace

const stage::topk::TopkKernel& api::admit(const Backend& backend, const TopkArgs& args, Workspace workspace) {
  check_tensor(backend, args.scores, {kAny, kAny}, {DType::f32}, "topk: scores");
  check_contiguous_rows(args.scores, "topk: scores");
  const std::int64_t rows = args.scores.dim(0), width = args.scores.dim(1);
  expects(width <= kMostPositions, "the width must fit 32 bits", "topk: scores", width);
  if (args.starts) check_tensor(backend, args.starts, {rows}, {DType::i32}, "topk: starts");
  check_tensor(backend, args.lengths, {rows}, {DType::i32}, "topk: lengths");
  expects(args.positions || args.slots, "positions or slots must be given", "topk", "neither");
  const TopkBounds bounds = bounds_of(args);
  if (args.positions) check_output(backend, args.positions, {rows, bounds.k}, {DType::i32}, "topk: positions");
  if (args.slots) {
    check_output(backend, args.slots, {rows, bounds.k}, {DType::i32, DType::i64}, "topk: slots");
    check_slot_map(backend, args.map, rows, "topk: map");
  }
  for (std::int64_t t = 0; on_host(backend) && t < rows; ++t) {
    const std::int64_t length = base::load_int(args.lengths, t);
    if (length <= 0) continue;
    const std::int64_t start = args.starts ? base::load_int(args.starts, t) : 0;
    expects(start >= 0 && start + length <= width, "a row must see columns inside the width", "topk: lengths", "start ",
            start, ", length ", length, ", width ", width, " in row ", t);
  }
  const auto& kernel = base::pick(stage::topk::topk_kernels(), backend, args, "topk");
  check_workspace(workspace, topk_workspace_bytes(backend, bounds), "topk: workspace");
  return kernel;
}

void topk(const Backend& backend, const TopkArgs& args, Workspace workspace, Stream stream) {
  const auto& kernel = api::admit(backend, args, workspace);
  const TopkBounds bounds = bounds_of(args);
  if (bounds.rows > 0 && bounds.k > 0) kernel.run(args, {backend, workspace, stream});
}

std::int64_t topk_workspace_bytes(const Backend& backend, const TopkBounds& bounds) {
  const Where where = "topk_workspace_bytes: ";
  api::check_bound(bounds.rows, api::kMostRows, "rows must be 0 to 2^40", where + "rows");
  api::check_bound(bounds.width, kMostPositions, "the width must fit 32 bits", where + "width");
  api::check_bound(bounds.k, api::kMostRows, "k must be 0 to 2^40", where + "k");
  return base::workspace_bytes(stage::topk::topk_kernels(), backend, bounds);
}

void positions_to_slots(const Backend& backend, const TensorView& positions, const SlotMap& map,
                        const TensorView& slots, Stream stream) {
  api::check_tensor(backend, positions, {api::kAny, api::kAny}, {DType::i32}, "positions_to_slots: positions");
  const std::int64_t rows = positions.dim(0), k = positions.dim(1);
  api::check_output(backend, slots, {rows, k}, {DType::i32, DType::i64}, "positions_to_slots: slots");
  api::check_slot_map(backend, map, rows, "positions_to_slots: map");
  const PositionsToSlotsArgs args{positions, map, slots};
  const auto& kernel = base::pick(stage::topk::positions_to_slots_kernels(), backend, args, "positions_to_slots");
  if (rows > 0 && k > 0) kernel.run(args, {backend, {}, stream});
}

void expand_pools(const Backend& backend, const ExpandPoolsArgs& args, Stream stream) {
  expects(args.kpool >= 1, "a pool must hold at least 1 token", "expand_pools: kpool", args.kpool);
  api::check_tensor(backend, args.pools, {api::kAny, api::kAny}, {DType::i32}, "expand_pools: pools");
  const std::int64_t rows = args.pools.dim(0), n = args.pools.dim(1);
  api::check_tensor(backend, args.lengths, {rows}, {DType::i32}, "expand_pools: lengths");
  api::check_output(backend, args.positions, {rows, api::kAny}, {DType::i32}, "expand_pools: positions");
  expects(args.positions.dim(1) / args.kpool >= n && args.positions.dim(1) - n * args.kpool >= args.kpool - 1,
          "positions must be at least pools * kpool + kpool - 1 wide", "expand_pools: positions", args.positions.dim(1),
          ", pools ", n, ", kpool ", args.kpool);
  const auto& kernel = base::pick(stage::topk::expand_pools_kernels(), backend, args, "expand_pools");
  if (rows > 0) kernel.run(args, {backend, {}, stream});
}

}  // namespace sievemla
