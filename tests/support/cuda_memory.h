// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/cuda_memory.h -- a call's host tensors, copied to a CUDA device and back.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "api/tensors.h"
#include "cuda/memory.h"

namespace sievemla::test {

inline void cuda_good(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// From or to a device; done when it returns. From pageable memory, cudaMemcpy returns before the last bytes land.
inline void cuda_copy(void* to, const void* from, std::int64_t bytes) {
  cuda_good(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault));
  cuda_good(cudaStreamSynchronize(nullptr));
}

class OnDevice {
 public:
  explicit OnDevice(Device device) : device_(device) {}

  // The view, of a copy of all bytes that it spans; a view of the device's as it is.
  TensorView put(TensorView view) {
    if (!view || view.device == device_) return view;
    const std::int64_t bytes = api::span_bytes(view);
    const Copy& copy = copies_.emplace_back(Copy{view.data, cuda::Memory::on(device_, bytes)});
    cuda_copy(copy.memory.data(), view.data, bytes);
    view.data = copy.memory.data();
    view.device = device_;
    return view;
  }
  template <class Args>
  Args put(Args args) {
    api::each_tensor(args, [&](TensorView& view) { view = put(view); });
    return args;
  }
  void take_back(const TensorView& view) const {
    for (const Copy& copy : copies_)
      if (view && copy.host == view.data) cuda_copy(copy.host, copy.memory.data(), copy.memory.bytes());
  }

 private:
  struct Copy {
    void* host;
    cuda::Memory memory;
  };
  Device device_;
  std::vector<Copy> copies_;
};

// A workspace full of 0xA5, then initialised; 64 KiB behind it have to stay so.
class CudaWorkspace {
 public:
  CudaWorkspace(const Backend& backend, std::int64_t bytes)
      : bytes_(bytes), memory_(cuda::Memory::on(backend.device(), bytes + kGuardBytes)) {
    cuda_good(cudaMemset(memory_.data(), 0xA5, static_cast<std::size_t>(memory_.bytes())));
    workspace_init(backend, *this);
  }
  CudaWorkspace(const CudaWorkspace&) = delete;
  ~CudaWorkspace() {
    std::vector<std::byte> guard(kGuardBytes);
    cuda_copy(guard.data(), static_cast<std::byte*>(memory_.data()) + bytes_, kGuardBytes);
    EXPECT_EQ(std::count(guard.begin(), guard.end(), std::byte{0xA5}), kGuardBytes)
        << "something was written behind a workspace of " << bytes_ << " bytes";
  }
  operator Workspace() const { return {memory_.data(), bytes_}; }

 private:
  static constexpr std::int64_t kGuardBytes = 64 << 10;
  std::int64_t bytes_;
  cuda::Memory memory_;
};

}  // namespace sievemla::test
