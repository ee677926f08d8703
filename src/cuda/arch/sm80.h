// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm80.h -- A100, A30: mma.sync on bf16, cp.async, large shared memory.
#pragma once
#include "cuda/arch/arch.h"

namespace sievemla::cuda {

struct Sm80 {
  static constexpr int kSm = 80;
  static constexpr int kSmemBytes = 163 * 1024;  // of 164 KiB an SM; 1 KiB is the system's
  static constexpr bool kFp8Mma = false;
};
static_assert(CudaArch<Sm80>);

}  // namespace sievemla::cuda
