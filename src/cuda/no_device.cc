// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cuda/config.h"
#include "cuda/device.h"

namespace sievemla::cuda {

Machine machine() { return {false, 0, 0, {}, "this build has no CUDA (SIEVEMLA_CUDA=OFF, or AUTO without a GPU)"}; }

bool any_device() { return false; }

std::span<const Config> configs() { return {}; }

}  // namespace sievemla::cuda
