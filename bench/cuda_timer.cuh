// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bench/cuda_timer.cuh -- times of device work, as the peer benchmark takes them: with the L2 cache flushed before each
// call, or of one of twenty calls in a CUDA graph.
#pragma once
#include <algorithm>
#include <vector>

#include "cuda_bench.cuh"

namespace {

__global__ void spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
}

struct Timer {
  char* flush = make<char>(256 << 20);
  template <class F>
  float flushed(F&& call) {
    for (int i = 0; i < 3; ++i) call(nullptr);
    GOOD(cudaDeviceSynchronize());
    std::vector<float> times;
    for (int chunk = 0; chunk < 2; ++chunk) {
      std::vector<cudaEvent_t> events(50);
      for (auto& e : events) GOOD(cudaEventCreate(&e));
      spin<<<1, 1>>>(4000000);
      for (int i = 0; i < 25; ++i) {
        GOOD(cudaMemsetAsync(flush, 0, 256 << 20));
        GOOD(cudaEventRecord(events[static_cast<std::size_t>(2 * i)]));
        call(nullptr);
        GOOD(cudaEventRecord(events[static_cast<std::size_t>(2 * i + 1)]));
      }
      GOOD(cudaDeviceSynchronize());
      for (int i = 0; i < 25; ++i) {
        float ms = 0;
        GOOD(cudaEventElapsedTime(&ms, events[static_cast<std::size_t>(2 * i)],
                                  events[static_cast<std::size_t>(2 * i + 1)]));
        times.push_back(ms * 1e3f);
      }
      for (auto& e : events) GOOD(cudaEventDestroy(e));
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  template <class F>
  float graph(F&& call) {
    cudaStream_t stream;
    GOOD(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 20; ++i) call(stream);
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t a, b;
    GOOD(cudaEventCreate(&a));
    GOOD(cudaEventCreate(&b));
    std::vector<float> times;
    for (int i = 0; i < 50; ++i) {
      GOOD(cudaEventRecord(a, stream));
      GOOD(cudaGraphLaunch(exec, stream));
      GOOD(cudaEventRecord(b, stream));
      GOOD(cudaStreamSynchronize(stream));
      float ms = 0;
      GOOD(cudaEventElapsedTime(&ms, a, b));
      times.push_back(ms * 50.f);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
};

}  // namespace
