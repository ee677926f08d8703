// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/tensors.h -- f(TensorView&) for every tensor of a call's arguments, absent ones too; the bytes of one.
#pragma once
#include <utility>

#include "sievemla/pipeline.h"
#include "sievemla/sievemla.h"
#include "topk/registry.h"

namespace sievemla::api {

// From the first to past the last byte that a view may reach.
inline std::int64_t span_bytes(const TensorView& v) {
  if (v.elements() == 0) return 0;
  std::int64_t last = 0;
  for (int i = 0; i < v.rank; ++i) last += (v.dim(i) - 1) * v.step(i);
  return (last + 1) * size_of(v.dtype);
}

template <class F>
void each_tensor(SlotMap& a, F&& f) {
  f(a.block_table), f(a.row_request);
}
template <class F>
void each_tensor(Rope& a, F&& f) {
  f(a.positions), f(a.cos_sin);
}
template <class F>
void each_tensor(RowSource& a, F&& f) {
  if (auto* slots = std::get_if<Slots>(&a)) f(slots->indices), f(slots->topk_length);
  if (auto* blocks = std::get_if<BlockTable>(&a)) f(blocks->table), f(blocks->lengths);
}

template <class F>
void each_tensor(WriteLatentArgs& a, F&& f) {
  f(a.latent), f(a.rope), f(a.slots), f(a.cache.pages);
}
template <class F>
void each_tensor(GatherLatentArgs& a, F&& f) {
  f(a.cache.pages), f(a.slots), f(a.out);
}
template <class F>
void each_tensor(GatherIndexKeysArgs& a, F&& f) {
  f(a.cache.pages), f(a.slots), f(a.keys), f(a.scales);
}
template <class F>
void each_tensor(WriteIndexKeysArgs& a, F&& f) {
  f(a.k), f(a.norm_weight), f(a.norm_bias), f(a.slots), f(a.cache.pages);
  each_tensor(a.rope, f);
}
template <class F>
void each_tensor(WriteLayerArgs& a, F&& f) {
  each_tensor(a.latent, f), f(a.latent_weight), each_tensor(a.rope, f);
  each_tensor(a.keys, f), f(a.indices);
}
template <class F>
void each_tensor(IndexQueryArgs& a, F&& f) {
  f(a.q), f(a.weights), f(a.out_q), f(a.out_weights);
  each_tensor(a.rope, f), each_tensor(a.keys, f);
}
template <class F>
void each_tensor(IndexScoreArgs& a, F&& f) {
  f(a.q), f(a.weights), f(a.lengths), f(a.logits);
  f(a.paged.cache.pages), f(a.paged.block_table), f(a.paged.row_request);
  f(a.contiguous.keys), f(a.contiguous.scales), f(a.contiguous.starts);
}
template <class F>
void each_tensor(TopkArgs& a, F&& f) {
  f(a.scores), f(a.starts), f(a.lengths), f(a.positions), f(a.slots);
  each_tensor(a.map, f);
}
template <class F>
void each_tensor(SelectArgs& a, F&& f) {
  each_tensor(a.score, f);
  f(a.positions), f(a.slots), f(a.selected_scores);
  each_tensor(a.map, f);
}
template <class F>
void each_tensor(stage::topk::PositionsToSlotsArgs& a, F&& f) {
  f(a.positions), f(a.slots);
  each_tensor(a.map, f);
}
template <class F>
void each_tensor(ExpandPoolsArgs& a, F&& f) {
  f(a.pools), f(a.lengths), f(a.positions);
}
template <class F>
void each_tensor(CandidatesArgs& a, F&& f) {
  f(a.scores), f(a.starts), f(a.local), f(a.selected_scores), f(a.positions);
}
template <class F>
void each_tensor(MergeTopkArgs& a, F&& f) {
  f(a.scores), f(a.positions), f(a.lengths), f(a.selected), f(a.slots), f(a.counts);
  each_tensor(a.map, f);
}
template <class F>
void each_tensor(ShardSlotsArgs& a, F&& f) {
  f(a.positions), f(a.slots), f(a.counts);
  each_tensor(a.map, f);
}
template <class F>
void each_tensor(AttentionArgs& a, F&& f) {
  f(a.q), f(a.q_rope), f(a.kv.pages), f(a.sink), f(a.out), f(a.lse);
  each_tensor(a.rows, f);
}
template <class F>
void each_tensor(CombineArgs& a, F&& f) {
  f(a.partial_out), f(a.partial_lse), f(a.sink), f(a.out), f(a.lse);
}

}  // namespace sievemla::api
