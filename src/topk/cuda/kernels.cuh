// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/kernels.cuh -- makes the kernels of an architecture; instantiated once, in that config's own library.
#pragma once
#include <cstddef>
#include <type_traits>

#include "topk/cuda/id_kernels.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/merge_kernels.cuh"
#include "topk/cuda/select.cuh"
#include "topk/cuda/together.cuh"

namespace sievemla::stage::topk {

// Two CTAs a multiprocessor; those that share a row are few and have more registers, but leave room for a CTA of
// decode scores, beside which they wait to start.
template <class Arch, RowKind kKind>
SelectKernel select_of() {
  using Tile = std::conditional_t<kKind == RowKind::kShared, SelectTile<512, 1, 896>, SelectTile<512, 2>>;
  using Smem = SelectSmem<Tile>;
  constexpr std::size_t kBytes =
      kKind == RowKind::kShort ? offsetof(Smem, chosen) + sizeof(Smem::chosen) : sizeof(Smem);
  static_assert(kBytes <= Arch::kSmemBytes);
  return {reinterpret_cast<const void*>(&select_kernel<Arch, Tile, kKind>), Tile::kThreads, static_cast<int>(kBytes)};
}

template <class Arch>
ConfigKernels make_kernels() {
  ConfigKernels kernels{Arch::kSm,
                        select_of<Arch, RowKind::kShort>(),
                        select_of<Arch, RowKind::kLong>(),
                        select_of<Arch, RowKind::kShared>(),
                        {},
                        {},
                        {},
                        reinterpret_cast<const void*>(&slots_kernel<Arch>),
                        reinterpret_cast<const void*>(&pools_kernel<Arch>),
                        reinterpret_cast<const void*>(&candidates_kernel<Arch>),
                        reinterpret_cast<const void*>(&order_kernel<Arch>),
                        reinterpret_cast<const void*>(&pick_kernel<Arch>)};
  if constexpr (Arch::kCluster >= kTogether) {
    using Tile = SelectTile<512, 1, 768>;
    static_assert(sizeof(TogetherSmem<Tile>) <= Arch::kSmemBytes);
    kernels.together = {reinterpret_cast<const void*>(&together_kernel<Arch, Tile>), Tile::kThreads,
                        static_cast<int>(sizeof(TogetherSmem<Tile>))};
  }
  if constexpr (Arch::kWarpgroupMma) {  // whose scorer makes shortlists
    using Tile = SelectTile<512, 2>;
    static_assert(sizeof(ShortlistSmem<Tile>) <= Arch::kSmemBytes);
    kernels.guess = {reinterpret_cast<const void*>(&guess_kernel<Arch, Tile>), Tile::kThreads,
                     static_cast<int>(offsetof(SelectSmem<Tile>, chosen))};
    kernels.choose = {reinterpret_cast<const void*>(&choose_kernel<Arch, Tile>), Tile::kThreads,
                      static_cast<int>(sizeof(ShortlistSmem<Tile>))};
  }
  return kernels;
}

}  // namespace sievemla::stage::topk
