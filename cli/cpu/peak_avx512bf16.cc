// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cpu/peak_avx512bf16.cc -- dpbf16: two products of bf16 a lane.
#include <immintrin.h>

#include "cli/cpu/peak.h"

namespace sievemla::cli {
namespace {

struct Ops {
  using Sum = __m512;
  using Factor = __m512bh;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Factor factor(float x) { return _mm512_cvtne2ps_pbh(_mm512_set1_ps(x), _mm512_set1_ps(x)); }
  static Sum add(Sum s, Factor a, Factor b) { return _mm512_dpbf16_ps(s, a, b); }
  template <class T>
  static void hold(T& x) {
    __asm__ volatile("" : "+v"(x));
  }
};

#include "cli/cpu/peak-inl.h"

}  // namespace

const Peak kPeakAvx512Bf16 = {"512-bit dpbf16", kSums * 32 * 2, run};

}  // namespace sievemla::cli
