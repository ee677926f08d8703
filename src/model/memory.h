// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/memory.h -- host memory that grows and is used again.
#pragma once
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "sievemla/tensor.h"

namespace sievemla::model {

// A workspace of the size asked for, until the next one is asked for.
class WorkspaceMemory {
 public:
  Workspace of(std::int64_t bytes) {
    const std::size_t align = static_cast<std::size_t>(kWorkspaceAlign), needed = static_cast<std::size_t>(bytes);
    if (bytes_.size() < needed + align) bytes_.resize(needed + align);
    void* data = bytes_.data();
    std::size_t space = bytes_.size();
    std::align(align, needed, data, space);
    return {data, bytes};
  }

 private:
  std::vector<std::byte> bytes_;
};

// A contiguous tensor, until the next one is made. Full of NaN: whoever reads what nobody wrote will notice.
class TensorMemory {
 public:
  template <class T>
  TensorView make(std::initializer_list<std::int64_t> shape) {
    TensorView view = tensor(static_cast<const T*>(nullptr), shape);
    const std::size_t bytes = static_cast<std::size_t>(view.elements()) * sizeof(T);
    if (bytes_.size() < bytes) bytes_.resize(bytes);
    std::memset(bytes_.data(), 0xFF, bytes);
    view.data = bytes_.data();
    return view;
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace sievemla::model
