// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/allocations.h -- how often this program has called operator new. For tests that link allocations.cc.
#pragma once

namespace sievemla::test {

long allocations();

}  // namespace sievemla::test
