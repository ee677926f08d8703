// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/config.h -- a config as the host sees it: one per architecture header that this build was made for.
#pragma once
#include <span>

namespace sievemla::cuda {

struct Config {
  const char* name;   // "sm120"
  int sm;             // 120
  int smem_bytes;     // what its kernels may opt in to
  int cluster;        // most CTAs of a cluster that they make; 1: none
  const void* probe;  // a kernel that does nothing: if it loads on a device, so do the others of its config
};

// Newest first. Written by CMake from SIEVEMLA_CUDA_CONFIGS; empty in a build without CUDA.
std::span<const Config> configs();

}  // namespace sievemla::cuda
