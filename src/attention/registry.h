// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/registry.h -- the kernels of stage 3, best first within a backend.
#pragma once
#include <span>

#include "base/registry.h"
#include "sievemla/attention.h"

namespace sievemla::stage::attention {

// Kernels get checked arguments, and `lanes` of their bounds is at least Rows::lanes of every token.
using AttentionKernel = base::Kernel<AttentionArgs, AttentionBounds>;
std::span<const AttentionKernel> attention_kernels();

void attention_reference(const AttentionArgs& args, const base::Exec& exec);
std::int64_t attention_reference_bytes(const Backend& backend, const AttentionBounds& bounds);

// Builds with CUDA only.
void attention_cuda(const AttentionArgs& args, const base::Exec& exec);
base::Lack attention_cuda_lacks(const AttentionArgs& args);
std::int64_t attention_cuda_bytes(const Backend& backend, const AttentionBounds& bounds);
// Loads the kernels of a config on the current device.
void attention_cuda_prepare(int config_sm);

}  // namespace sievemla::stage::attention
