// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "attention/registry.h"

namespace sievemla::stage::attention {

std::span<const AttentionKernel> attention_kernels() {
  static const AttentionKernel rows[] = {kReference, kCpuPortable};
  return rows;
}

}  // namespace sievemla::stage::attention
