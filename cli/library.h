// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/library.h -- a library of the NVIDIA driver's, opened at run time: nothing here is linked with it.
#pragma once
#include <dlfcn.h>

namespace sievemla::cli {

// Never closed: its threads may live on.
class Library {
 public:
  explicit Library(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {}
  explicit operator bool() const { return handle_ != nullptr; }
  // Null where an older driver does not have it.
  template <class F>
  F* find(const char* symbol) const {
    return reinterpret_cast<F*>(dlsym(handle_, symbol));
  }

 private:
  void* handle_;
};

}  // namespace sievemla::cli
