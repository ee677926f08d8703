// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/registry.cc -- the kernels of stage 2.
#include "topk/registry.h"

namespace sievemla::stage::topk {
namespace {

constexpr TopkKernel kTopk[] = {
    {"topk_cpu_portable", BackendKind::cpu, "", nullptr, nullptr, select_cpu, select_cpu_workspace_bytes},
    {"topk_reference", BackendKind::reference, "", nullptr, nullptr, select_reference,
     select_reference_workspace_bytes},
};

constexpr PositionsToSlotsKernel kPositionsToSlots[] = {
    {"positions_to_slots_cpu", BackendKind::cpu, "", nullptr, nullptr, positions_to_slots_cpu, nullptr},
    {"positions_to_slots_reference", BackendKind::reference, "", nullptr, nullptr, positions_to_slots_reference,
     nullptr},
};

constexpr ExpandPoolsKernel kExpandPools[] = {
    {"expand_pools_cpu", BackendKind::cpu, "", nullptr, nullptr, expand_pools_cpu, nullptr},
    {"expand_pools_reference", BackendKind::reference, "", nullptr, nullptr, expand_pools_reference, nullptr},
};

}  // namespace

std::span<const TopkKernel> topk_kernels() { return kTopk; }
std::span<const PositionsToSlotsKernel> positions_to_slots_kernels() { return kPositionsToSlots; }
std::span<const ExpandPoolsKernel> expand_pools_kernels() { return kExpandPools; }

}  // namespace sievemla::stage::topk
