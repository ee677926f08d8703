// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/tile.h -- what a config of the attention kernel has to say. docs/kernels/attention-cuda.md has the
// reasons.
#pragma once

namespace sievemla::cuda {

// Heads: of a group of four warps (16 or 32). Groups: that share the rows a CTA gathers. Tokens: cache rows a stage.
// Ctas: wanted on a multiprocessor at a time.
template <int Heads, int Groups, int Tokens, int Stages, int Ctas>
struct AttentionTile {
  static constexpr int kHeads = Heads, kGroups = Groups, kTokens = Tokens, kStages = Stages, kCtas = Ctas;
  static constexpr int kCtaHeads = Heads * Groups, kThreads = 128 * Groups;
  static_assert(Heads == 16 || Heads == 32, "heads are MMA columns of 8, read in pairs");
  static_assert(Groups == 1 || Groups == 2);
  static_assert(Tokens == 16 || Tokens == 32, "MMA rows of 16");
  static_assert(Stages >= 3, "one stage is read, one has landed, one is on its way");
};

// 8 or 16 heads; groups of 1, 2 or 4 warps that take tiles of 16 rows a warp in turns.
template <int Heads, int Warps, int Groups, int Ctas>
struct TurnsTile {
  static constexpr int kHeads = Heads, kWarps = Warps, kGroups = Groups, kCtas = Ctas;
  static constexpr int kCtaHeads = Heads, kTokens = 16 * Warps, kThreads = 32 * Warps * Groups;
  static_assert(Heads == 8 || Heads == 16);
  static_assert(Warps == 1 || Warps == 2 || Warps == 4);
};

// 64 heads x 64 rows by the matrix products of warp groups: sm_90 alone (docs/kernels/attention-cuda.md). Fp8 rows.
struct WarpGroupTile {
  static constexpr int kCtaHeads = 64, kTokens = 64, kCtas = 1, kThreads = 384;
};
// The same of bf16 rows, by roles.
struct RolesTile {
  static constexpr int kCtaHeads = 64, kTokens = 64, kCtas = 1, kThreads = 512;
};

// 8, 16 or 32 heads x 64 rows by the matrix products of warp groups, on sm_90 alone. Groups: that take tiles in turns.
// Slots: of 16 rows. Batch: fragments made while as many are multiplied, as registers allow.
template <int Heads, int Groups, int Slots, int Batch>
struct FewHeadsTile {
  static constexpr int kHeads = Heads, kGroups = Groups, kSlots = Slots, kBatch = Batch;
  static constexpr int kCtaHeads = Heads, kTokens = 64, kCtas = 1, kThreads = 128 * (Groups + 1);
  // All warp groups together stay within what the launch got: 65536 registers, in eights.
  static constexpr int kProducerRegisters = 56,
                       kConsumerRegisters =
                           ((65536 / kThreads / 8 * 8) * (Groups + 1) - kProducerRegisters) / Groups / 8 * 8;
  static_assert(Heads == 8 || Heads == 16 || Heads == 32);
  static_assert(Slots >= 4 * Groups, "each group reads a tile");
};

// The tiles of one row type, by ascending heads; of two for as many heads, the one for many rows comes first.
template <class... Tiles>
struct TileList {};

}  // namespace sievemla::cuda
