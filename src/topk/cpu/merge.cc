// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/merge.cc -- context_parallel.h on the CPU: rows in parallel.
#include "topk/merge.h"

#include "cpu/threads.h"

namespace sievemla::stage::topk {
namespace {

// The rank whose next candidate has the lowest position, again and again.
void order_row(const MergeTopkArgs& args, const MergeChunk& chunk, std::int64_t row, CandidateRow* heads) {
  const std::int64_t ranks = args.scores.dim(0);
  auto* const scores = base::at<float>(chunk.scores, row);
  auto* const positions = base::at<std::int32_t>(chunk.positions, row);
  std::int64_t all = 0;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    heads[rank] = CandidateRow(args, rank, chunk.first + row);
    all += heads[rank].count;
  }
  for (std::int64_t stored = 0; stored < all; ++stored) {
    CandidateRow* lowest = nullptr;
    for (CandidateRow* head = heads; head < heads + ranks; ++head)
      if (head->count > 0 && (!lowest || *head->positions < *lowest->positions)) lowest = head;
    scores[stored] = *lowest->scores++;
    positions[stored] = *lowest->positions++;
    --lowest->count;
  }
  base::store_int(chunk.lengths, all, row);
}

void order(const MergeTopkArgs& args, const MergeChunk& chunk, const base::Exec& exec) {
  cpu::parallel_for(exec.backend, chunk.scores.dim(0), [&](std::int64_t row, int worker) {
    order_row(args, chunk, row, chunk.heads + worker * args.scores.dim(0));
  });
}

void pick(const MergeTopkArgs& args, const MergeChunk& chunk, const base::Exec& exec) {
  cpu::parallel_for(exec.backend, chunk.scores.dim(0), [&](std::int64_t row, int) {
    store_merged_row(args, chunk.first + row, [&](std::int64_t lane) {
      const std::int64_t column = base::load_int(chunk.columns, row, lane);
      return column < 0 ? -1 : base::load_int(chunk.positions, row, column);
    });
  });
}

}  // namespace

void topk_candidates_cpu(const CandidatesArgs& args, const base::Exec& exec) {
  cpu::parallel_for(exec.backend, args.local.dim(0), [&](std::int64_t t, int) { candidates_row(args, t); });
}

void merge_topk_cpu(const MergeTopkArgs& args, const base::Exec& exec) { merge_by_topk({order, pick}, args, exec); }

void shard_slots_cpu(const ShardSlotsArgs& args, const base::Exec& exec) {
  cpu::parallel_for(exec.backend, args.positions.dim(0), [&](std::int64_t t, int) { shard_slots_row(args, t); });
}

}  // namespace sievemla::stage::topk
