// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/allocations.cc -- replaces operator new and delete. A file of its own: compilers that see both ends of
// a pair take the replacement for a mismatch.
#include "support/allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> count{0};
}

void* operator new(std::size_t bytes) {
  ++count;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

long sievemla::test::allocations() { return count; }
