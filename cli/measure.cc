// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace sievemla::cli {

Timing median_us(const std::function<void()>& call, const Effort& effort) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> us;
  const auto begin = Clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const auto done = [&](int runs, double seconds) { return static_cast<int>(us.size()) >= runs && spent() >= seconds; };
  while (!done(effort.runs, effort.enough) && !done(effort.least, effort.most)) {
    const auto start = Clock::now();
    call();
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  return timing_of(std::move(us));
}

Timing timing_of(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const auto quantile = [&](double q) {
    return us[static_cast<std::size_t>(std::lround(q * static_cast<double>(us.size() - 1)))];
  };
  return {quantile(0.5), us.front(), quantile(0.1), quantile(0.9), static_cast<int>(us.size())};
}

double tolerance(const Backend& backend) {
  switch (backend.kind()) {
    case BackendKind::reference: return 1e-6;  // double, rounded once to f32
    case BackendKind::cpu: return 1e-4;        // f32 accumulation
    case BackendKind::cuda: return 1e-2;       // bf16 operands: 2^-8 each
  }
  return 0;
}

}  // namespace sievemla::cli
