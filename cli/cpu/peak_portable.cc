// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cpu/peak_portable.cc -- a product and a sum, rounded each: 128-bit vectors, as every x86-64 and Arm has them.
#include "cli/cpu/peak.h"

namespace sievemla::cli {
namespace {

struct Ops {
  using Sum = float __attribute__((vector_size(16)));
  using Factor = Sum;
  static Sum zero() { return Sum{}; }
  static Factor factor(float x) { return Factor{x, x, x, x}; }
  static Sum add(Sum s, Factor a, Factor b) { return s + a * b; }
#if defined(__x86_64__)
  static void hold(Sum& x) { __asm__ volatile("" : "+x"(x)); }
#else
  static void hold(Sum& x) { __asm__ volatile("" : "+w"(x)); }
#endif
};

#include "cli/cpu/peak-inl.h"

}  // namespace

const Peak kPeakPortable = {"128-bit multiply, then add", kSums * 4 * 2, run};

}  // namespace sievemla::cli
