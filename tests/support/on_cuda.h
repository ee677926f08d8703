// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/on_cuda.h -- tests that need a CUDA device: they skip themselves where there is none.
#pragma once
#include <gtest/gtest.h>

#include "support/cuda_memory.h"

namespace sievemla::test {

class OnCuda : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  }
  static Backend backend() {
    const Backend cuda = Backend::cuda(0);
    cuda.prepare();
    return cuda;
  }
};

}  // namespace sievemla::test
