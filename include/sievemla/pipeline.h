// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/pipeline.h -- the stages in order, over one workspace.
//
//   write latent row ─┐
//   write index key ──┴─► index_queries ─► [ index_scores ─► topk ] by chunks of rows ─► attention
//
// combine() comes after, where ranks hold parts of the context.
#pragma once
#include <optional>

#include "sievemla/attention.h"
#include "sievemla/context_parallel.h"
#include "sievemla/indexer.h"
#include "sievemla/kv_cache.h"
#include "sievemla/topk.h"

namespace sievemla {

// All that a layer writes for new tokens, in one kernel on cuda.
struct WriteLayerArgs {
  WriteLatentArgs latent;    // as it comes from its projection: not normalised, its rope not rotated
  TensorView latent_weight;  // [cache.latent] f32 or bf16: of the RMSNorm
  float latent_eps = 0.f;    // the model's; must be positive and finite
  Rope rope;                 // of latent.rope, which is 64 wide unless the style is none
  WriteIndexKeysArgs keys;   // `k` absent: the layer has no indexer of its own
  TensorView indices;        // [rows, k] i32, optional: filled with -1
};
// The normalised latent and the rotated rope are rounded to the dtype of `latent`, then written as write_latent writes
// them; keys are written as write_index_keys writes them, bit for bit.
void write_layer(const Backend& backend, const WriteLayerArgs& args, Stream stream = {});

inline constexpr std::int64_t kScoreBudgetBytes = std::int64_t{64} << 20;

// Scores and selection together, in a fixed byte budget at any context length: the rows go through in chunks. The
// result does not depend on the budget.
struct SelectArgs {
  IndexScoreArgs score;        // `logits` stays absent
  std::int64_t width = 0;      // the longest length
  TensorView positions;        // as TopkArgs
  TensorView slots;            // as TopkArgs
  SlotMap map;                 // as TopkArgs
  TensorView selected_scores;  // [rows, k] f32, out, optional, with positions, which then are those of topk_candidates
  Shard shard;                 // read with selected_scores only: which positions the keys are
  std::int64_t score_budget_bytes = kScoreBudgetBytes;  // of logits at a time; at least one row is always taken
};
void select(const Backend& backend, const SelectArgs& args, Workspace workspace, Stream stream = {});

struct SelectBounds {
  std::int64_t rows, heads, width, k;
  std::int64_t score_budget_bytes = kScoreBudgetBytes;
};
std::int64_t select_workspace_bytes(const Backend& backend, const SelectBounds& bounds);

// One layer of sparse attention. Layers that share an indexer leave `indexer` empty and pass the slots of the layer
// before in attention.rows.
struct SparseLayerArgs {
  struct Indexer {
    WriteIndexKeysArgs keys;
    IndexQueryArgs queries;  // its keys are those above
    SelectArgs select;
  };
  WriteLatentArgs latent;
  std::optional<Indexer> indexer;
  AttentionArgs attention;
};
void sparse_layer(const Backend& backend, const SparseLayerArgs& args, Workspace workspace, Stream stream = {});

struct SparseLayerBounds {
  SelectBounds select;
  AttentionBounds attention;
};
std::int64_t sparse_layer_workspace_bytes(const Backend& backend, const SparseLayerBounds& bounds);

}  // namespace sievemla
