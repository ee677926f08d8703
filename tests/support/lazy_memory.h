// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/lazy_memory.h -- gigabytes of address space of which only touched pages take memory; zeros at first.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace sievemla::test {

class LazyMemory {
 public:
  explicit LazyMemory(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~LazyMemory() {
    if (*this) munmap(data_, bytes_);
  }
  LazyMemory(const LazyMemory&) = delete;
  LazyMemory& operator=(const LazyMemory&) = delete;

  explicit operator bool() const { return data_ != MAP_FAILED; }  // false where the system promises no such space
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

}  // namespace sievemla::test
