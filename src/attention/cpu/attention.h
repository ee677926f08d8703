// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/attention.h -- stage 3 on the CPU, with the kernel of a tier.
#pragma once
#include <cstdint>

#include "attention/cpu/tier.h"
#include "base/registry.h"
#include "sievemla/attention.h"

namespace sievemla::stage::attention {

// Defined for the tiers of tier.h, in attention.cc.
template <const Tier& kTier>
void attention_cpu(const AttentionArgs& args, const base::Exec& exec);
template <const Tier& kTier>
std::int64_t attention_cpu_bytes(const Backend& backend, const AttentionBounds& bounds);

// base::Kernel::lacks of the tiers whose operands are bf16: f32 queries and rows are computed in f32, by a lower tier.
base::Lack lacks_f32(const AttentionArgs& args);

}  // namespace sievemla::stage::attention
