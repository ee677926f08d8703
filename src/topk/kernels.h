// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/kernels.h -- what registry.cc lists. One kernel, one row at a time: the row functions are in rows.h.
#pragma once
#include <cstdint>

#include "topk/registry.h"

namespace sievemla::stage::topk {

// The specification: topk by sorting.
void select_reference(const TopkArgs& args, const base::Exec& exec);
std::int64_t select_reference_workspace_bytes(const Backend& backend, const TopkBounds& bounds);
void positions_to_slots_reference(const PositionsToSlotsArgs& args, const base::Exec& exec);
void expand_pools_reference(const ExpandPoolsArgs& args, const base::Exec& exec);

// Rows in parallel; topk by digits of the threshold.
void select_cpu(const TopkArgs& args, const base::Exec& exec);
std::int64_t select_cpu_workspace_bytes(const Backend& backend, const TopkBounds& bounds);
void positions_to_slots_cpu(const PositionsToSlotsArgs& args, const base::Exec& exec);
void expand_pools_cpu(const ExpandPoolsArgs& args, const base::Exec& exec);

}  // namespace sievemla::stage::topk
