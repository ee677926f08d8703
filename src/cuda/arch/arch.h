// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/arch.h -- what a config must state about its GPUs. One header per config beside this one; each names
// only what differs from the config it derives from.
#pragma once
#include <concepts>

namespace sievemla::cuda {

template <class T>
concept CudaArch = requires {
  { T::kSm } -> std::convertible_to<int>;             // compute capability of its machine code, 10 * major + minor
  { T::kSmemBytes } -> std::convertible_to<int>;      // most dynamic shared memory that one CTA may opt in to
  { T::kFp8Mma } -> std::convertible_to<bool>;        // mma.sync takes e4m3 operands
  { T::kWarpgroupMma } -> std::convertible_to<bool>;  // wgmma: its machine code is sm_90a's, which all sm_90 parts run
  { T::kCluster } -> std::convertible_to<int>;        // CTAs of a cluster, at most; 1: no clusters
} && T::kSm >= 80 && T::kSmemBytes % 1024 == 0;

}  // namespace sievemla::cuda
