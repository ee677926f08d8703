// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cpu/threads.h"

#include <algorithm>

#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>
#endif

namespace sievemla::cpu {
#ifdef _OPENMP
namespace {

// GNU's OpenMP keeps a thread's team for its next region. A child of fork() has the thread but not its team, and would
// wait for that for ever: such a thread works alone.
thread_local bool has_team = false, team_is_gone = false;

bool may_have_team() {
  static const int watched = pthread_atfork(nullptr, nullptr, [] { team_is_gone = has_team; });
  has_team = true;
  return watched == 0 && !team_is_gone;
}

}  // namespace
#endif

int default_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

void parallel_for(const Backend& backend, std::int64_t n, ParallelFor::Body body, void* body_context) {
  if (n <= 0) return;
  if (const ParallelFor& host = backend.host_parallel_for(); host.run) {
    host.run(host.context, n, body, body_context);
    return;
  }
#ifdef _OPENMP
  const int threads = static_cast<int>(n < backend.threads() ? n : backend.threads());
  if (threads > 1 && may_have_team()) {
    // Each time that a thread asks for work takes 0.1 us, one after another: they ask 8 times each.
    const std::int64_t share = std::max<std::int64_t>(1, n / (8 * threads));
#pragma omp parallel for schedule(dynamic, share) num_threads(threads)
    for (std::int64_t i = 0; i < n; ++i) body(body_context, i, omp_get_thread_num());
    return;
  }
#endif
  for (std::int64_t i = 0; i < n; ++i) body(body_context, i, 0);
}

}  // namespace sievemla::cpu
