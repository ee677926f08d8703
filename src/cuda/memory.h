// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/memory.h -- memory of host programs around the library, which itself allocates nothing: of the decoder, of
// the program's commands, of tests. Plain C++, in every build, with or without CUDA.
#pragma once
#include <cstdint>
#include <memory>

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

// For all that was launched on a device. DeviceError if any of it failed.
void wait(Device device);

}  // namespace sievemla::cuda
