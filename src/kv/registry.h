// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/registry.h -- the kernels of the caches, best first. Their arguments are checked (src/api/kv_cache.cc).
#pragma once
#include <span>

#include "base/registry.h"
#include "sievemla/kv_cache.h"

namespace sievemla::kv {

using WriteLatentKernel = base::Kernel<WriteLatentArgs>;
using GatherLatentKernel = base::Kernel<GatherLatentArgs>;
using GatherIndexKeysKernel = base::Kernel<GatherIndexKeysArgs>;

std::span<const WriteLatentKernel> write_latent_kernels();
std::span<const GatherLatentKernel> gather_latent_kernels();
std::span<const GatherIndexKeysKernel> gather_index_keys_kernels();

// Builds with CUDA only.
void write_latent_cuda(const WriteLatentArgs& args, const base::Exec& exec);
base::Lack write_latent_cuda_lacks(const WriteLatentArgs& args);
void gather_latent_cuda(const GatherLatentArgs& args, const base::Exec& exec);
base::Lack gather_latent_cuda_lacks(const GatherLatentArgs& args);
void gather_index_keys_cuda(const GatherIndexKeysArgs& args, const base::Exec& exec);
base::Lack gather_index_keys_cuda_lacks(const GatherIndexKeysArgs& args);
// Loads the kernels of a config on the current device.
void kv_cuda_prepare(int config_sm);

}  // namespace sievemla::kv
