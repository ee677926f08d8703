// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/registry.h -- the kernels of stage 4, best first within a backend.
#pragma once
#include <span>

#include "base/registry.h"
#include "sievemla/combine.h"

namespace sievemla::stage::combine {

using CombineKernel = base::Kernel<CombineArgs, base::NoBounds>;
std::span<const CombineKernel> combine_kernels();

void combine_reference(const CombineArgs& args, const base::Exec& exec);
void combine_cpu(const CombineArgs& args, const base::Exec& exec);
#if SIEVEMLA_WITH_CUDA
base::Lack combine_cuda_lacks(const CombineArgs& args);
void combine_cuda(const CombineArgs& args, const base::Exec& exec);
void combine_cuda_prepare(int config_sm);
#endif

}  // namespace sievemla::stage::combine
