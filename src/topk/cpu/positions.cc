// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/positions.cc -- positions_to_slots and expand_pools on the CPU: rows in parallel.
#include "cpu/threads.h"
#include "topk/rows.h"

namespace sievemla::stage::topk {

void positions_to_slots_cpu(const PositionsToSlotsArgs& args, const base::Exec& exec) {
  cpu::parallel_for(exec.backend, args.positions.dim(0), [&](std::int64_t t, int) { positions_to_slots_row(args, t); });
}

void expand_pools_cpu(const ExpandPoolsArgs& args, const base::Exec& exec) {
  cpu::parallel_for(exec.backend, args.pools.dim(0), [&](std::int64_t t, int) { expand_pools_row(args, t); });
}

}  // namespace sievemla::stage::topk
