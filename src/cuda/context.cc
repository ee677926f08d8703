// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cuda/context.cuh"

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "cuda/config.h"
#include "cuda/device.h"
#include "sievemla/error.h"

namespace sievemla::cuda {
namespace {

struct Slot {
  std::atomic<bool> known{false}, prepared{false};
  Context context;
};
std::array<Slot, kMaxDevices> slots;
std::mutex asking;

Slot& slot_of(int device) {
  expects(device >= 0 && device < kMaxDevices, "a CUDA device index must be 0 to 63", "backend cuda", device);
  return slots[static_cast<std::size_t>(device)];
}

// Asked with a kernel that takes all shared memory, as the kernels do that make clusters.
ClusterCounts count_clusters(const Config& config, int device, int multiprocessors) {
  ClusterCounts counts{0, multiprocessors};
  if (config.cluster == 1) return counts;
  const CurrentDevice current(device);
  cudaFuncSetAttribute(config.probe, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
  for (int size = 2; size <= config.cluster; ++size) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t shape{};
    shape.gridDim = dim3(static_cast<unsigned>(size * multiprocessors)), shape.blockDim = dim3(128);
    shape.dynamicSmemBytes = static_cast<std::size_t>(config.smem_bytes);
    shape.attrs = &attribute, shape.numAttrs = 1;
    int& count = counts[static_cast<std::size_t>(size)];
    if (cudaOccupancyMaxActiveClusters(&count, config.probe, &shape) != cudaSuccess) count = 0;
  }
  cudaGetLastError();
  return counts;
}

}  // namespace

const Context& context(int device) {
  Slot& slot = slot_of(device);
  if (slot.known.load(std::memory_order_acquire)) return slot.context;
  const std::lock_guard lock(asking);
  if (slot.known.load(std::memory_order_relaxed)) return slot.context;
  const Machine all = machine();
  if (device >= static_cast<int>(all.devices.size()))
    throw DeviceError(error_message("the device must be there" + (all.problem.empty() ? "" : " (" + all.problem + ")"),
                                    "backend cuda", "cuda:", device, " of ", all.devices.size()));
  const DeviceInfo& info = all.devices[static_cast<std::size_t>(device)];
  if (info.config.empty()) throw DeviceError(error_message(info.problem, "backend cuda", info.name));
  for (const Config& config : configs())
    if (info.config == config.name)
      slot.context = {device, config.sm, info.multiprocessors, count_clusters(config, device, info.multiprocessors)};
  slot.known.store(true, std::memory_order_release);
  return slot.context;
}

const Context& prepared_context(int device) {
  const Slot& slot = slot_of(device);
  expects(slot.prepared.load(std::memory_order_acquire), "Backend::prepare must be called once before the first launch",
          "backend cuda", "cuda:", device, " unprepared");
  return slot.context;
}

void set_prepared(int device) { slot_of(device).prepared.store(true, std::memory_order_release); }

void check(cudaError_t error, const char* where) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(error_message(cudaGetErrorString(error), where, cudaGetErrorName(error)));
}

void load_kernel(const void* kernel, int smem_bytes) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "prepare");
  // Kernels that shall lie beside each other on a multiprocessor need the same share of its L1: all that there is.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "prepare");
  if (smem_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes), "prepare");
}

CurrentDevice::CurrentDevice(int device) {
  check(cudaGetDevice(&before_), "backend cuda");
  if (before_ != device) check(cudaSetDevice(device), "backend cuda");
}
CurrentDevice::~CurrentDevice() { cudaSetDevice(before_); }

}  // namespace sievemla::cuda
