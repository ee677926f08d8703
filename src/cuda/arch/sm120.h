// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm120.h -- RTX PRO 6000, RTX 5090, and DGX Spark (12.1, which runs the same machine code).
#pragma once
#include "cuda/arch/sm89.h"

namespace sievemla::cuda {

struct Sm120 : Sm89 {
  static constexpr int kSm = 120;
};
static_assert(CudaArch<Sm120>);

}  // namespace sievemla::cuda
