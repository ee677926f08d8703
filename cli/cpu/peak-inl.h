// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cpu/peak-inl.h -- the loop of a tier with vectors, for its unnamed namespace. Before it stands Ops:
//   Sum, Factor   a register of sums and one of factors
//   factor(x)     a register full of x
//   zero()        sums of zero
//   add(s, a, b)  s + a * b
//   hold(x)       the compiler takes x for used and changed
#pragma once

// Nested, and not an array, so that each sum is a register whatever the compiler's heuristics.
template <int kN>
struct Sums {
  Ops::Sum sum = Ops::zero();
  Sums<kN - 1> others;
  __attribute__((always_inline)) void add(Ops::Factor a, Ops::Factor b) {
    sum = Ops::add(sum, a, b);
    Ops::hold(sum);
    others.add(a, b);
  }
};
template <>
struct Sums<0> {
  void add(Ops::Factor, Ops::Factor) {}
};

// More than the latency of a multiply-add, 6 cycles at most, times the units, 2 at most.
constexpr int kSums = 13;

void run(std::int64_t steps) {
  Sums<kSums> sums;
  Ops::Factor a = Ops::factor(0.75f), b = Ops::factor(1.25f);
  Ops::hold(a);
  for (std::int64_t i = 0; i < steps; ++i) sums.add(a, b);
}
