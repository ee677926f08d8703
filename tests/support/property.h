// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/property.h -- rapidcheck with GoogleTest.
//
//   RC_GTEST_PROP(Suite, Name, (arguments)) { ... RC_ASSERT(...); }
//
// The seed is fixed, so that a run can be repeated; RC_PARAMS="seed=..." in the environment overrides it.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>

#include <rapidcheck/gtest.h>  // needs gtest before it

namespace sievemla::test {

inline const bool kSeedFixed = setenv("RC_PARAMS", "seed=1", /*overwrite=*/0) == 0;

}  // namespace sievemla::test
