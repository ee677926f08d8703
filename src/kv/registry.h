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

}  // namespace sievemla::kv
