// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/compare.h -- the one measure of error that goldens, traces, verify and bench use.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

namespace sievemla::base {

// max |got - want| / max |want| over a tensor (over max 1 where `want` is all zero: the absolute error). Infinities and
// NaN must stand at equal places, else the error is infinite. The sizes are equal.
inline double relative_error(std::span<const float> got, std::span<const float> want) {
  double difference = 0, largest = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double a = got[i], b = want[i];
    if (std::isfinite(a) && std::isfinite(b)) {
      difference = std::max(difference, std::abs(a - b));
      largest = std::max(largest, std::abs(b));
    } else if (a != b && !(std::isnan(a) && std::isnan(b))) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return largest > 0 ? difference / largest : difference;
}

}  // namespace sievemla::base
