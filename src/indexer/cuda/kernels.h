// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/kernels.h -- the kernels of stage 1 of a config as data. Plain C++.
#pragma once
#include <span>

#include "indexer/cuda/params.h"

namespace sievemla::stage::indexer {

// Many rows a source: __global__ void (CudaScoreParams, int). A CTA per `rows` rows and `keys` keys, told the blocks of
// keys; or, where `keys` is 0, a CTA per multiprocessor for `rows` rows from one on, which it is told.
struct HeldKernel {
  const void* kernel;
  int threads, smem_bytes, rows, keys;
};
// Few: __global__ void (CudaScoreParams, int fold), `ctas` CTAs a multiprocessor.
// Columns: heads, in sixteens, of the rows that share keys.
struct PassKernel {
  const void* kernel;
  int threads, ctas;
  int fixed_bytes, column_bytes, most_columns;
  int smem_bytes(int columns) const { return fixed_bytes + columns * column_bytes; }
};
inline constexpr int kMostFold = 8, kMostHeads = 64;
constexpr int padded_heads(int heads) { return (heads + 15) / 16 * 16; }
constexpr int columns_of(int heads, int fold) { return padded_heads(heads) * fold; }

struct ConfigKernels {
  int sm;                   // of the config, as cuda::Config
  HeldKernel held[2];       // up to 32 heads, and more
  HeldKernel shortlist[2];  // the same, or none
  PassKernel pass[2][2];    // one row and several; of up to 32 heads, and more
  const void* write_keys;   // __global__ void (WriteKeysParams), a warp a token
  const void* write_layer;  // __global__ void (WriteLayerParams), a CTA a token
  const void* queries;      // __global__ void (QueryParams), a warp a head
};

// In the order of cuda::configs(). Written by CMake.
std::span<const ConfigKernels> config_kernels();

}  // namespace sievemla::stage::indexer
