// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/kernels.cuh -- makes the kernels of an architecture; instantiated once, in that config's own
// library.
#pragma once
#include <type_traits>

#include "attention/cuda/attention.cuh"
#include "attention/cuda/hopper.cuh"
#include "attention/cuda/hopper_few.cuh"
#include "attention/cuda/hopper_roles.cuh"
#include "attention/cuda/kernels.h"
#include "attention/cuda/turns.cuh"
#include "cuda/arch/tile.h"
#include "cuda/launch.h"

namespace sievemla::stage::attention {

template <class Arch, class Rows, class Tile>
struct TileOf {
  using Smem = AttentionSmem<Rows, Tile>;
  static constexpr int kMeeting = 0;
  static constexpr Clocks kClocks = Arch::kWarpgroupMma ? short_start_clocks() : clocks_of(Tile::kCtaHeads);
  static constexpr int kTurns = 1;
  // Rows gathered, and read as keys and as values by each group of four warps; the four's scores, P of each.
  static constexpr int kLaneBytes = Rows::kBytes + Tile::kGroups * (Rows::kBytes + Rows::kValueBytes) +
                                    Tile::kCtaHeads * (4 * 2 * 4 + (Smem::kCopies + 4) * 2);
  static constexpr auto kKernel = &attention_kernel<Arch, Rows, Tile>;
};
template <class Arch, class Rows, int Heads, int Warps, int Groups, int Ctas>
struct TileOf<Arch, Rows, cuda::TurnsTile<Heads, Warps, Groups, Ctas>> {
  using Tile = cuda::TurnsTile<Heads, Warps, Groups, Ctas>;
  using Smem = TurnsSmem<Rows, Tile>;
  static constexpr int kMeeting = 0;
  static constexpr Clocks kClocks = turns_clocks(Heads, Rows::kScaled);
  static constexpr int kTurns = Groups;
  // Rows gathered, read as keys and as values; Q for 16 rows; P.
  static constexpr int kLaneBytes = 2 * Rows::kBytes + Rows::kValueBytes + Heads * 2 * (kLatent + Rows::kRope) / 16 +
                                    Heads * 2 * (Smem::kCopies + (Rows::kScaled ? 4 : Warps));
  static constexpr auto kKernel = &turns_kernel<Arch, Rows, Tile>;
};
template <class Arch, class Rows>
struct TileOf<Arch, Rows, cuda::WarpGroupTile> {
  using Smem = HopperSmem<Rows>;
  static constexpr int kMeeting = Meeting::kMostParts;
  static constexpr Clocks kClocks = warp_group_clocks(Rows::kScaled);
  static constexpr int kTurns = 1;
  static constexpr int kLaneBytes = 0;
  static constexpr auto kKernel = &hopper_kernel<Arch, Rows>;
};
template <class Arch, class Rows>
struct TileOf<Arch, Rows, cuda::RolesTile> {
  using Smem = RolesSmem<Rows>;
  static constexpr int kMeeting = Meeting::kMostParts;
  static constexpr Clocks kClocks = warp_group_clocks(Rows::kScaled);
  static constexpr int kTurns = 1;
  static constexpr int kLaneBytes = 0;
  static constexpr auto kKernel = &roles_kernel<Arch, Rows>;
};
template <class Arch, class Rows, int Heads, int Groups, int Slots, int Batch>
struct TileOf<Arch, Rows, cuda::FewHeadsTile<Heads, Groups, Slots, Batch>> {
  using Tile = cuda::FewHeadsTile<Heads, Groups, Slots, Batch>;
  using Smem = FewHeadsSmem<Rows, Tile>;
  static constexpr int kMeeting = 0;
  static constexpr Clocks kClocks = few_heads_clocks(Heads, Rows::kScaled);
  static constexpr int kTurns = 1;
  static constexpr int kLaneBytes = 0;
  static constexpr auto kKernel = &few_heads_kernel<Arch, Rows, Tile>;
};

template <class Arch, class Rows, class Tile>
TileKernel tile_kernel() {
  using Of = TileOf<Arch, Rows, Tile>;
  using Smem = typename Of::Smem;
  static_assert(sizeof(Smem) <= Arch::kSmemBytes);
  static_assert(Tile::kCtas * (sizeof(Smem) + 1024) <= Arch::kSmemSmBytes);
  return {{Tile::kCtaHeads, Tile::kTokens, Tile::kCtas, Arch::kCluster, Of::kMeeting, Of::kClocks, Of::kTurns},
          Tile::kThreads,
          static_cast<int>(sizeof(Smem)),
          Of::kLaneBytes,
          reinterpret_cast<const void*>(Of::kKernel)};
}

template <class Arch, class Rows>
RowKernels row_kernels() {
  using Tiles = std::conditional_t<Rows::kScaled, typename Arch::Fp8Tiles, typename Arch::Bf16Tiles>;
  const auto all = []<class... Tile>(cuda::TileList<Tile...>) -> RowKernels {
    static_assert(sizeof...(Tile) <= kMostTiles);
    return {Rows::kName, Rows::kFormat, Rows::kRope, sizeof...(Tile), {tile_kernel<Arch, Rows, Tile>()...}};
  };
  return all(Tiles{});
}

template <class Arch>
ConfigKernels make_kernels() {
  static const RowKernels rows[] = {row_kernels<Arch, Fp8Rows<64>>(), row_kernels<Arch, Bf16Rows<64>>(),
                                    row_kernels<Arch, Fp8Rows<0>>(), row_kernels<Arch, Bf16Rows<0>>()};
  // Where kernels start early, a CTA may find another of its grid where there is room, and a multiprocessor none.
  constexpr int kAlone = cuda::starts_early(Arch::kSm) ? Arch::kSmemSmBytes / 2 : 0;
  static_assert(kAlone <= Arch::kSmemBytes);
  return {Arch::kSm, rows, reinterpret_cast<const void*>(&merge_kernel<Arch>), kAlone};
}

}  // namespace sievemla::stage::attention
