// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cuda/memory.h"

#include <algorithm>
#include <cstring>
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

TensorView Copies::put(TensorView view) {
  if (!view || view.device == device_) return view;
  std::int64_t last = 0;
  for (int i = 0; i < view.rank; ++i) last += (view.dim(i) - 1) * view.step(i);
  const std::int64_t bytes = view.elements() > 0 ? (last + 1) * size_of(view.dtype) : 0;
  const Copy& made = copies_.emplace_back(Copy{view.data, Memory::on(device_, bytes)});
  copy(device_, made.memory.data(), view.data, bytes);
  view.data = made.memory.data();
  view.device = device_;
  return view;
}

void Copies::take_back(const TensorView& view) const {
  for (const Copy& made : copies_)
    if (view && made.host == view.data) copy(device_, made.host, made.memory.data(), made.memory.bytes());
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

void copy(Device device, void* to, const void* from, std::int64_t bytes) {
  if (device.type == DeviceType::cpu) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  const CurrentDevice current(device.index);
  check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault), "copy");
  check(cudaStreamSynchronize(nullptr), "copy");  // from pageable memory, cudaMemcpy returns before the last bytes land
}

void wait(Device device) {
  if (device.type == DeviceType::cpu) return;
  const CurrentDevice current(device.index);
  check(cudaDeviceSynchronize(), "wait");
}

#else

Memory Memory::shared(Device, std::int64_t bytes) { return of_host(bytes); }
Memory Memory::on(Device, std::int64_t bytes) { return of_host(bytes); }
void copy(Device, void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}
void wait(Device) {}

#endif

}  // namespace sievemla::cuda
