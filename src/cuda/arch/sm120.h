// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm120.h -- RTX 50, RTX PRO 6000, DGX Spark (121): for attention an RTX 30.
#pragma once
#include "cuda/arch/sm89.h"

namespace sievemla::cuda {

struct Sm120 : Sm89 {
  static constexpr int kSm = 120;
};

}  // namespace sievemla::cuda
