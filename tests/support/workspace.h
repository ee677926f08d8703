// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/workspace.h -- a workspace of exactly the asked size, full of NaN: its contents are undefined on entry.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include "sievemla/tensor.h"

namespace sievemla::test {

class PoisonedWorkspace {
 public:
  explicit PoisonedWorkspace(std::int64_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes), kAlign))) {
    std::memset(data_.get(), 0xFF, static_cast<std::size_t>(bytes));
  }
  operator Workspace() const { return {data_.get(), bytes_}; }

 private:
  static constexpr std::align_val_t kAlign{kWorkspaceAlign};
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete(p, kAlign); }
  };
  std::int64_t bytes_;
  std::unique_ptr<std::byte, Delete> data_;
};

}  // namespace sievemla::test
