// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/registry.h -- the kernels of stage 2: one list per public function, best first. Their arguments are checked.
#pragma once
#include <span>

#include "base/registry.h"
#include "sievemla/topk.h"

namespace sievemla::stage::topk {

struct PositionsToSlotsArgs {
  TensorView positions;  // as positions_to_slots
  SlotMap map;
  TensorView slots;
};

using TopkKernel = base::Kernel<TopkArgs, TopkBounds>;
using PositionsToSlotsKernel = base::Kernel<PositionsToSlotsArgs>;
using ExpandPoolsKernel = base::Kernel<ExpandPoolsArgs>;

std::span<const TopkKernel> topk_kernels();
std::span<const PositionsToSlotsKernel> positions_to_slots_kernels();
std::span<const ExpandPoolsKernel> expand_pools_kernels();

}  // namespace sievemla::stage::topk
