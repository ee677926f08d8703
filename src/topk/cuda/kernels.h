// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/kernels.h -- the top-k kernels of a config as data. Plain C++.
#pragma once
#include <span>

#include "topk/cuda/merge_params.h"
#include "topk/cuda/params.h"

namespace sievemla::stage::topk {

// __global__ void (CudaParams), a CTA per row and part.
struct SelectKernel {
  const void* kernel;
  int threads, smem_bytes;
};
inline constexpr int kTogether = 8;            // CTAs that have a row together
inline constexpr int kMostTogether = 1 << 17;  // of its scores, at most

struct ConfigKernels {
  int sm;                               // of the config, as cuda::Config
  SelectKernel of_list, alone, shared;  // rows that fit a list; of any length; the same, by `parts` CTAs each
  SelectKernel together;                // the same by kTogether CTAs, a cluster; null where there are none
  SelectKernel guess, choose;           // of rows by shortlists: their thresholds, and the selection
  const void* slots;                    // __global__ void (const int* positions, int64 row, int k, CudaIds)
  const void* pools;                    // __global__ void (PoolParams)
  const void* candidates;               // __global__ void (CandidatesParams)
  const void* order;                    // __global__ void (OrderParams)
  const void* pick;                     // __global__ void (PickParams)
};

// In the order of cuda::configs(). Written by CMake.
std::span<const ConfigKernels> config_kernels();

}  // namespace sievemla::stage::topk
