// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/cuda/kernels.cuh -- stage 4 on CUDA: a CTA a (token, head).
#pragma once
#include "base/softmax.h"
#include "combine/cuda/kernels.h"
#include "cuda/cache.cuh"

namespace sievemla::stage::combine {

// Every thread makes the few weights for itself, in the order of the parts: no barrier, and the same bits each time.
template <class Arch>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CudaParams p) {
  using Softmax = base::Softmax<float>;
  constexpr int kColumns = 4;  // of a thread at a time: loads in flight
  const std::int64_t token = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const float* const scores = p.partial_lse + token * p.lse_token + head * p.lse_head;
  Softmax softmax;
  for (std::int64_t i = 0; i < p.parts; ++i) softmax.raise_peak(scores[i * p.lse_part]);
  for (std::int64_t i = 0; i < p.parts; ++i) softmax.sum += softmax.weight(scores[i * p.lse_part]);
  const float normaliser = softmax.normaliser(p.sink ? p.sink[head * p.sink_step] : Softmax::kNothing);

  const std::int64_t from = token * p.partial_token + head * p.partial_head;
  const std::int64_t to = token * p.out_token + head * p.out_head;
  for (std::int64_t first = threadIdx.x; first < p.width; first += kColumns * kThreads) {
    float sum[kColumns];
    for (float& x : sum) x = -0.f;  // what adding to changes no bit, not even the sign of a zero
    for (std::int64_t i = 0; i < p.parts; ++i) {
      const float score = scores[i * p.lse_part];
      if (score == Softmax::kNothing) continue;  // an empty part's row may hold NaN
      const float weight = softmax.weight(score);
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        if (const std::int64_t column = first + j * kThreads; column < p.width)
          sum[j] += weight * cuda::load_real(p.partial_out, p.partial_f32, from + i * p.partial_part + column);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const std::int64_t column = first + j * kThreads;
      if (column >= p.width) continue;
      const float x = softmax.empty() ? 0.f : sum[j] * normaliser;
      if (p.out_f32) static_cast<float*>(p.out)[to + column * p.out_step] = x;
      else static_cast<bf16*>(p.out)[to + column * p.out_step] = base::to_bf16(x);
    }
  }
  if (p.lse && threadIdx.x == 0) p.lse[token * p.out_lse_token + head * p.out_lse_head] = softmax.lse();
}

template <class Arch>
ConfigKernels make_kernels() {
  return {Arch::kSm, reinterpret_cast<const void*>(&combine_kernel<Arch>)};
}

}  // namespace sievemla::stage::combine
