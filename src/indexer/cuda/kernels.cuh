// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/kernels.cuh -- makes the kernels of an architecture; instantiated once, in its config's library.
#pragma once
#include <algorithm>
#include <type_traits>

#include "indexer/cuda/heads.cuh"
#include "indexer/cuda/hopper.cuh"
#include "indexer/cuda/kernels.h"
#include "indexer/cuda/layer.cuh"
#include "indexer/cuda/scores.cuh"

namespace sievemla::stage::indexer {

template <class Arch, class Tile>
HeldKernel held_kernel_of() {
  return {reinterpret_cast<const void*>(&held_kernel<Arch, Tile>), Tile::kThreads,
          static_cast<int>(sizeof(HeldSmem<Tile>)), kHeldRows, Tile::kKeys};
}
template <class Arch, class Tile>
PassKernel pass_kernel_of() {
  constexpr int kColumns =
      std::min((Arch::kSmemBytes - Tile::kFixedBytes) / Tile::kColumnBytes, columns_of(kMostHeads, kMostFold));
  static_assert(kColumns >= columns_of(kMostHeads, 1));
  return {reinterpret_cast<const void*>(&pass_kernel<Arch, Tile>),
          Tile::kThreads,
          Tile::kCtas,
          Tile::kFixedBytes,
          Tile::kColumnBytes,
          kColumns};
}
template <class Arch, class Tile, class Columns, bool Lists = false>
HeldKernel rows_kernel_of() {
  static_assert(sizeof(RowsSmem<Tile, Columns>) <= Arch::kSmemBytes);
  return {reinterpret_cast<const void*>(&rows_kernel<Arch, Tile, Columns, Lists>), Tile::kThreads,
          static_cast<int>(sizeof(RowsSmem<Tile, Columns>)), kMostUnits * Rows<Tile, Columns, Lists>::kRows, 0};
}
template <class Arch, class Tile, class Columns, int Blocks>
PassKernel ring_kernel_of() {
  static_assert(Tile::kCtas * (sizeof(RingSmem<Tile, Columns, Blocks>) + 1024) <= Arch::kSmemBytes + 1024);
  static_assert(Blocks * Columns::kRows == (Columns::kRows == 1 ? 1 : kMostFold));
  // No more than kCtas shall lie on a multiprocessor, or others have too few: they start while kernels before run.
  constexpr int kBytes =
      std::max(static_cast<int>(sizeof(RingSmem<Tile, Columns, Blocks>)), Arch::kSmemSmBytes / (Tile::kCtas + 1));
  return {reinterpret_cast<const void*>(&ring_kernel<Arch, Tile, Columns, Blocks>),
          Tile::kThreads,
          Tile::kCtas,
          kBytes,
          0,
          columns_of(kMostHeads, kMostFold)};
}

template <class Arch>
ConfigKernels make_kernels() {
  ConfigKernels kernels{};
  kernels.sm = Arch::kSm;
  if constexpr (Arch::kWarpgroupMma) {
    using Tile = RowsTile<9, 4>;
    using OneRow = RingTile<2, 2, 8>;
    using SomeRows = RingTile<1, 2, 8>;
    kernels.held[0] = rows_kernel_of<Arch, Tile, Columns<32, 4>>();
    kernels.held[1] = rows_kernel_of<Arch, Tile, Columns<64, 2>>();
    kernels.shortlist[0] = rows_kernel_of<Arch, Tile, Columns<32, 4>, true>();
    kernels.shortlist[1] = rows_kernel_of<Arch, Tile, Columns<64, 2>, true>();
    kernels.pass[0][0] = ring_kernel_of<Arch, OneRow, Columns<32, 1>, 1>();
    kernels.pass[0][1] = ring_kernel_of<Arch, OneRow, Columns<64, 1>, 1>();
    kernels.pass[1][0] = ring_kernel_of<Arch, SomeRows, Columns<32, 4>, 2>();
    kernels.pass[1][1] = ring_kernel_of<Arch, SomeRows, Columns<64, 2>, 4>();
  } else {
    using Held = HeldTile<Arch, 4, 2, Arch::kFp8Mma ? 4 : 2>;
    using Pass = PassTile<Arch, 4, 2, 4>;
    using FewHeads = std::conditional_t<Arch::kFp8Mma, Pass, PassTile<Arch, 4, 3, 2>>;
    static_assert(Held::kCtas * (sizeof(HeldSmem<Held>) + 1024) <= Arch::kSmemBytes + 1024);
    for (HeldKernel& held : kernels.held) held = held_kernel_of<Arch, Held>();
    for (auto& some : kernels.pass)
      for (PassKernel& pass : some) pass = pass_kernel_of<Arch, Pass>();
    kernels.pass[0][0] = pass_kernel_of<Arch, FewHeads>();
  }
  kernels.write_keys = reinterpret_cast<const void*>(&write_keys_kernel<Arch>);
  kernels.write_layer = reinterpret_cast<const void*>(&write_layer_kernel<Arch>);
  kernels.queries = reinterpret_cast<const void*>(&queries_kernel<Arch>);
  return kernels;
}

}  // namespace sievemla::stage::indexer
