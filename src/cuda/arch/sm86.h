// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm86.h -- RTX 3090, A40, A10: Sm80 with little shared memory. Its PTX is also the fallback for GPUs
// that no other config was built for: it asks for the least.
#pragma once
#include "cuda/arch/sm80.h"

namespace sievemla::cuda {

struct Sm86 : Sm80 {
  static constexpr int kSm = 86;
  static constexpr int kSmemBytes = 99 * 1024;
  static constexpr int kSmemSmBytes = 100 * 1024;

  using Fp8Tiles = TileList<TurnsTile<8, 1, 8, 1>, TurnsTile<16, 2, 3, 1>, AttentionTile<16, 1, 32, 3, 1>,
                            AttentionTile<32, 1, 16, 4, 1>>;
  using Bf16Tiles = TileList<TurnsTile<8, 1, 4, 1>, TurnsTile<16, 2, 2, 1>, AttentionTile<16, 1, 16, 4, 1>,
                             AttentionTile<32, 1, 16, 4, 1>>;
};
static_assert(CudaArch<Sm86>);

}  // namespace sievemla::cuda
