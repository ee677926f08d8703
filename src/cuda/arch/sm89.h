// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/arch/sm89.h -- RTX 40, L40S: for attention an RTX 30.
#pragma once
#include "cuda/arch/sm86.h"

namespace sievemla::cuda {

struct Sm89 : Sm86 {
  static constexpr int kSm = 89;
};

}  // namespace sievemla::cuda
