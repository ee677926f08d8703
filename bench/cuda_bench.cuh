// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bench/cuda_bench.cuh -- what the standalone CUDA programs share: errors end the program, random numbers, memory that
// is poisoned.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

void good(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(e));
  std::exit(3);
}
#define GOOD(x) good((x), #x)

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t x = state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
  float normal() {
    return static_cast<float>(std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()));
  }
  unsigned char code() {
    const auto c = static_cast<unsigned char>(next());
    return (c & 0x7F) == 0x7F ? 0x30 : c;
  }
};

template <class T>
T* make(std::size_t n, int fill = 0xA5) {
  T* d = nullptr;
  GOOD(cudaMalloc(&d, std::max<std::size_t>(n, 1) * sizeof(T)));
  GOOD(cudaMemset(d, fill, n * sizeof(T)));
  return d;
}

}  // namespace
