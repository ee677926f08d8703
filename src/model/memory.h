// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/memory.h -- memory that grows and is used again. The host writes and reads it, and so does the backend.
#pragma once
#include <cstddef>
#include <cstring>
#include <initializer_list>

#include "cuda/memory.h"
#include "sievemla/backend.h"

namespace sievemla::model {

// A workspace of the size asked for, until the next one is asked for.
class WorkspaceMemory {
 public:
  Workspace of(const Backend& backend, std::int64_t bytes) {
    if (memory_.bytes() < bytes) {
      memory_ = cuda::Memory::on(backend.device(), bytes);
      workspace_init(backend, {memory_.data(), bytes});
    }
    return {memory_.data(), bytes};
  }

 private:
  cuda::Memory memory_;
};

// A contiguous tensor, until the next one is made. Full of NaN: whoever reads what nobody wrote will notice.
class TensorMemory {
 public:
  template <class T>
  TensorView make(Device device, std::initializer_list<std::int64_t> shape) {
    TensorView view = tensor(static_cast<const T*>(nullptr), shape, device);
    const std::int64_t bytes = view.elements() * std::int64_t{sizeof(T)};
    if (memory_.bytes() < bytes) memory_ = cuda::Memory::shared(device, bytes);
    std::memset(memory_.data(), 0xFF, static_cast<std::size_t>(bytes));
    view.data = memory_.data();
    return view;
  }

 private:
  cuda::Memory memory_;
};

}  // namespace sievemla::model
