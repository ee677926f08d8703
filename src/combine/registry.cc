// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/registry.cc -- the rows of stage 4.
#include "combine/registry.h"

#include "cuda/device.h"

namespace sievemla::stage::combine {
namespace {

// name, backend, needs, runs_here, lacks, run, workspace_bytes

constexpr CombineKernel kCombine[] = {
#if SIEVEMLA_WITH_CUDA
    {"combine_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, combine_cuda_lacks,
     combine_cuda, nullptr},
#endif
    {"combine_cpu_portable", BackendKind::cpu, "", nullptr, nullptr, combine_cpu, nullptr},
    {"combine_reference", BackendKind::reference, "", nullptr, nullptr, combine_reference, nullptr},
};

}  // namespace

std::span<const CombineKernel> combine_kernels() { return kCombine; }

}  // namespace sievemla::stage::combine
