// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/backward_pool.h -- a thread pool as a host may bring it: three workers, and the work goes through
// backwards.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "sievemla/backend.h"

namespace sievemla::test {

struct BackwardPool {
  static constexpr int kWorkers = 3;
  std::atomic<int> runs{0};
  std::atomic<std::int64_t> bodies{0};

  Backend backend() { return Backend::cpu({.threads = kWorkers, .host = {run, this}}); }

  static void run(void* context, std::int64_t n, ParallelFor::Body body, void* body_context) {
    auto& pool = *static_cast<BackwardPool*>(context);
    ++pool.runs;
    pool.bodies += n;
    std::atomic<std::int64_t> left{n};
    const auto work = [&](int worker) {
      for (std::int64_t i; (i = --left) >= 0;) body(body_context, i, worker);
    };
    std::vector<std::thread> threads;
    for (int w = 1; w < kWorkers; ++w) threads.emplace_back(work, w);
    work(0);
    for (std::thread& t : threads) t.join();
  }
};

}  // namespace sievemla::test
