// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/registry.cc -- one row per kernel.
#include "kv/registry.h"

#include "cpu/isa/isa.h"
#include "cuda/device.h"
#include "kv/cpu/rows.h"
#include "kv/reference.h"

namespace sievemla::kv {
namespace {

template <class Args>
constexpr base::Kernel<Args> kernel(const char* name, BackendKind backend,
                                    void (*run)(const Args&, const base::Exec&)) {
  return {name, backend, "", nullptr, nullptr, run, nullptr};
}

using sievemla::cpu::Isa;
namespace codec = sievemla::cpu::codec;

template <Isa kIsa, class Args, const Codec& kCodec>
constexpr base::Kernel<Args> tier(const char* name) {
  return {name,
          BackendKind::cpu,
          sievemla::cpu::info(kIsa).needs,
          sievemla::cpu::may_use<kIsa>,
          nullptr,
          run_cpu<Args, kCodec>,
          nullptr};
}

#if SIEVEMLA_WITH_CUDA
template <class Args>
constexpr base::Kernel<Args> on_cuda(const char* name, base::Lack (*lacks)(const Args&),
                                     void (*run)(const Args&, const base::Exec&)) {
  return {name, BackendKind::cuda, "an NVIDIA GPU from sm_80 on", sievemla::cuda::any_device, lacks, run, nullptr};
}
#endif

constexpr WriteLatentKernel kWriteLatent[] = {
#if SIEVEMLA_WITH_CUDA
    on_cuda("write_latent_cuda", write_latent_cuda_lacks, write_latent_cuda),
#endif
#if defined(__x86_64__)
    tier<Isa::avx512, WriteLatentArgs, codec::kAvx512>("write_latent_cpu_avx512"),
    tier<Isa::avx2, WriteLatentArgs, codec::kAvx2>("write_latent_cpu_avx2"),
#endif
    tier<Isa::portable, WriteLatentArgs, codec::kPortable>("write_latent_cpu_portable"),
    kernel("write_latent_reference", BackendKind::reference, run_reference<WriteLatentArgs>),
};
constexpr GatherLatentKernel kGatherLatent[] = {
#if SIEVEMLA_WITH_CUDA
    on_cuda("gather_latent_cuda", gather_latent_cuda_lacks, gather_latent_cuda),
#endif
#if defined(__x86_64__)
    tier<Isa::avx512, GatherLatentArgs, codec::kAvx512>("gather_latent_cpu_avx512"),
    tier<Isa::avx2, GatherLatentArgs, codec::kAvx2>("gather_latent_cpu_avx2"),
#endif
    tier<Isa::portable, GatherLatentArgs, codec::kPortable>("gather_latent_cpu_portable"),
    kernel("gather_latent_reference", BackendKind::reference, run_reference<GatherLatentArgs>),
};
constexpr GatherIndexKeysKernel kGatherIndexKeys[] = {
#if SIEVEMLA_WITH_CUDA
    on_cuda("gather_index_keys_cuda", gather_index_keys_cuda_lacks, gather_index_keys_cuda),
#endif
    kernel("gather_index_keys_cpu_portable", BackendKind::cpu, gather_index_keys_cpu),
    kernel("gather_index_keys_reference", BackendKind::reference, run_reference<GatherIndexKeysArgs>),
};

}  // namespace

std::span<const WriteLatentKernel> write_latent_kernels() { return kWriteLatent; }
std::span<const GatherLatentKernel> gather_latent_kernels() { return kGatherLatent; }
std::span<const GatherIndexKeysKernel> gather_index_keys_kernels() { return kGatherIndexKeys; }

}  // namespace sievemla::kv
