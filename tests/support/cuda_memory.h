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

class OnDevice : public cuda::Copies {
 public:
  using Copies::Copies;
  using Copies::put;
  template <class Args>
  Args put(Args args) {
    api::each_tensor(args, [&](TensorView& view) { view = put(view); });
    return args;
  }
};

// A workspace full of 0xA5, then initialised; 64 KiB behind it have to stay so.
class CudaWorkspace {
 public:
  CudaWorkspace(const Backend& backend, std::int64_t bytes)
      : device_(backend.device()), bytes_(bytes), memory_(cuda::Memory::on(device_, bytes + kGuardBytes)) {
    cuda_good(cudaMemset(memory_.data(), 0xA5, static_cast<std::size_t>(memory_.bytes())));
    workspace_init(backend, *this);
  }
  CudaWorkspace(const CudaWorkspace&) = delete;
  ~CudaWorkspace() {
    std::vector<std::byte> guard(kGuardBytes);
    cuda::copy(device_, guard.data(), static_cast<std::byte*>(memory_.data()) + bytes_, kGuardBytes);
    EXPECT_EQ(std::count(guard.begin(), guard.end(), std::byte{0xA5}), kGuardBytes)
        << "something was written behind a workspace of " << bytes_ << " bytes";
  }
  operator Workspace() const { return {memory_.data(), bytes_}; }

 private:
  static constexpr std::int64_t kGuardBytes = 64 << 10;
  Device device_;
  std::int64_t bytes_;
  cuda::Memory memory_;
};

}  // namespace sievemla::test
