// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/kernels.cuh -- makes the kernels of an architecture; instantiated once, in that config's own library.
#pragma once
#include <cstddef>

#include "topk/cuda/id_kernels.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/select.cuh"

namespace sievemla::stage::topk {

// One CTA a multiprocessor does a row fastest; two with half the threads do most rows.
using WideTile = SelectTile<1024, 8, 1>;
using HalfTile = SelectTile<512, 16, 2>;
static_assert(WideTile::kList == kListEntries && HalfTile::kList == kListEntries);

template <class Arch, class Tile, bool Long>
SelectKernel select_of() {
  using Smem = SelectSmem<Tile>;
  constexpr int kBytes = static_cast<int>(Long ? sizeof(Smem) : offsetof(Smem, position));
  static_assert(kBytes <= Arch::kSmemBytes);
  return {reinterpret_cast<const void*>(&select_kernel<Arch, Tile, Long>), Tile::kThreads, kBytes};
}

template <class Arch>
ConfigKernels make_kernels() {
  return {Arch::kSm,
          select_of<Arch, WideTile, true>(),
          select_of<Arch, WideTile, false>(),
          select_of<Arch, HalfTile, false>(),
          reinterpret_cast<const void*>(&slots_kernel<Arch>),
          reinterpret_cast<const void*>(&pools_kernel<Arch>)};
}

}  // namespace sievemla::stage::topk
