// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/memory.h -- memory of host programs around the library, which itself allocates nothing: of commands, of the
// decoder. Plain C++, in every build, with or without CUDA.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "sievemla/tensor.h"

namespace sievemla::cuda {

// Aligned to kWorkspaceAlign.
class Memory {
 public:
  Memory() = default;
  // For the host and for the kernels of `device`. A GPU reads and writes it across the bus, at the host's address; what
  // its kernels write is there after wait().
  static Memory shared(Device device, std::int64_t bytes);
  // Of `device` alone.
  static Memory on(Device device, std::int64_t bytes);

  void* data() const { return data_.get(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  using Free = void (*)(void*);
  Memory(void* data, Free free, std::int64_t bytes) : data_(data, free), bytes_(bytes) {}
  static Memory of_host(std::int64_t bytes);

  std::unique_ptr<void, Free> data_{nullptr, nullptr};
  std::int64_t bytes_ = 0;
};

// A call's host tensors as a backend's kernels take them: on a GPU copies in its memory, elsewhere the tensors
// themselves.
class Copies {
 public:
  explicit Copies(Device device) : device_(device) {}
  // The view, of a copy of all bytes that it spans.
  TensorView put(TensorView view);
  // What a copy holds now, into the tensor it was made of.
  void take_back(const TensorView& view) const;

 private:
  struct Copy {
    void* host;
    Memory memory;
  };
  Device device_;
  std::vector<Copy> copies_;
};

// Between the host's memory and a device's, either way; done when it returns.
void copy(Device device, void* to, const void* from, std::int64_t bytes);
// For all that was launched on a device. DeviceError if any of it failed.
void wait(Device device);

}  // namespace sievemla::cuda
