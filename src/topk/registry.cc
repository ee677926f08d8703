// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/registry.cc -- the kernels of stage 2.
#include "topk/registry.h"

#include "cpu/isa/isa.h"
#include "cuda/device.h"
#include "topk/cpu/select.h"

namespace sievemla::stage::topk {
namespace {

using cpu::Isa;

template <Isa kIsa, const Tier& kTier>
constexpr TopkKernel tier(const char* name) {
  return {name,    BackendKind::cpu,  cpu::info(kIsa).needs, cpu::may_use<kIsa>,
          nullptr, select_cpu<kTier>, select_cpu_bytes};
}

constexpr TopkKernel kTopk[] = {
#if SIEVEMLA_WITH_CUDA
    {"topk_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, topk_cuda_lacks, topk_cuda,
     topk_cuda_bytes},
#endif
#if defined(__x86_64__)
    tier<Isa::avx512, kAvx512>("topk_cpu_avx512"),
    tier<Isa::avx2, kAvx2>("topk_cpu_avx2"),
#endif
    tier<Isa::portable, kPortable>("topk_cpu_portable"),
    {"topk_reference", BackendKind::reference, "", nullptr, nullptr, select_reference,
     select_reference_workspace_bytes},
};

constexpr PositionsToSlotsKernel kPositionsToSlots[] = {
#if SIEVEMLA_WITH_CUDA
    {"positions_to_slots_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device,
     positions_to_slots_cuda_lacks, positions_to_slots_cuda, nullptr},
#endif
    {"positions_to_slots_cpu", BackendKind::cpu, "", nullptr, nullptr, positions_to_slots_cpu, nullptr},
    {"positions_to_slots_reference", BackendKind::reference, "", nullptr, nullptr, positions_to_slots_reference,
     nullptr},
};

constexpr ExpandPoolsKernel kExpandPools[] = {
#if SIEVEMLA_WITH_CUDA
    {"expand_pools_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, expand_pools_cuda_lacks,
     expand_pools_cuda, nullptr},
#endif
    {"expand_pools_cpu", BackendKind::cpu, "", nullptr, nullptr, expand_pools_cpu, nullptr},
    {"expand_pools_reference", BackendKind::reference, "", nullptr, nullptr, expand_pools_reference, nullptr},
};

constexpr CandidatesKernel kCandidates[] = {
#if SIEVEMLA_WITH_CUDA
    {"topk_candidates_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device,
     topk_candidates_cuda_lacks, topk_candidates_cuda, nullptr},
#endif
    {"topk_candidates_cpu", BackendKind::cpu, "", nullptr, nullptr, topk_candidates_cpu, nullptr},
    {"topk_candidates_reference", BackendKind::reference, "", nullptr, nullptr, topk_candidates_reference, nullptr},
};

constexpr MergeTopkKernel kMergeTopk[] = {
#if SIEVEMLA_WITH_CUDA
    {"merge_topk_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, merge_topk_cuda_lacks,
     merge_topk_cuda, merge_topk_bytes},
#endif
    {"merge_topk_cpu", BackendKind::cpu, "", nullptr, nullptr, merge_topk_cpu, merge_topk_bytes},
    {"merge_topk_reference", BackendKind::reference, "", nullptr, nullptr, merge_topk_reference,
     merge_topk_reference_bytes},
};

constexpr ShardSlotsKernel kShardSlots[] = {
#if SIEVEMLA_WITH_CUDA
    {"shard_slots_cuda", BackendKind::cuda, "an NVIDIA GPU from sm_80 on", cuda::any_device, shard_slots_cuda_lacks,
     shard_slots_cuda, nullptr},
#endif
    {"shard_slots_cpu", BackendKind::cpu, "", nullptr, nullptr, shard_slots_cpu, nullptr},
    {"shard_slots_reference", BackendKind::reference, "", nullptr, nullptr, shard_slots_reference, nullptr},
};
#if SIEVEMLA_WITH_CUDA
constexpr ChooseKernel kChoose[] = {{"choose_cuda", BackendKind::cuda, "an NVIDIA GPU of sm_90", cuda::any_device,
                                     choose_cuda_lacks, choose_cuda, nullptr}};
#else
constexpr std::span<const ChooseKernel> kChoose;
#endif

}  // namespace

std::span<const TopkKernel> topk_kernels() { return kTopk; }
std::span<const PositionsToSlotsKernel> positions_to_slots_kernels() { return kPositionsToSlots; }
std::span<const ExpandPoolsKernel> expand_pools_kernels() { return kExpandPools; }
std::span<const CandidatesKernel> topk_candidates_kernels() { return kCandidates; }
std::span<const MergeTopkKernel> merge_topk_kernels() { return kMergeTopk; }
std::span<const ShardSlotsKernel> shard_slots_kernels() { return kShardSlots; }
std::span<const ChooseKernel> choose_kernels() { return kChoose; }

}  // namespace sievemla::stage::topk
