// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/config.cuh -- makes the Config of an architecture; instantiated once, in that config's own library.
#pragma once
#include "cuda/arch/arch.h"
#include "cuda/config.h"

namespace sievemla::cuda {

template <CudaArch Arch>
__global__ void probe_kernel() {}

template <CudaArch Arch>
Config make_config(const char* name) {
  return {name, Arch::kSm, Arch::kSmemBytes, Arch::kCluster, reinterpret_cast<const void*>(&probe_kernel<Arch>)};
}

}  // namespace sievemla::cuda
