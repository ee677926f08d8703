// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/context.h -- what a launch needs to know of a device, asked once. Plain C++, builds with CUDA only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

namespace sievemla::cuda {

struct Context {
  int device = 0;
  int config_sm = 0;  // of the config whose kernels run here
  int multiprocessors = 0;
};

inline constexpr int kMaxDevices = 64;

// Asks the device the first time. DeviceError where there is none, or where no image of this build loads.
const Context& context(int device);
// The same, without asking: InvalidArgument unless Backend::prepare was called.
const Context& prepared_context(int device);
void set_prepared(int device);

// Throws DeviceError("<what CUDA says>: got <code> (<where>)") unless all is well.
void check(cudaError_t error, const char* where);

// Loads a kernel on the current device and lets it have that much shared memory.
void load_kernel(const void* kernel, int smem_bytes);

// Launches a kernel on the current device.
void launch(const void* kernel, std::int64_t ctas, int threads, int smem_bytes, cudaStream_t stream, void** arguments,
            const char* where);

// The row of a room's list, in the order of configs(), that is for this device.
template <class ConfigKernels>
const ConfigKernels& kernels_for(const Context& context, std::span<const ConfigKernels> list) {
  for (const ConfigKernels& kernels : list)
    if (kernels.sm == context.config_sm) return kernels;
  return list.front();  // never: every room has a row for every config
}

// Makes a device current, and the one before it again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace sievemla::cuda
