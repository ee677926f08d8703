# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# Everything from outside, found and never fetched. The library itself needs nothing but a compiler; OpenMP is optional.
find_package(OpenMP COMPONENTS CXX)
if(SIEVEMLA_BUILD_CLI OR SIEVEMLA_BUILD_TESTS OR SIEVEMLA_BUILD_FUZZERS)
  find_package(nlohmann_json REQUIRED)
  find_package(fmt REQUIRED)
endif()
if(SIEVEMLA_BUILD_CLI)
  find_package(CLI11 REQUIRED)
endif()
if(SIEVEMLA_BUILD_TESTS)
  find_package(GTest REQUIRED)
  find_package(rapidcheck REQUIRED)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
endif()
