// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cuda/memory.h"

#include <algorithm>
#include <new>
#if SIEVEMLA_WITH_CUDA
#include "cuda/context.cuh"
#endif

namespace sievemla::cuda {

Memory Memory::of_host(std::int64_t bytes) {
  constexpr std::align_val_t kAlign{kWorkspaceAlign};
  return {::operator new(static_cast<std::size_t>(bytes), kAlign), [](void* p) { ::operator delete(p, kAlign); },
          bytes};
}

#if SIEVEMLA_WITH_CUDA

Memory Memory::shared(Device device, std::int64_t bytes) {
  if (device.type == DeviceType::cpu) return of_host(bytes);
  const CurrentDevice current(device.index);
  void* data = nullptr;
  check(cudaHostAlloc(&data, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)), cudaHostAllocPortable),
        "pinned memory");
  return {data, [](void* p) { cudaFreeHost(p); }, bytes};
}

Memory Memory::on(Device device, std::int64_t bytes) {
  if (device.type == DeviceType::cpu) return of_host(bytes);
  const CurrentDevice current(device.index);
  void* data = nullptr;
  check(cudaMalloc(&data, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1))), "device memory");
  return {data, [](void* p) { cudaFree(p); }, bytes};
}

void wait(Device device) {
  if (device.type == DeviceType::cpu) return;
  const CurrentDevice current(device.index);
  check(cudaDeviceSynchronize(), "wait");
}

#else

Memory Memory::shared(Device, std::int64_t bytes) { return of_host(bytes); }
Memory Memory::on(Device, std::int64_t bytes) { return of_host(bytes); }
void wait(Device) {}

#endif

}  // namespace sievemla::cuda
