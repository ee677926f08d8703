// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm80.h -- A100, A30: mma.sync on bf16, cp.async, large shared memory.
#pragma once
#include "cuda/arch/arch.h"
#include "cuda/arch/tile.h"

namespace sievemla::cuda {

struct Sm80 {
  static constexpr int kSm = 80;
  static constexpr int kSmemBytes = 163 * 1024;    // of 164 KiB an SM; 1 KiB is the system's
  static constexpr int kSmemSmBytes = 164 * 1024;  // of an SM; a CTA costs 1 KiB beside its own
  static constexpr bool kFp8Mma = false;
  static constexpr bool kWarpgroupMma = false;
  static constexpr int kCluster = 1;

  // The 16 heads of AttentionTile have the shorter start.
  using Fp8Tiles = TileList<TurnsTile<8, 2, 6, 1>, TurnsTile<16, 4, 3, 1>, AttentionTile<16, 1, 32, 3, 1>,
                            AttentionTile<32, 1, 32, 3, 1>, AttentionTile<32, 2, 32, 3, 1>>;
  using Bf16Tiles = TileList<TurnsTile<8, 2, 3, 1>, TurnsTile<16, 2, 3, 1>, AttentionTile<16, 1, 32, 3, 1>,
                             AttentionTile<32, 1, 16, 4, 1>, AttentionTile<32, 2, 16, 4, 1>>;
};
static_assert(CudaArch<Sm80>);

}  // namespace sievemla::cuda
