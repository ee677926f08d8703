// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm89.h -- RTX 4090, L40S: Sm86 with FP8 tensor cores.
#pragma once
#include "cuda/arch/sm86.h"

namespace sievemla::cuda {

struct Sm89 : Sm86 {
  static constexpr int kSm = 89;
  static constexpr bool kFp8Mma = true;
};
static_assert(CudaArch<Sm89>);

}  // namespace sievemla::cuda
