// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cpu/peak.h -- what a core computes at most, for each tier: multiply-adds on registers alone.
//
// Plain data: files of different instruction sets include this (docs/kernels/attention-cpu.md).
#pragma once
#include <cstdint>

namespace sievemla::cli {

struct Peak {
  const char* what;  // the operation
  double flops;      // of a step
  void (*run)(std::int64_t steps);
};

extern const Peak kPeakPortable;
#if defined(__x86_64__)
extern const Peak kPeakAvx2, kPeakAvx512, kPeakAvx512Bf16, kPeakAmx;
#endif

}  // namespace sievemla::cli
