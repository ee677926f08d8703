# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# What can be switched, in one place. BUILD_SHARED_LIBS decides between libsievemla.a and libsievemla.so.
option(SIEVEMLA_BUILD_CLI "Build the sievemla program (needs CLI11, fmt, nlohmann-json)" ${PROJECT_IS_TOP_LEVEL})
option(SIEVEMLA_BUILD_TESTS "Build tests and examples (needs GoogleTest, rapidcheck)" OFF)
option(SIEVEMLA_BUILD_PYTHON "Build the module of the Python package (pyproject.toml does; needs apache-tvm-ffi)" OFF)
option(SIEVEMLA_BUILD_FUZZERS "Build the libFuzzer targets (needs clang)" OFF)
option(SIEVEMLA_INSTALL "Make the install rules" ${PROJECT_IS_TOP_LEVEL})
option(SIEVEMLA_WERROR "Treat warnings as errors" ${PROJECT_IS_TOP_LEVEL})
option(SIEVEMLA_FMT_HEADER_ONLY "Take fmt as headers: the program then runs without libfmt, and compiles longer" OFF)
set(SIEVEMLA_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined or thread")

set(SIEVEMLA_CUDA AUTO CACHE STRING "ON, OFF, or AUTO: where both a toolkit and an NVIDIA GPU are, for that GPU alone")
set_property(CACHE SIEVEMLA_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SIEVEMLA_CUDA_ARCHS "" CACHE STRING "Configs to build, of 80;86;89;90;120; empty: all, or with AUTO the GPU's")
set(SIEVEMLA_CUDA_FORCE_CONFIGS OFF CACHE STRING
    "ON: every config for sm_90 too, where SIEVEMLA_CUDA_CONFIG can then force it; ONLY: for sm_90 alone")
set_property(CACHE SIEVEMLA_CUDA_FORCE_CONFIGS PROPERTY STRINGS OFF ON ONLY)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
