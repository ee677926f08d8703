// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/machine.h -- what this machine's processor is, and what it can do.
#pragma once
#include <string>
#include <vector>

namespace sievemla::cli {

struct Machine {
  std::string cpu;               // "AMD EPYC 9554 64-Core Processor"
  int cores;                     // logical processors this process may use
  std::vector<std::string> isa;  // instruction sets that matter here and that processor and system both enable
};

Machine this_machine();

}  // namespace sievemla::cli
