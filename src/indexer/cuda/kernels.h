// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/kernels.h -- the kernels of stage 1 of a config as data. Plain C++.
#pragma once
#include <span>

#include "indexer/cuda/params.h"

namespace sievemla::stage::indexer {

// Many rows a source: __global__ void (CudaScoreParams, int key_blocks), a CTA per kHeldRows rows and `keys` keys.
struct HeldKernel {
  const void* kernel;
  int threads, smem_bytes, keys;
};
// Few: __global__ void (CudaScoreParams, int fold), `ctas` CTAs a multiprocessor.
struct PassKernel {
  const void* kernel;
  int threads, ctas;
  int (*smem_bytes)(int heads, int fold);
};
inline constexpr int kHeldRows = 64, kMostFold = 8, kMostHeads = 64;

struct ConfigKernels {
  int sm;  // of the config, as cuda::Config
  HeldKernel held;
  PassKernel pass;
  const void* write_keys;  // __global__ void (WriteKeysParams), a warp a token
  const void* queries;     // __global__ void (QueryParams), a warp a head
};

// In the order of cuda::configs(). Written by CMake.
std::span<const ConfigKernels> config_kernels();

}  // namespace sievemla::stage::indexer
