// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/backends.h -- every backend that runs on the host.
#pragma once
#include <vector>

#include "sievemla/backend.h"

namespace sievemla::test {

inline std::vector<Backend> host_backends() { return {Backend::reference(), Backend::cpu({.threads = 2})}; }

}  // namespace sievemla::test
