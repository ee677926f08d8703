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

  // mma.sync's tile of 16 heads has the shorter start: for one or two tiles of rows.
  using Fp8Tiles = TileList<FewHeadsTile<8, 3, 19, 4>, FewHeadsTile<16, 3, 17, 4>, AttentionTile<16, 1, 32, 3, 2>,
                            FewHeadsTile<32, 2, 14, 2>, WarpGroupTile>;
  using Bf16Tiles = TileList<FewHeadsTile<8, 2, 11, 4>, FewHeadsTile<16, 2, 10, 4>, AttentionTile<16, 1, 32, 3, 1>,
                             FewHeadsTile<32, 2, 9, 2>, RolesTile>;
};
static_assert(CudaArch<Sm90>);

}  // namespace sievemla::cuda
