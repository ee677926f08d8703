// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/cuda/gpu.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "cli/library.h"
#include "sievemla/error.h"

namespace sievemla::cli::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kFlushBytes = std::size_t{256} << 20;
constexpr int kRuns = 50, kBatch = 25, kProbe = 5, kGraphCalls = 20;
constexpr double kLong = 200,
                 kWarmSeconds = 0.3;  // microseconds of a call that first gets the clock warm, and for how long
constexpr double kHoldSeconds = 0.2;
constexpr double kPatience = 30;  // seconds before a kernel counts as stuck

std::atomic<bool> stuck{false};

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(error_message("the CUDA runtime must do it", what,
                                  std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error)));
}

// Things of the runtime's that are given back.
template <class T, cudaError_t (*destroy)(T)>
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  ~Owned() {
    if (value && !hangs()) destroy(value);
  }
  T value = nullptr;
};
using OwnedStream = Owned<cudaStream_t, cudaStreamDestroy>;
using OwnedEvent = Owned<cudaEvent_t, cudaEventDestroy>;
using OwnedGraph = Owned<cudaGraph_t, cudaGraphDestroy>;
using OwnedExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;
cudaError_t free_memory(void* memory) { return cudaFree(memory); }
using OwnedMemory = Owned<void*, free_memory>;

// Holds a stream until it is opened, so that all that is enqueued meanwhile then runs without waiting for the host; for
// kHoldSeconds at most, since a launch into a full queue (some 1000 entries: prefills in chunks) waits for the device.
// The hold may end after the gate, where an error leaves early: what it waits for is its own, too.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    const auto hold = [](void* shared) {
      const std::unique_ptr<Shared> opened(static_cast<Shared*>(shared));
      const auto begin = Clock::now();
      while (!(*opened)->load(std::memory_order_acquire) &&
             std::chrono::duration<double>(Clock::now() - begin).count() < kHoldSeconds)
        std::this_thread::yield();
    };
    auto shared = std::make_unique<Shared>(opened_);
    check(cudaLaunchHostFunc(stream, hold, shared.get()), "cudaLaunchHostFunc");
    static_cast<void>(shared.release());  // the hold's
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  void open() { opened_->store(true, std::memory_order_release); }

 private:
  using Shared = std::shared_ptr<std::atomic<bool>>;
  Shared opened_ = std::make_shared<std::atomic<bool>>(false);
};

void wait_for(cudaStream_t stream) {
  const auto begin = Clock::now();
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) return check(state, "the device's work");
    if (std::chrono::duration<double>(Clock::now() - begin).count() > kPatience) {
      stuck = true;
      throw DeviceError(
          error_message("the device must end its work", "gpu",
                        "none after " + std::to_string(static_cast<int>(kPatience)) + " s: a kernel hangs"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

int mhz_of(Device device, int which) {
  static const Library nvml("libnvidia-ml.so.1");
  if (!nvml) return 0;
  const auto init = nvml.find<int()>("nvmlInit_v2");
  const auto by_bus = nvml.find<int(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
  const auto clock = nvml.find<int(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
  std::array<char, 32> bus{};
  if (!init || !by_bus || !clock ||
      cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device.index) != cudaSuccess)
    return 0;
  static const bool started = init() == 0;
  void* handle = nullptr;
  unsigned mhz = 0;
  return started && by_bus(bus.data(), &handle) == 0 && clock(handle, which, &mhz) == 0 ? static_cast<int>(mhz) : 0;
}

Clocks last_clocks;

// `what` between events, `runs` times without a gap: microseconds of each.
void batch(Device device, cudaStream_t stream, const std::function<void()>& before, const std::function<void()>& what,
           std::size_t runs, std::vector<double>& us) {
  std::array<OwnedEvent, kBatch> begin, end;
  for (std::size_t i = 0; i < runs; ++i) {
    check(cudaEventCreate(&begin[i].value), "cudaEventCreate");
    check(cudaEventCreate(&end[i].value), "cudaEventCreate");
  }
  Gate gate(stream);
  for (std::size_t i = 0; i < runs; ++i) {
    before();
    check(cudaEventRecord(begin[i].value, stream), "cudaEventRecord");
    what();
    check(cudaEventRecord(end[i].value, stream), "cudaEventRecord");
  }
  gate.open();
  last_clocks = {mhz_of(device, 1), mhz_of(device, 2)};
  wait_for(stream);
  for (std::size_t i = 0; i < runs; ++i) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin[i].value, end[i].value), "cudaEventElapsedTime");
    us.push_back(static_cast<double>(ms) * 1e3);
  }
}

}  // namespace

void copy(void* to, const void* from, std::int64_t bytes) {
  check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault), "cudaMemcpy");
}
void fill(void* memory, std::byte value, std::int64_t bytes) {
  check(cudaMemset(memory, static_cast<int>(value), static_cast<std::size_t>(bytes)), "cudaMemset");
}
void wait(Device device) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  wait_for(nullptr);
}
bool hangs() { return stuck; }

Timing time(Device device, const std::function<void(Stream)>& call, L2 l2) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  wait_for(nullptr);  // what was copied so far is not ordered with the stream below
  OwnedStream stream;
  check(cudaStreamCreateWithFlags(&stream.value, cudaStreamNonBlocking), "cudaStreamCreate");
  std::function<void()> before = [] {}, once = [&] { call({stream.value}); };
  OwnedMemory flush;
  if (l2 == L2::cold) {
    check(cudaMalloc(&flush.value, kFlushBytes), "cudaMalloc");
    before = [&] { check(cudaMemsetAsync(flush.value, 0, kFlushBytes, stream.value), "cudaMemsetAsync"); };
  }
  OwnedGraph graph;
  OwnedExec exec;
  double calls = 1;
  if (l2 == L2::graph) {
    check(cudaStreamBeginCapture(stream.value, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < kGraphCalls; ++i) once();
    check(cudaStreamEndCapture(stream.value, &graph.value), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec.value, graph.value, 0), "cudaGraphInstantiate");
    once = [&] { check(cudaGraphLaunch(exec.value, stream.value), "cudaGraphLaunch"); };
    calls = kGraphCalls;
  }

  std::vector<double> us;
  batch(device, stream.value, before, once, kProbe, us);  // only tells how long a call takes
  std::nth_element(us.begin(), us.begin() + kProbe / 2, us.end());
  if (us[kProbe / 2] / calls > kLong)
    for (const auto begin = Clock::now(); std::chrono::duration<double>(Clock::now() - begin).count() < kWarmSeconds;) {
      for (int i = 0; i < 5; ++i) once();
      wait_for(stream.value);
    }
  us.clear();
  while (static_cast<int>(us.size()) < kRuns) batch(device, stream.value, before, once, kBatch, us);
  for (double& x : us) x /= calls;
  return timing_of(std::move(us));
}

Clocks clocks(Device) { return last_clocks; }

}  // namespace sievemla::cli::gpu
