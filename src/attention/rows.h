// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/rows.h -- which cache rows a query token attends to: one loop for sparse and dense.
//
//   for (lane = 0; lane < rows.lanes(token); ++lane)
//     if (slot = rows.slot(token, lane); slot >= 0) ... load_row(cache, slot) ...
//
// A slot list is a virtual block table [requests, q_len, topk] whose pages are single rows; a block table is a list
// [requests, 1 (repeated q_len times), max_pages] of pages. Both become `table`, with a page size and a number of
// pages.
#pragma once
#include <cstdint>
#include <variant>

#include "base/view.h"
#include "sievemla/attention.h"

namespace sievemla::stage::attention {

class Rows {
 public:
  explicit Rows(const AttentionArgs& args) : sparse_(std::holds_alternative<Slots>(args.rows)) {
    if (const Slots* slots = std::get_if<Slots>(&args.rows)) {
      const bool folded = slots->indices.rank == 3;
      table_ = slots->indices;
      q_len_ = folded ? table_.dim(1) : 1;
      width_ = table_.dim(table_.rank - 1);
      if (!folded) table_.stride = {table_.step(0), 0, table_.step(1), 0};
      lengths_ = slots->topk_length;
      pages_ = args.kv.slots();
    } else {
      const BlockTable& blocks = std::get<BlockTable>(args.rows);
      table_ = blocks.table;
      q_len_ = table_.dim(0) > 0 ? args.q.dim(0) / table_.dim(0) : 1;
      width_ = table_.dim(1);
      table_.stride = {table_.step(0), 0, table_.step(1), 0};
      lengths_ = blocks.lengths;
      tokens_per_length_ = q_len_;
      page_size_ = args.kv.page_size();
      pages_ = args.kv.pages.dim(0);
    }
  }

  // How many lanes the token has, in [0, table width * page size]. The last of n tokens that share a length sees all of
  // it, each one before it a row less.
  std::int64_t lanes(std::int64_t token) const {
    if (!lengths_) return width_;
    const std::int64_t behind = tokens_per_length_ - 1 - token % tokens_per_length_;
    const std::int64_t seen = base::load_int(lengths_, token / tokens_per_length_) - behind;
    if (seen <= 0) return 0;
    return seen / page_size_ < width_ ? seen : width_ * page_size_;
  }

  // The cache row of a lane in [0, lanes(token)); -1: none.
  std::int64_t slot(std::int64_t token, std::int64_t lane) const {
    const auto [index, offset] = page_size_ == 1 ? base::Quotient{lane, 0} : base::divide(lane, page_size_);
    const std::int64_t page = entry(token, index);
    return page < 0 || page >= pages_ ? -1 : page * page_size_ + offset;
  }

  // The table entry that lanes [page * page_size, (page + 1) * page_size) go through, as it stands.
  std::int64_t entry(std::int64_t token, std::int64_t page) const {
    const auto [request, q] = q_len_ == 1 ? base::Quotient{token, 0} : base::divide(token, q_len_);
    return base::load_int(table_, request, q, page);
  }
  std::int64_t entries(std::int64_t token) const { return (lanes(token) + page_size_ - 1) / page_size_; }
  std::int64_t pages() const { return pages_; }

  // What the list or table could hold, read from shapes alone.
  std::int64_t width() const { return width_ * page_size_; }

  // A bound on the lanes of every token: AttentionBounds::lanes of this call.
  std::int64_t most_lanes(std::int64_t tokens) const {
    if (sparse_) return width_;
    std::int64_t most = 0;
    for (std::int64_t t = 0; t < tokens; ++t) most = lanes(t) > most ? lanes(t) : most;
    return most;
  }

 private:
  bool sparse_;
  TensorView table_;    // strides of [requests, q_len, width]
  TensorView lengths_;  // [tokens / tokens_per_length], absent: every token has all lanes
  std::int64_t q_len_, width_;
  std::int64_t tokens_per_length_ = 1;
  std::int64_t page_size_ = 1, pages_;
};

// The query of (token, head), latent | rope, into out[0], out[step], out[2 * step] ...
template <class Real>
void load_query(const AttentionArgs& args, std::int64_t token, std::int64_t head, Real* out, std::int64_t step) {
  const std::int64_t first = args.q.dim(2), rest = args.q_rope.dim(2);  // an absent q_rope has extent 0
  for (std::int64_t i = 0; i < first; ++i) out[i * step] = base::load_f32(args.q, token, head, i);
  for (std::int64_t i = 0; i < rest; ++i) out[(first + i) * step] = base::load_f32(args.q_rope, token, head, i);
}

}  // namespace sievemla::stage::attention
