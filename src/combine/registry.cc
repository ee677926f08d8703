// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "combine/registry.h"

namespace sievemla::stage::combine {

std::span<const CombineKernel> combine_kernels() {
  static const CombineKernel rows[] = {kReference, kCpuPortable};
  return rows;
}

}  // namespace sievemla::stage::combine
