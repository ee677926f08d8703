// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/scratch.h -- cuts a workspace into arrays. The same constructor of a kernel's scratch struct, run on a
// Scratch without memory, says how many bytes it needs: a layout is written once.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sievemla/tensor.h"

namespace sievemla::base {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

class Scratch {
 public:
  explicit Scratch(void* data = nullptr) : data_(static_cast<std::byte*>(data)) {}

  // n elements of T, uninitialised; null while only counting. Arrays start on cache lines of their own, so that two
  // workers never share one.
  template <class T>
  T* take(std::int64_t n) {
    T* array = data_ ? reinterpret_cast<T*>(data_ + bytes_) : nullptr;
    bytes_ += round_up(n * static_cast<std::int64_t>(sizeof(T)), kLine);
    return array;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::int64_t kLine = 64;
  static_assert(kWorkspaceAlign % kLine == 0);
  std::byte* data_;
  std::int64_t bytes_ = 0;
};

}  // namespace sievemla::base
