// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/device.h -- the CUDA devices of this machine, and which of this build's configs each one runs. Plain C++, in
// every build, with or without CUDA.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sievemla::cuda {

struct DeviceInfo {
  int index;
  std::string name;  // "NVIDIA H200"
  int capability;    // 10 * major + minor
  int multiprocessors;
  std::int64_t memory_bytes;
  std::int64_t smem_bytes;  // most shared memory a CTA may opt in to
  std::string config;       // "sm90"; empty: nothing in this build loads on the device, `problem` says why
  std::string image;        // what was loaded: "sm_90 machine code", "compute_80 PTX compiled by the driver"
  std::string problem;
};

struct Machine {
  bool built_with_cuda;
  int runtime_version;  // of the CUDA runtime in this library, 1000 * major + 10 * minor; 0 without
  int driver_version;   // newest runtime the driver serves, in the same form; 0: no driver
  std::vector<DeviceInfo> devices;
  std::string problem;  // why there are no devices, in words; empty if there are
};

// Asks each device by loading an empty kernel, which makes a context there. Does not throw where a driver or device is
// missing.
Machine machine();

// Whether kernels of this build run on a device of this machine. Asks once.
bool any_device();

}  // namespace sievemla::cuda
