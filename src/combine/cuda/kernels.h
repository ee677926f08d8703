// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/cuda/kernels.h -- the kernel of stage 4 of a config as data. Plain C++.
#pragma once
#include <span>

#include "combine/cuda/params.h"

namespace sievemla::stage::combine {

struct ConfigKernels {
  int sm;               // of the config, as cuda::Config
  const void* combine;  // __global__ void (CudaParams), a CTA of kThreads a row
};
inline constexpr int kThreads = 128;

// In the order of cuda::configs(). Written by CMake.
std::span<const ConfigKernels> config_kernels();

}  // namespace sievemla::stage::combine
