// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/backends.h -- every backend that runs on the host.
#pragma once
#include <initializer_list>
#include <vector>

#include "sievemla/backend.h"

namespace sievemla::test {

// The reference, and the CPU with each of these numbers of threads.
inline std::vector<Backend> host_backends(std::initializer_list<int> threads = {2}) {
  std::vector<Backend> backends = {Backend::reference()};
  for (int n : threads) backends.push_back(Backend::cpu({.threads = n}));
  return backends;
}

}  // namespace sievemla::test
