// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/registry.h -- the kernels of stage 2: one list per public function, best first. Their arguments are checked.
#pragma once
#include <cstdint>
#include <span>

#include "base/registry.h"
#include "base/shortlist.h"
#include "sievemla/context_parallel.h"
#include "sievemla/topk.h"

namespace sievemla::stage::topk {

struct PositionsToSlotsArgs {
  TensorView positions;  // as positions_to_slots
  SlotMap map;
  TensorView slots;
};

// The selection from shortlists, in its steps.
enum class ShortlistStep {
  guess,   // thresholds, from the sample that the rows hold
  choose,  // from the rows; the lengths of rows that cannot be chosen from go to `left`, 0 for the others
  rest,    // from scores, of the rows whose length is not 0; the other outputs stay
};
struct ChooseArgs {
  TopkArgs topk;  // scores: of `rest` alone, but as wide always
  ShortlistStep step;
  base::Shortlist* rows;
  TensorView left;
};

using TopkKernel = base::Kernel<TopkArgs, TopkBounds>;
using PositionsToSlotsKernel = base::Kernel<PositionsToSlotsArgs>;
using ExpandPoolsKernel = base::Kernel<ExpandPoolsArgs>;
using CandidatesKernel = base::Kernel<CandidatesArgs>;
using MergeTopkKernel = base::Kernel<MergeTopkArgs, MergeTopkBounds>;
using ShardSlotsKernel = base::Kernel<ShardSlotsArgs>;
using ChooseKernel = base::Kernel<ChooseArgs>;

std::span<const TopkKernel> topk_kernels();
std::span<const PositionsToSlotsKernel> positions_to_slots_kernels();
std::span<const ExpandPoolsKernel> expand_pools_kernels();
std::span<const CandidatesKernel> topk_candidates_kernels();
std::span<const MergeTopkKernel> merge_topk_kernels();
std::span<const ShardSlotsKernel> shard_slots_kernels();
std::span<const ChooseKernel> choose_kernels();  // none for a backend whose scorer makes none

// What the rows name. The reference is the specification: it sorts.
void select_reference(const TopkArgs& args, const base::Exec& exec);
std::int64_t select_reference_workspace_bytes(const Backend& backend, const TopkBounds& bounds);
void positions_to_slots_reference(const PositionsToSlotsArgs& args, const base::Exec& exec);
void expand_pools_reference(const ExpandPoolsArgs& args, const base::Exec& exec);
void topk_candidates_reference(const CandidatesArgs& args, const base::Exec& exec);
void merge_topk_reference(const MergeTopkArgs& args, const base::Exec& exec);
std::int64_t merge_topk_reference_bytes(const Backend& backend, const MergeTopkBounds& bounds);
void shard_slots_reference(const ShardSlotsArgs& args, const base::Exec& exec);

// Rows in parallel.
void positions_to_slots_cpu(const PositionsToSlotsArgs& args, const base::Exec& exec);
void expand_pools_cpu(const ExpandPoolsArgs& args, const base::Exec& exec);
void topk_candidates_cpu(const CandidatesArgs& args, const base::Exec& exec);
void shard_slots_cpu(const ShardSlotsArgs& args, const base::Exec& exec);

// By the backend's topk (merge.h).
void merge_topk_cpu(const MergeTopkArgs& args, const base::Exec& exec);
std::int64_t merge_topk_bytes(const Backend& backend, const MergeTopkBounds& bounds);

// Builds with CUDA only.
void topk_cuda(const TopkArgs& args, const base::Exec& exec);
base::Lack topk_cuda_lacks(const TopkArgs& args);
std::int64_t topk_cuda_bytes(const Backend& backend, const TopkBounds& bounds);
void positions_to_slots_cuda(const PositionsToSlotsArgs& args, const base::Exec& exec);
base::Lack positions_to_slots_cuda_lacks(const PositionsToSlotsArgs& args);
void expand_pools_cuda(const ExpandPoolsArgs& args, const base::Exec& exec);
base::Lack expand_pools_cuda_lacks(const ExpandPoolsArgs& args);
void topk_candidates_cuda(const CandidatesArgs& args, const base::Exec& exec);
base::Lack topk_candidates_cuda_lacks(const CandidatesArgs& args);
void merge_topk_cuda(const MergeTopkArgs& args, const base::Exec& exec);
base::Lack merge_topk_cuda_lacks(const MergeTopkArgs& args);
void shard_slots_cuda(const ShardSlotsArgs& args, const base::Exec& exec);
base::Lack shard_slots_cuda_lacks(const ShardSlotsArgs& args);
void choose_cuda(const ChooseArgs& args, const base::Exec& exec);
base::Lack choose_cuda_lacks(const ChooseArgs& args);
// Loads the kernels of a config on the current device.
void topk_cuda_prepare(int config_sm);

}  // namespace sievemla::stage::topk
