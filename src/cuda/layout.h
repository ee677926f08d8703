// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/layout.h -- what kernels ask of a tensor's place in memory, as lacks. Plain C++.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/registry.h"
#include "sievemla/tensor.h"

namespace sievemla::cuda {

inline constexpr std::int64_t kMost = std::int64_t{1} << 30;  // of what kernels count in 32 bits

// A base and the first strides, all but the last if nothing is said, are multiples of 16 bytes.
inline base::Lack misplaced(const TensorView& view, const char* name, int strides = TensorView::kMaxRank) {
  if (view.elements() == 0) return "";
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0)
    return base::Lack(name) + " must start at a multiple of 16 bytes";
  for (int i = 0; i + 1 < view.rank && i < strides; ++i)
    if (view.dim(i) > 1 && view.step(i) * size_of(view.dtype) % 16 != 0)
      return base::Lack(name) + " must have strides that are multiples of 16 bytes";
  return "";
}

inline base::Lack spread(const TensorView& view, const char* name) {
  const int last = view.rank - 1;
  return view && view.dim(last) > 1 && view.step(last) != 1
             ? base::Lack(name) + " must have a contiguous last dimension"
             : base::Lack("");
}

template <std::size_t N>
base::Lack first_of(const base::Lack (&faults)[N]) {
  for (const base::Lack& fault : faults)
    if (!fault.empty()) return fault;
  return "";
}

}  // namespace sievemla::cuda
