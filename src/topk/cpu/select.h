// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/select.h -- exact top-k on the CPU, with the kernel of a tier.
#pragma once
#include <cstdint>

#include "topk/cpu/tier.h"
#include "topk/registry.h"

namespace sievemla::stage::topk {

// Defined for the tiers of tier.h, in select.cc.
template <const Tier& kTier>
void select_cpu(const TopkArgs& args, const base::Exec& exec);

std::int64_t select_cpu_bytes(const Backend& backend, const TopkBounds& bounds);

}  // namespace sievemla::stage::topk
