// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/cuda_memory.h -- a call's host tensors, copied to a CUDA device and back.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>

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

// A workspace full of 0xA5, then initialised.
class CudaWorkspace {
 public:
  CudaWorkspace(const Backend& backend, std::int64_t bytes) : view_{nullptr, bytes} {
    cuda_good(cudaMalloc(&view_.data, static_cast<std::size_t>(bytes)));
    cuda_good(cudaMemset(view_.data, 0xA5, static_cast<std::size_t>(bytes)));
    workspace_init(backend, view_);
  }
  CudaWorkspace(const CudaWorkspace&) = delete;
  ~CudaWorkspace() { cudaFree(view_.data); }
  operator Workspace() const { return view_; }

 private:
  Workspace view_;
};

}  // namespace sievemla::test
