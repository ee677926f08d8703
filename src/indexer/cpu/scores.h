// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/scores.h -- index scores on the CPU, with the kernel of a tier.
#pragma once
#include <cstdint>

#include "base/registry.h"
#include "indexer/cpu/tier.h"
#include "sievemla/indexer.h"

namespace sievemla::stage::indexer {

// Defined for the tiers of tier.h, in scores.cc.
template <const Tier& kTier>
void index_scores_cpu(const IndexScoreArgs& args, const base::Exec& exec);
template <const Tier& kTier>
std::int64_t index_scores_cpu_bytes(const Backend& backend, const IndexScoreBounds& bounds);

// base::Kernel::lacks of the tiers whose operands are bf16: f32 queries and keys are computed in f32, by a lower tier.
base::Lack lacks_f32(const IndexScoreArgs& args);

}  // namespace sievemla::stage::indexer
