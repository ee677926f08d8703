// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/registry.cc -- the rows of stage 3.
#include "attention/registry.h"

#include "cuda/device.h"

namespace sievemla::stage::attention {
namespace {

// name, backend, needs, runs_here, lacks, run, workspace_bytes

constexpr AttentionKernel kAttention[] = {
#if SIEVEMLA_WITH_CUDA
    {"attention_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, attention_cuda_lacks,
     attention_cuda, attention_cuda_bytes},
#endif
    {"attention_cpu_portable", BackendKind::cpu, "", nullptr, nullptr, attention_cpu, attention_cpu_bytes},
    {"attention_reference", BackendKind::reference, "", nullptr, nullptr, attention_reference,
     attention_reference_bytes},
};

}  // namespace

std::span<const AttentionKernel> attention_kernels() { return kAttention; }

}  // namespace sievemla::stage::attention
