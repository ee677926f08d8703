// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/registry.cc -- the rows of stage 1.
#include "indexer/registry.h"

#include "cpu/isa/isa.h"
#include "cuda/device.h"
#include "indexer/cpu/heads.h"
#include "indexer/cpu/scores.h"

namespace sievemla::stage::indexer {
namespace {

using cpu::Isa;

// A tier whose operands are bf16 takes bf16 and e4m3 ones, whose products are exact in f32: all tiers err alike.
template <Isa kIsa, const Tier& kTier>
constexpr IndexScoresKernel scores_tier(const char* name) {
  return {name,
          BackendKind::cpu,
          cpu::info(kIsa).needs,
          cpu::may_use<kIsa>,
          kIsa >= Isa::avx512bf16 ? lacks_f32 : nullptr,
          index_scores_cpu<kTier>,
          index_scores_cpu_bytes<kTier>};
}

template <Isa kIsa, class Args>
constexpr base::Kernel<Args> heads_tier(const char* name, void (*run)(const Args&, const base::Exec&)) {
  return {name, BackendKind::cpu, cpu::info(kIsa).needs, cpu::may_use<kIsa>, nullptr, run, nullptr};
}

// name, backend, needs, runs_here, lacks, run, workspace_bytes

constexpr WriteIndexKeysKernel kWriteIndexKeys[] = {
#if SIEVEMLA_WITH_CUDA
    {"write_index_keys_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device,
     write_index_keys_cuda_lacks, write_index_keys_cuda, nullptr},
#endif
#if defined(__x86_64__)
    heads_tier<Isa::avx512>("write_index_keys_cpu_avx512", write_index_keys_cpu<cpu::codec::kAvx512>),
    heads_tier<Isa::avx2>("write_index_keys_cpu_avx2", write_index_keys_cpu<cpu::codec::kAvx2>),
#endif
    heads_tier<Isa::portable>("write_index_keys_cpu_portable", write_index_keys_cpu<cpu::codec::kPortable>),
    {"write_index_keys_reference", BackendKind::reference, "", nullptr, nullptr, write_index_keys_reference, nullptr},
};

constexpr WriteLayerKernel kWriteLayer[] = {
#if SIEVEMLA_WITH_CUDA
    {"write_layer_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, write_layer_cuda_lacks,
     write_layer_cuda, nullptr},
#endif
    {"write_layer_cpu_portable", BackendKind::cpu, "", nullptr, write_layer_host_lacks, write_layer_host, nullptr},
    {"write_layer_reference", BackendKind::reference, "", nullptr, write_layer_host_lacks, write_layer_host, nullptr},
};

constexpr IndexQueriesKernel kIndexQueries[] = {
#if SIEVEMLA_WITH_CUDA
    {"index_queries_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, index_queries_cuda_lacks,
     index_queries_cuda, nullptr},
#endif
#if defined(__x86_64__)
    heads_tier<Isa::avx512>("index_queries_cpu_avx512", index_queries_cpu<cpu::codec::kAvx512>),
    heads_tier<Isa::avx2>("index_queries_cpu_avx2", index_queries_cpu<cpu::codec::kAvx2>),
#endif
    heads_tier<Isa::portable>("index_queries_cpu_portable", index_queries_cpu<cpu::codec::kPortable>),
    {"index_queries_reference", BackendKind::reference, "", nullptr, nullptr, index_queries_reference, nullptr},
};

constexpr IndexScoresKernel kIndexScores[] = {
#if SIEVEMLA_WITH_CUDA
    {"index_scores_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, index_scores_cuda_lacks,
     index_scores_cuda, nullptr},
#endif
#if defined(__x86_64__)
    scores_tier<Isa::amx, kAmx>("index_scores_cpu_amx"),
    scores_tier<Isa::avx512bf16, kAvx512Bf16>("index_scores_cpu_avx512bf16"),
    scores_tier<Isa::avx512, kAvx512>("index_scores_cpu_avx512"),
    scores_tier<Isa::avx2, kAvx2>("index_scores_cpu_avx2"),
#endif
    scores_tier<Isa::portable, kPortable>("index_scores_cpu_portable"),
    {"index_scores_reference", BackendKind::reference, "", nullptr, nullptr, index_scores_reference,
     index_scores_reference_bytes},
};

#if SIEVEMLA_WITH_CUDA
constexpr IndexShortlistKernel kIndexShortlists[] = {{"index_shortlist_cuda", BackendKind::cuda,
                                                      "an NVIDIA GPU of sm_90", cuda::any_device,
                                                      index_shortlist_cuda_lacks, index_shortlist_cuda, nullptr}};
#else
constexpr std::span<const IndexShortlistKernel> kIndexShortlists;
#endif

}  // namespace

std::span<const WriteIndexKeysKernel> write_index_keys_kernels() { return kWriteIndexKeys; }
std::span<const WriteLayerKernel> write_layer_kernels() { return kWriteLayer; }
std::span<const IndexQueriesKernel> index_queries_kernels() { return kIndexQueries; }
std::span<const IndexScoresKernel> index_scores_kernels() { return kIndexScores; }
std::span<const IndexShortlistKernel> index_shortlist_kernels() { return kIndexShortlists; }

}  // namespace sievemla::stage::indexer
