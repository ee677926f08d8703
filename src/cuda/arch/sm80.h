// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm80.h -- A100: 163 KiB of shared memory a CTA, cooperative 64-head CTAs.
#pragma once
#include "cuda/arch/tile.h"

namespace sievemla::cuda {

struct Sm80 {
  static constexpr int kSm = 80;
  static constexpr int kSmemBytes = 163 * 1024;  // most dynamic smem a CTA may opt in to
  static constexpr int kSmemSmBytes = 164 * 1024;  // of a multiprocessor; a CTA costs 1 KiB on top of its own

  using Fp8Tiles = HeadTiles<AttentionTile<8, 1, 32, 3, 2>, AttentionTile<16, 1, 32, 3, 2>, AttentionTile<32, 1, 32, 3, 1>,
                             AttentionTile<32, 2, 32, 3, 1>>;
  using Bf16Tiles = HeadTiles<AttentionTile<8, 1, 32, 3, 1>, AttentionTile<16, 1, 32, 3, 1>, AttentionTile<32, 1, 32, 3, 1>,
                              AttentionTile<32, 2, 32, 3, 1>>;
};

}  // namespace sievemla::cuda
