// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/threads.h -- one parallel_for for all host kernels: the host's own pool if it gave one, else OpenMP.
#pragma once
#include <cstdint>
#include <type_traits>

#include "sievemla/backend.h"

namespace sievemla::cpu {

// The type-erased form; defined in threads.cc, the one file that knows OpenMP.
void parallel_for(const Backend& backend, std::int64_t n, ParallelFor::Body body, void* body_context);

// Calls body(i, worker) for every i in [0, n), worker in [0, backend.threads()); no two overlapping calls share a
// worker. Does not allocate. The body must not throw. Results must not depend on which worker runs what.
template <class F>
void parallel_for(const Backend& backend, std::int64_t n, F&& body) {
  using Body = std::remove_reference_t<F>;
  parallel_for(
      backend, n, [](void* context, std::int64_t i, int worker) { (*static_cast<Body*>(context))(i, worker); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Threads that OpenMP would use now; 1 in a build without it.
int default_threads();

}  // namespace sievemla::cpu
