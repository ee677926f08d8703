// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm90.h -- H100, H200, H20.
#pragma once
#include "cuda/arch/sm80.h"

namespace sievemla::cuda {

struct Sm90 : Sm80 {
  static constexpr int kSm = 90;
  static constexpr int kSmemBytes = 227 * 1024;
  static constexpr int kSmemSmBytes = 228 * 1024;
  static constexpr bool kFp8Mma = false;  // compilers make f16 MMAs of them here
  static constexpr bool kWarpgroupMma = true;
  static constexpr int kCluster = 8;  // what every GPU that has clusters takes

  using Fp8Tiles = HeadTiles<AttentionTile<8, 1, 32, 3, 3>, AttentionTile<16, 1, 32, 3, 2>,
                             AttentionTile<32, 1, 32, 3, 2>, WarpGroupTile>;
  using Bf16Tiles = HeadTiles<AttentionTile<8, 1, 32, 3, 1>, AttentionTile<16, 1, 32, 3, 1>,
                              AttentionTile<32, 1, 16, 4, 2>, WarpGroupTile>;
};
static_assert(CudaArch<Sm90>);

}  // namespace sievemla::cuda
