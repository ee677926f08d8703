// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string_view>

#include "cuda/config.h"

namespace sievemla::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The text of an error, and the runtime's memory of it cleared.
std::string text_of(cudaError_t error) {
  cudaGetLastError();
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

// Fills config and image, or problem. The device is current. A config whose own machine code loads comes first, then
// any that loads through its PTX; SIEVEMLA_CUDA_CONFIG names one to be used instead, if it loads at all.
void find_config(DeviceInfo& device) {
  const char* forced = std::getenv("SIEVEMLA_CUDA_CONFIG");
  cudaError_t error = cudaErrorNoKernelImageForDevice;
  int best = 0;
  for (const Config& config : configs()) {
    if (forced && *forced && config.name != std::string_view(forced)) continue;
    cudaFuncAttributes attributes{};
    if (const cudaError_t got = cudaFuncGetAttributes(&attributes, config.probe); got != cudaSuccess) {
      error = got;
      continue;
    }
    const int rank = attributes.binaryVersion == config.sm ? 2 : 1;
    if (rank <= best) continue;
    best = rank;
    device.config = config.name;
    // Machine code runs on its own generation only; code of the device's exact version and older PTX was compiled here.
    const bool jit = attributes.binaryVersion != config.sm && attributes.ptxVersion != attributes.binaryVersion;
    device.image = jit ? "compute_" + std::to_string(attributes.ptxVersion) + " PTX compiled by the driver"
                       : "sm_" + std::to_string(attributes.binaryVersion) + " machine code";
  }
  if (best > 0) {
    cudaGetLastError();
    return;
  }
  device.problem = "no image of this build loads here";
  if (forced && *forced) device.problem += " under SIEVEMLA_CUDA_CONFIG=" + std::string(forced);
  device.problem += " (" + text_of(error) + ")";
}

DeviceInfo ask(int index) {
  DeviceInfo device{};
  device.index = index;
  cudaDeviceProp properties{};
  cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error == cudaSuccess) {
    device.name = properties.name;
    device.capability = properties.major * 10 + properties.minor;
    device.multiprocessors = properties.multiProcessorCount;
    device.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
    device.smem_bytes = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin);
    error = cudaSetDevice(index);
  }
  if (error == cudaSuccess) find_config(device);
  else device.problem = text_of(error);
  return device;
}

}  // namespace

Machine machine() {
  Machine result{true, 0, 0, {}, {}};
  cudaRuntimeGetVersion(&result.runtime_version);
  cudaDriverGetVersion(&result.driver_version);
  // Asked in this order because without a driver cudaGetDeviceCount says "insufficient driver", and writes no count.
  if (result.driver_version == 0) {
    result.problem = "no NVIDIA driver is loaded";
    return result;
  }
  if (result.driver_version / 1000 < result.runtime_version / 1000) {
    result.problem = "the NVIDIA driver serves CUDA " + version_text(result.driver_version) +
                     ", this build needs a driver for CUDA " + version_text(result.runtime_version);
    return result;
  }
  int count = 0, current = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    result.problem = text_of(error);
    if (error == cudaErrorNoDevice) result.problem += " (hidden by CUDA_VISIBLE_DEVICES?)";
    return result;
  }
  cudaGetDevice(&current);
  for (int index = 0; index < count; ++index) result.devices.push_back(ask(index));
  cudaSetDevice(current);
  return result;
}

bool any_device() {
  static const bool any = [] {
    for (const DeviceInfo& device : machine().devices)
      if (!device.config.empty()) return true;
    return false;
  }();
  return any;
}

}  // namespace sievemla::cuda
