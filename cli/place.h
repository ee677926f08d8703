// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/place.h -- tensors where a backend reads them: the host's own, or their copies on a CUDA device.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "api/tensors.h"
#include "cuda/memory.h"
#include "sievemla/backend.h"

namespace sievemla::cli {

class Place {
 public:
  explicit Place(const Backend& backend) : backend_(backend), copied_(backend.kind() == BackendKind::cuda) {}
  Place(const Place&) = delete;
  ~Place();

  // The view there, of all bytes that it spans. A view that begins where an earlier one did leads to the same copy.
  TensorView put(const TensorView& view);
  template <class Args>
  Args put_all(Args args) {
    api::each_tensor(args, [&](TensorView& view) { view = put(view); });
    return args;
  }
  // What a view that was put holds now, back into its host memory. Waits for the device.
  void take_back(const TensorView& view);

  // Memory there alone, contiguous. `repeat` fills it with the rows of a host tensor (its first dimension), over and
  // over.
  TensorView poisoned(DType dtype, std::initializer_list<std::int64_t> shape);
  void repeat(const TensorView& contiguous, const TensorView& there);
  // Contiguous, on the host, until the next call. Waits for the device.
  TensorView here(const TensorView& contiguous);

  // Of its own, aligned, poisoned and initialised.
  Workspace workspace(std::int64_t bytes);

 private:
  void* allocate(std::int64_t bytes);

  struct Copy {
    void* there;
    std::int64_t bytes;
  };
  Backend backend_;
  bool copied_;
  std::vector<cuda::Memory> memory_;
  std::map<const void*, Copy> copies_;
  std::vector<std::byte> here_;
};

}  // namespace sievemla::cli
