// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/kernels.h -- the attention kernels of a config as data. Plain C++.
#pragma once
#include <cstddef>
#include <span>

#include "attention/cuda/choice.h"
#include "attention/cuda/params.h"
#include "sievemla/kv_format.h"

namespace sievemla::stage::attention {

struct TileKernel {
  TileShape shape;
  int threads, smem_bytes;
  int lane_bytes;      // of shared memory, written and read for a lane by design; 0: not worked out
  const void* kernel;  // __global__ void (CudaParams, int groups)
};

inline constexpr int kMostTiles = 5;

// The tiles of a row type, by ascending heads.
struct RowKernels {
  const char* rows;
  KvFormat format;
  int rope;
  int count;
  TileKernel tile[kMostTiles];
  std::span<const TileKernel> tiles() const { return {tile, static_cast<std::size_t>(count)}; }
};

struct ConfigKernels {
  int sm;  // of the config, as cuda::Config
  std::span<const RowKernels> rows;
  const void* merge;  // __global__ void (CudaParams, int groups, int group_heads)
  int alone_bytes;    // of shared memory that keep a second CTA off a multiprocessor; 0: not needed
};

// In the order of cuda::configs(). Written by CMake.
std::span<const ConfigKernels> config_kernels();

}  // namespace sievemla::stage::attention
