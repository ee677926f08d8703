// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "combine/registry.h"

namespace sievemla::stage::combine {

std::span<const Kernel> kernels() {
  static const Kernel rows[] = {kReference, kCpuPortable};
  return rows;
}

}  // namespace sievemla::stage::combine
