// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/launch.cuh -- the kernels of one config as data, and their launch.
#pragma once
#include <type_traits>

#include "attention/cuda/attention.cuh"
#include "attention/cuda/choice.h"

namespace sievemla::stage::attention {

struct TileKernel {
  TileShape shape;
  int threads, smem_bytes;
  void (*kernel)(CudaParams, int groups);
};

// The tiles of a row type, by ascending heads.
struct RowKernels {
  const char* rows;
  KvFormat format;
  int rope;
  int count;
  TileKernel tile[4];
};

template <class Arch, class Rows, class Tile>
constexpr TileKernel tile_kernel() {
  using Smem = AttentionSmem<Rows, Tile>;
  static_assert(sizeof(Smem) <= Arch::kSmemBytes);
  static_assert(Tile::kCtas * (sizeof(Smem) + 1024) <= Arch::kSmemSmBytes);
  return {{Tile::kCtaHeads, Tile::kTokens, Tile::kCtas, Tile::kTokens * (16 + Tile::kCtaHeads)},
          Tile::kThreads,
          static_cast<int>(sizeof(Smem)),
          attention_kernel<Rows, Tile>};
}

template <class Arch, class Rows>
constexpr RowKernels row_kernels() {
  using Tiles = std::conditional_t<Rows::kScaled, typename Arch::Fp8Tiles, typename Arch::Bf16Tiles>;
  RowKernels r{Rows::kName, Rows::kFormat, Rows::kRope, 3, {}};
  r.tile[0] = tile_kernel<Arch, Rows, typename Tiles::For8>();
  r.tile[1] = tile_kernel<Arch, Rows, typename Tiles::For16>();
  r.tile[2] = tile_kernel<Arch, Rows, typename Tiles::For32>();
  if constexpr (!std::is_void_v<typename Tiles::For64>) {
    r.tile[3] = tile_kernel<Arch, Rows, typename Tiles::For64>();
    r.count = 4;
  }
  return r;
}

// Enqueues; the arguments are right and the kernel is prepared.
inline cudaError_t launch(const TileKernel& kernel, CudaParams p, const Choice& choice, cudaStream_t stream) {
  p.parts = choice.parts, p.chunk = choice.chunk, p.target = choice.target, p.merge_here = choice.merge_here;
  kernel.kernel<<<static_cast<unsigned>(choice.items * choice.groups), kernel.threads, kernel.smem_bytes, stream>>>(p, choice.groups);
  if (!choice.merge_here)
    merge_kernel<<<static_cast<unsigned>(p.units * p.fold * p.heads), 128, 0, stream>>>(p, choice.groups, kernel.shape.heads,
                                                                                         kernel.shape.tokens);
  return cudaGetLastError();
}

}  // namespace sievemla::stage::attention
