// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/kernels.cc -- every kernel of this build, as the public interface tells of it.
#include "api/kernel_lists.h"
#include "sievemla/backend.h"

namespace sievemla {

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> all;
  api::for_each_kernel_list([&](std::string_view stage, const auto& rows) {
    for (const auto& row : rows)
      all.push_back({stage, row.name, row.backend, !row.runs_here || row.runs_here(), row.needs});
  });
  return all;
}

}  // namespace sievemla
