// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/softmax.h -- a softmax under way: the peak of its scores and the sum of exp(score - peak). Natural logs.
// constexpr, so that device code may call it.
//
//   score -inf   weighs exactly 0, as if it were not there; a softmax of nothing else is empty
//   score NaN    makes the sum NaN, and with it the LSE and every output (docs/numerics.md)
//   score +inf   has no finite share: NaN as well, since (+inf) - (+inf) is NaN
#pragma once
#include <cmath>
#include <limits>

namespace sievemla::base {

template <class Real>
struct Softmax {
  static constexpr Real kNothing = -std::numeric_limits<Real>::infinity();

  Real peak = kNothing;  // of the scores that are not NaN
  Real sum = 0;          // of exp(score - peak): at least 1, or exactly 0 where nothing has a weight, or NaN

  constexpr bool empty() const { return sum == 0; }
  constexpr void raise_peak(Real score) {
    if (score > peak) peak = score;  // false for a NaN
  }
  // What a score weighs before normalising. The peak has to be final.
  constexpr Real weight(Real score) const {
    return std::exp(score - (peak == kNothing ? 0 : peak));  // not (-inf) - (-inf)
  }
  constexpr Real lse() const { return empty() ? kNothing : peak + std::log(sum); }
  // What turns a sum of weighted values into the output; a sink is one more score that takes part in the sum and has no
  // value. Not for an empty softmax, whose output is +0 with a sink as without.
  constexpr Real normaliser(Real sink) const { return 1 / (sum + weight(sink)); }
};

}  // namespace sievemla::base
