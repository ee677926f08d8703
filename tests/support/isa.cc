// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/isa.cc -- a test program that is to use a tier which this machine lacks skips all its tests.
#include "cpu/isa/isa.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "sievemla/error.h"

namespace sievemla::test {
namespace {

struct ForcedIsa : testing::Environment {
  void SetUp() override {
    try {
      cpu::choose_isa(std::getenv("SIEVEMLA_CPU_ISA"), cpu::machine_tiers());
    } catch (const Unsupported& error) {
      GTEST_SKIP() << "[  SKIPPED ] " << error.what();  // in the words that ctest looks for
    }
  }
};
const testing::Environment* const kForcedIsa = testing::AddGlobalTestEnvironment(new ForcedIsa);

}  // namespace
}  // namespace sievemla::test
