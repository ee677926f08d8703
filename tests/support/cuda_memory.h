// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/cuda_memory.h -- a call's host tensors, copied to a CUDA device and back.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <vector>

#include "sievemla/attention.h"

namespace sievemla::test {

inline void cuda_good(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class OnDevice {
 public:
  explicit OnDevice(Device device) : device_(device) {}
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() {
    for (const Copy& copy : copies_) cudaFree(copy.device);
  }

  // The view, of a copy of all bytes that it spans.
  TensorView put(TensorView view) {
    if (!view) return view;
    std::int64_t last = 0;
    for (int i = 0; i < view.rank; ++i) last += (view.dim(i) - 1) * view.step(i);
    const auto bytes = static_cast<std::size_t>(view.elements() > 0 ? (last + 1) * size_of(view.dtype) : 0);
    Copy copy{view.data, nullptr, bytes};
    cuda_good(cudaMalloc(&copy.device, bytes > 0 ? bytes : 1));
    cuda_good(cudaMemcpy(copy.device, view.data, bytes, cudaMemcpyHostToDevice));
    copies_.push_back(copy);
    view.data = copy.device;
    view.device = device_;
    return view;
  }
  AttentionArgs put(AttentionArgs args) {
    args.q = put(args.q), args.q_rope = put(args.q_rope), args.kv.pages = put(args.kv.pages),
    args.sink = put(args.sink);
    args.out = put(args.out), args.lse = put(args.lse);
    if (Slots* slots = std::get_if<Slots>(&args.rows)) {
      slots->indices = put(slots->indices), slots->topk_length = put(slots->topk_length);
    } else {
      BlockTable& blocks = std::get<BlockTable>(args.rows);
      blocks.table = put(blocks.table), blocks.lengths = put(blocks.lengths);
    }
    return args;
  }
  void take_back(const TensorView& view) const {
    for (const Copy& copy : copies_)
      if (view && copy.host == view.data)
        cuda_good(cudaMemcpy(copy.host, copy.device, copy.bytes, cudaMemcpyDeviceToHost));
  }

 private:
  struct Copy {
    void* host;
    void* device;
    std::size_t bytes;
  };
  Device device_;
  std::vector<Copy> copies_;
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
