// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/measure.h -- how commands time a call, and how far a backend may be off.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "sievemla/backend.h"

namespace sievemla::cli {

struct Timing {
  double us = 0, us_min = 0;  // median, least
  double us_p10 = 0, us_p90 = 0;
  int runs = 0;
};

// A call is repeated until it ran `runs` times and for `enough` seconds, or `least` times and for `most` seconds.
struct Effort {
  int least, runs;
  double enough, most;
};
inline constexpr Effort kReplayEffort = {1, 20, 0, 0.1};

Timing timing_of(std::vector<double> us);  // of the times of all runs
Timing median_us(const std::function<void()>& call, const Effort& effort);

// The largest relative error (base/compare.h) of f32 results against double arithmetic on the same bytes.
double tolerance(const Backend& backend);
// The same for one of its kernels (a base::Kernel).
template <class Kernel>
double tolerance(const Backend& backend, const Kernel& kernel) {
  return std::max(tolerance(backend), kernel.error);
}

}  // namespace sievemla::cli
