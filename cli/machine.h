// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/machine.h -- what this machine's processor is, what it can do, and how fast at most.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cli/cpu/peak.h"
#include "cpu/isa/isa.h"
#include "sievemla/backend.h"

namespace sievemla::cli {

struct Machine {
  std::string cpu;                 // "AMD EPYC 9554 64-Core Processor"
  int cores;                       // logical processors this process may use
  std::vector<std::string> isa;    // instruction sets that matter here and that processor and system both enable
  std::vector<std::string> tiers;  // of kernels that run here, as SIEVEMLA_CPU_ISA names them, lowest first
  std::string best_tier;           // the one that is used where SIEVEMLA_CPU_ISA names none
};

Machine this_machine();
std::int64_t host_memory_bytes();  // 0: unknown

// The operation that kernels of a tier are made of.
const Peak& peak_of(cpu::Isa isa);
// How many GFLOP/s of it all workers of the backend do together, on registers alone: the most of some short runs.
double peak_gflops(const Peak& peak, const Backend& backend);

}  // namespace sievemla::cli
