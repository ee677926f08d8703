// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/rows.h -- what host kernels do with one row, apart from selecting: read its scores, map positions to slots,
// write its outputs.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "base/view.h"
#include "topk/registry.h"

namespace sievemla::stage::topk {

// The scores that row t may select from.
inline std::span<const float> visible_scores(const TopkArgs& args, std::int64_t t) {
  const std::int64_t length = base::load_int(args.lengths, t);
  if (length <= 0) return {};
  const std::int64_t start = args.starts ? base::load_int(args.starts, t) : 0;
  return {base::at<float>(args.scores, t, start), static_cast<std::size_t>(length)};
}

inline std::int64_t width_of_outputs(const TopkArgs& args) {
  return args.positions ? args.positions.dim(1) : args.slots.dim(1);
}

// The reference's order: by score, NaN as -inf and -0 as +0, then by position.
struct Candidate {
  float score;
  std::int32_t position;
};
inline bool better(const Candidate& a, const Candidate& b) {
  auto value = [](float x) { return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x; };
  const float x = value(a.score), y = value(b.score);
  return x > y || (x == y && a.position < b.position);
}

// The slots of one row's positions: SlotMap's formulas.
class RowSlots {
 public:
  RowSlots(const SlotMap& map, const TensorView& slots, std::int64_t t, std::int64_t rows)
      : page_size_(map.page_size),
        shard_(map.shard),
        last_(base::divide(slots.dtype == DType::i64 ? std::numeric_limits<std::int64_t>::max()
                                                     : std::numeric_limits<std::int32_t>::max(),
                           map.page_size)) {
    const std::int64_t requests = map.block_table.dim(0);
    const std::int64_t request = base::request_of(map.row_request, t, rows, requests);
    if (request < 0 || request >= requests) return;
    pages_ = map.block_table;
    request_ = request;
    width_ = map.block_table.dim(1);
  }

  std::int64_t operator()(std::int64_t position) const {
    if (position < 0) return -1;
    if (shard_.ranks > 1) {
      const std::int64_t run = shard_.interleave, round = run * shard_.ranks;
      if (position / run % shard_.ranks != shard_.rank) return -1;
      position = position / round * run + position % run;
    }
    const auto [page, offset] = base::divide(position, page_size_);
    if (page >= width_) return -1;
    const std::int64_t physical = base::load_int(pages_, request_, page);
    if (physical < 0 || physical > last_.whole || (physical == last_.whole && offset > last_.rest)) return -1;
    return physical * page_size_ + offset;
  }

 private:
  std::int64_t page_size_;
  Shard shard_;
  base::Quotient last_;  // page and offset of the largest slot that the output's dtype holds
  TensorView pages_;
  std::int64_t request_ = 0;
  std::int64_t width_ = 0;  // pages of the row's request; 0 if it has none
};

// Writes row t of the outputs: ids in ascending position, then -1.
inline void store_row(const TopkArgs& args, std::int64_t t, std::span<const std::int32_t> ids) {
  const std::int64_t k = width_of_outputs(args), n = static_cast<std::int64_t>(ids.size());
  auto id = [&](std::int64_t lane) { return lane < n ? ids[static_cast<std::size_t>(lane)] : -1; };
  if (args.positions)
    for (std::int64_t lane = 0; lane < k; ++lane) *base::at<std::int32_t>(args.positions, t, lane) = id(lane);
  if (args.slots) {
    const RowSlots slot(args.map, args.slots, t, args.scores.dim(0));
    for (std::int64_t lane = 0; lane < k; ++lane) base::store_int(args.slots, slot(id(lane)), t, lane);
  }
}

inline void positions_to_slots_row(const PositionsToSlotsArgs& args, std::int64_t t) {
  const RowSlots slot(args.map, args.slots, t, args.positions.dim(0));
  for (std::int64_t lane = 0; lane < args.positions.dim(1); ++lane)
    base::store_int(args.slots, slot(base::load_int(args.positions, t, lane)), t, lane);
}

inline void expand_pools_row(const ExpandPoolsArgs& args, std::int64_t t) {
  const std::int64_t length = base::load_int(args.lengths, t), whole = length > 0 ? length / args.kpool : 0;
  std::int64_t lane = 0;
  auto append = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p)
      *base::at<std::int32_t>(args.positions, t, lane++) = static_cast<std::int32_t>(p);
  };
  for (std::int64_t i = 0; i < args.pools.dim(1); ++i) {
    const std::int64_t pool = base::load_int(args.pools, t, i);
    if (pool >= 0 && pool < whole) append(pool * args.kpool, (pool + 1) * args.kpool);
  }
  append(whole * args.kpool, length);
  while (lane < args.positions.dim(1)) *base::at<std::int32_t>(args.positions, t, lane++) = -1;
}

}  // namespace sievemla::stage::topk
