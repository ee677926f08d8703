// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/kernels.cuh -- makes the kernels of an architecture; instantiated once, in its config's library.
#pragma once
#include "indexer/cuda/heads.cuh"
#include "indexer/cuda/kernels.h"
#include "indexer/cuda/scores.cuh"

namespace sievemla::stage::indexer {

template <class Arch>
ConfigKernels make_kernels() {
  ConfigKernels kernels{};
  kernels.sm = Arch::kSm;
  if constexpr (Arch::kWarpgroupMma) {
    using Held = HeldGroupTile<3, 4, 1, 4>;
    using Pass = PassGroupTile<1, 1, 4>;
    kernels.held = {reinterpret_cast<const void*>(&held_group_kernel<Arch, Held>), Held::kThreads,
                    static_cast<int>(sizeof(HeldGroupSmem<Held>)), Held::kKeys};
    kernels.pass = {reinterpret_cast<const void*>(&pass_group_kernel<Arch, Pass>), Pass::kThreads, Pass::kCtas,
                    pass_group_smem_bytes};
  } else {
    using Held = HeldTile<Arch, 4, 2, 4>;
    using Pass = PassTile<Arch, 4, 2>;
    static_assert(2 * sizeof(HeldSmem<Held>) <= Arch::kSmemBytes);
    kernels.held = {reinterpret_cast<const void*>(&held_kernel<Arch, Held>), Held::kThreads,
                    static_cast<int>(sizeof(HeldSmem<Held>)), Held::kKeys};
    kernels.pass = {reinterpret_cast<const void*>(&pass_kernel<Arch, Pass>), Pass::kThreads, Pass::kCtas,
                    pass_smem_bytes};
  }
  static_assert(pass_group_smem_bytes(kMostHeads, kMostFold) <= Arch::kSmemBytes);
  kernels.write_keys = reinterpret_cast<const void*>(&write_keys_kernel<Arch>);
  kernels.queries = reinterpret_cast<const void*>(&queries_kernel<Arch>);
  return kernels;
}

}  // namespace sievemla::stage::indexer
