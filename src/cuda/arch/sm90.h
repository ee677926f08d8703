// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm90.h -- H100, H200, H20.
#pragma once
#include "cuda/arch/sm80.h"

namespace sievemla::cuda {

struct Sm90 : Sm80 {
  static constexpr int kSm = 90;
  static constexpr int kSmemBytes = 227 * 1024;  // of 228 KiB an SM
  static constexpr bool kFp8Mma = true;
};
static_assert(CudaArch<Sm90>);

}  // namespace sievemla::cuda
