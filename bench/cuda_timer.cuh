// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bench/cuda_timer.cuh -- times of device work, as the peer benchmark takes them: with the L2 cache flushed before each
// call, the host ahead and the clock warm, or of one of twenty calls in a CUDA graph.
#pragma once
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "cuda_bench.cuh"

namespace {

__global__ void spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
}

struct Timed {
  float us, p10, p90;
  explicit Timed(std::vector<float> times) {
    std::sort(times.begin(), times.end());
    us = times[times.size() / 2], p10 = times[times.size() / 10], p90 = times[times.size() * 9 / 10];
  }
};

class Timer {
 public:
  template <class F>
  Timed flushed(F&& call) {
    for (int i = 0; i < 3; ++i) call(nullptr);
    GOOD(cudaDeviceSynchronize());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 5; ++i) call(nullptr);
    GOOD(cudaDeviceSynchronize());
    const double each = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 5;
    if (each > 200e-6) {
      for (int i = 0; i < 0.3 / each; ++i) call(nullptr);
      GOOD(cudaDeviceSynchronize());
    }
    std::vector<float> times;
    for (int chunk = 0; chunk < 2; ++chunk) {
      std::vector<cudaEvent_t> events(50);
      for (auto& e : events) GOOD(cudaEventCreate(&e));
      spin<<<1, 1>>>(4000000);
      for (std::size_t i = 0; i < 25; ++i) {
        GOOD(cudaMemsetAsync(flush_, 0, kFlushBytes));
        GOOD(cudaEventRecord(events[2 * i]));
        call(nullptr);
        GOOD(cudaEventRecord(events[2 * i + 1]));
      }
      GOOD(cudaDeviceSynchronize());
      for (std::size_t i = 0; i < 25; ++i) times.push_back(elapsed_us(events[2 * i], events[2 * i + 1]));
      for (auto& e : events) GOOD(cudaEventDestroy(e));
    }
    return Timed(std::move(times));
  }
  template <class F>
  Timed graph(F&& call) {
    constexpr int kCalls = 20;
    cudaStream_t stream;
    GOOD(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < kCalls; ++i) call(stream);
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphInstantiate(&exec, graph, 0));
    GOOD(cudaGraphLaunch(exec, stream));
    cudaEvent_t a, b;
    GOOD(cudaEventCreate(&a));
    GOOD(cudaEventCreate(&b));
    std::vector<float> times;
    for (int i = 0; i < 50; ++i) {
      GOOD(cudaEventRecord(a, stream));
      GOOD(cudaGraphLaunch(exec, stream));
      GOOD(cudaEventRecord(b, stream));
      GOOD(cudaStreamSynchronize(stream));
      times.push_back(elapsed_us(a, b) / kCalls);
    }
    GOOD(cudaEventDestroy(a));
    GOOD(cudaEventDestroy(b));
    GOOD(cudaGraphExecDestroy(exec));
    GOOD(cudaGraphDestroy(graph));
    GOOD(cudaStreamDestroy(stream));
    return Timed(std::move(times));
  }

 private:
  static constexpr std::size_t kFlushBytes = std::size_t{256} << 20;
  static float elapsed_us(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    GOOD(cudaEventElapsedTime(&ms, from, to));
    return ms * 1e3f;
  }
  char* flush_ = make<char>(kFlushBytes);
};

}  // namespace
