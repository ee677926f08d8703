// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/registry.cc -- the rows of stage 3.
#include "attention/registry.h"

#include "attention/cpu/attention.h"
#include "cpu/isa/isa.h"

namespace sievemla::stage::attention {
namespace {

using cpu::Isa;

template <Isa kIsa, const Tier& kTier>
constexpr AttentionKernel tier(const char* name, std::string (*lacks)(const AttentionArgs&)) {
  return {name,  BackendKind::cpu,     cpu::info(kIsa).needs,     cpu::may_use<kIsa>,
          lacks, attention_cpu<kTier>, attention_cpu_bytes<kTier>};
}

// name, backend, needs, runs_here, lacks, run, workspace_bytes

constexpr AttentionKernel kAttention[] = {
#if defined(__x86_64__)
    tier<Isa::amx, kAmx>("attention_cpu_amx", lacks_f32),
    tier<Isa::avx512bf16, kAvx512Bf16>("attention_cpu_avx512bf16", lacks_f32),
    tier<Isa::avx512, kAvx512>("attention_cpu_avx512", nullptr),
    tier<Isa::avx2, kAvx2>("attention_cpu_avx2", nullptr),
#endif
    tier<Isa::portable, kPortable>("attention_cpu_portable", nullptr),
    {"attention_reference", BackendKind::reference, "", nullptr, nullptr, attention_reference,
     attention_reference_bytes},
};

}  // namespace

std::span<const AttentionKernel> attention_kernels() { return kAttention; }

}  // namespace sievemla::stage::attention
