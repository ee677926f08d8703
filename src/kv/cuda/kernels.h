// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cuda/kernels.h -- the writers and gatherers of a config as data. Plain C++.
#pragma once
#include <span>

#include "kv/cuda/params.h"

namespace sievemla::kv {

struct ConfigKernels {
  int sm;                    // of the config, as cuda::Config
  const void* write_latent;  // __global__ void (cuda::LatentParams), a CTA a row
  const void* gather_latent;
  const void* gather_index_keys;  // __global__ void (IndexGatherParams)
};

// In the order of cuda::configs(). Written by CMake.
std::span<const ConfigKernels> config_kernels();

}  // namespace sievemla::kv
