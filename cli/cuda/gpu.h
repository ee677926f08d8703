// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cuda/gpu.h -- what commands need of the CUDA runtime. gpu.cc has it; no_gpu.cc stands in for it in builds
// without CUDA, where no backend leads here. DeviceError where the runtime refuses.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "cli/measure.h"
#include "sievemla/backend.h"

namespace sievemla::cli::gpu {

void copy(void* to, const void* from, std::int64_t bytes);  // any direction; over when it returns
void fill(void* memory, std::byte value, std::int64_t bytes);
// Returns when the device has done all its work. DeviceError if that takes longer than 30 s: a kernel hangs.
void wait(Device device);
// True once a wait has run out: nothing on that device ends any more, releasing memory neither.
bool hangs();

// Time on the device, launch latency aside: the host is ahead, and events stand around each call.
enum class L2 : std::uint8_t {
  cold,   // 256 MiB are written before each call
  warm,   // nothing is
  graph,  // 20 calls in one CUDA graph, a twentieth of each replay
};
Timing time(Device device, const std::function<void(Stream)>& call, L2 l2);

struct Clocks {
  int sm_mhz = 0, memory_mhz = 0;  // while the last time() ran; 0: the driver does not say
};
Clocks clocks(Device device);

}  // namespace sievemla::cli::gpu
