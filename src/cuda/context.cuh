// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/context.cuh -- what a launch needs to know of a device, asked once. Host code of builds with CUDA only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/launch.h"

namespace sievemla::cuda {

struct Context {
  int device = 0;
  int config_sm = 0;  // of the config whose kernels run here
  int multiprocessors = 0;
  ClusterCounts clusters{};  // none of more than one CTA where the config's kernels make none
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

struct LaunchShape {
  std::int64_t ctas;
  int threads, smem_bytes;
  int rows = 1;        // of CTAs
  int cluster = 1;     // CTAs of a cluster (sm_90 on)
  bool early = false;  // it may start before the kernel before it is done, and waits for it itself (sm_90 on)
};
inline cudaError_t launch(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = shape.early ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.ctas), static_cast<unsigned>(shape.rows)),
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.smem_bytes), config.stream = stream;
  config.attrs = attributes + (shape.early ? 0 : 1);
  config.numAttrs = (shape.early ? 1u : 0u) + (shape.cluster > 1 ? 1u : 0u);
  return cudaLaunchKernelExC(&config, kernel, arguments);
}
// Launches a kernel on the current device; throws as check does.
inline void launch(const void* kernel, std::int64_t ctas, int threads, int smem_bytes, cudaStream_t stream,
                   void** arguments, const char* where) {
  check(launch(kernel, {ctas, threads, smem_bytes}, stream, arguments), where);
}
inline void launch(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments,
                   const char* where) {
  check(launch(kernel, shape, stream, arguments), where);
}

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
