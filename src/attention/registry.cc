// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/registry.cc -- the rows of stage 3.
#include "attention/registry.h"

#include "attention/cpu/attention.h"
#include "cpu/isa/isa.h"
#include "cuda/device.h"

namespace sievemla::stage::attention {
namespace {

using cpu::Isa;

// A tier whose operands are bf16 takes bf16 and packed rows, and its weights are rounded to 2^-8 each.
template <Isa kIsa, const Tier& kTier>
constexpr AttentionKernel tier(const char* name) {
  constexpr bool kBf16 = kIsa >= Isa::avx512bf16;
  return {name,
          BackendKind::cpu,
          cpu::info(kIsa).needs,
          cpu::may_use<kIsa>,
          kBf16 ? lacks_f32 : nullptr,
          attention_cpu<kTier>,
          attention_cpu_bytes<kTier>,
          kBf16 ? 2e-3 : 0};
}

// name, backend, needs, runs_here, lacks, run, workspace_bytes

constexpr AttentionKernel kAttention[] = {
#if SIEVEMLA_WITH_CUDA
    {"attention_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, attention_cuda_lacks,
     attention_cuda, attention_cuda_bytes},
#endif
#if defined(__x86_64__)
    tier<Isa::amx, kAmx>("attention_cpu_amx"),
    tier<Isa::avx512bf16, kAvx512Bf16>("attention_cpu_avx512bf16"),
    tier<Isa::avx512, kAvx512>("attention_cpu_avx512"),
    tier<Isa::avx2, kAvx2>("attention_cpu_avx2"),
#endif
    tier<Isa::portable, kPortable>("attention_cpu_portable"),
    {"attention_reference", BackendKind::reference, "", nullptr, nullptr, attention_reference,
     attention_reference_bytes},
};

}  // namespace

std::span<const AttentionKernel> attention_kernels() { return kAttention; }

}  // namespace sievemla::stage::attention
