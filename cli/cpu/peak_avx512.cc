// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cpu/peak_avx512.cc -- 512-bit fused multiply-adds.
#include <immintrin.h>

#include "cli/cpu/peak.h"

namespace sievemla::cli {
namespace {

struct Ops {
  using Sum = __m512;
  using Factor = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Factor factor(float x) { return _mm512_set1_ps(x); }
  static Sum add(Sum s, Factor a, Factor b) { return _mm512_fmadd_ps(a, b, s); }
  template <class T>
  static void hold(T& x) {
    __asm__ volatile("" : "+v"(x));
  }
};

#include "cli/cpu/peak-inl.h"

}  // namespace

const Peak kPeakAvx512 = {"512-bit fma", kSums * 16 * 2, run};

}  // namespace sievemla::cli
