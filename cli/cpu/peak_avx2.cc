// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cpu/peak_avx2.cc -- 256-bit fused multiply-adds.
#include <immintrin.h>

#include "cli/cpu/peak.h"

namespace sievemla::cli {
namespace {

struct Ops {
  using Sum = __m256;
  using Factor = __m256;
  static Sum zero() { return _mm256_setzero_ps(); }
  static Factor factor(float x) { return _mm256_set1_ps(x); }
  static Sum add(Sum s, Factor a, Factor b) { return _mm256_fmadd_ps(a, b, s); }
  template <class T>
  static void hold(T& x) {
    __asm__ volatile("" : "+x"(x));
  }
};

#include "cli/cpu/peak-inl.h"

}  // namespace

const Peak kPeakAvx2 = {"256-bit fma", kSums * 8 * 2, run};

}  // namespace sievemla::cli
