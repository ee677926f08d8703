// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/heads.cuh -- indexer keys and queries on CUDA: a warp a key, or a head of a query.
//
// In double up to the roundings that are asked for, as the reference; only sums add in another order. Lane l has
// elements l, l + 32, l + 64, l + 96.
#pragma once
#include "cuda/cache.cuh"
#include "cuda/ptx/ptx.cuh"
#include "indexer/cuda/params.h"

namespace sievemla::stage::indexer {

using HeadValues = double[4];

__device__ inline double sum_of_warp(double x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ inline void rotate(HeadValues& x, const CudaRope& rope, std::int64_t token, int lane) {
  if (rope.style == RopeStyle::none) return;
  const std::int64_t position = rope.wide
                                    ? static_cast<const std::int64_t*>(rope.positions)[token * rope.positions_step]
                                    : static_cast<const int*>(rope.positions)[token * rope.positions_step];
  // A position out of range is rejected on host backends; here it reads the table's first row.
  const std::int64_t row = (position >= 0 && position < rope.most ? position : 0) * rope.table_row;
  auto table = [&](int i) {
    return static_cast<double>(cuda::load_real(rope.cos_sin, rope.f32, row + i * rope.table_step));
  };
  if (rope.style == RopeStyle::half_split) {
    const double cosine = table(lane), sine = table(lane + 32), first = x[0];
    x[0] = first * cosine - x[1] * sine;
    x[1] = x[1] * cosine + first * sine;
    return;
  }
  const bool odd = lane % 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = (lane + 32 * i) / 2;
    const double cosine = table(pair), sine = table(32 + pair), other = __shfl_xor_sync(~0u, x[i], 1);
    x[i] = odd ? x[i] * cosine + other * sine : x[i] * cosine - other * sine;
  }
}

// As round_to_bf16 of indexer/head.h.
__device__ inline void round_to_bf16(HeadValues& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = static_cast<double>(base::to_f32(base::to_bf16(static_cast<float>(x[i]))));
}

// As hadamard of indexer/head.h: bits 0 .. 4 of an element are the lane's, 5 and 6 its place there.
__device__ inline void hadamard(HeadValues& x, int lane) {
#pragma unroll 1
  for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
    for (double& mine : x) {
      const double other = __shfl_xor_sync(~0u, mine, bit);
      mine = lane & bit ? other - mine : mine + other;
    }
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const double a = x[i], b = x[i + bit];
      x[i] = a + b, x[i + bit] = a - b;
    }
#pragma unroll
  for (double& mine : x) mine *= kHadamardScale;
}

// Rope, and Hadamard where asked for.
template <class Params>
__device__ inline void turn(const Params& p, HeadValues& x, std::int64_t token, int lane) {
  rotate(x, p.rope, token, lane);
  if (p.round_bf16) round_to_bf16(x);
  if (!p.hadamard) return;
  hadamard(x, lane);
  if (p.round_bf16) round_to_bf16(x);
}

// Rounds to f32, then to codes; returns the scale.
__device__ inline float store_codes(const HeadValues& x, ScaleRule rule, float floor, unsigned char* out, int lane) {
  const float rounded[4] = {static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]),
                            static_cast<float>(x[3])};
  const float scale = cuda::scale_of_group(rounded, rule, floor);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[lane + 32 * i] = cuda::code_of(rounded[i], scale, rule);
  return scale;
}
__device__ inline void store_bf16(const HeadValues& x, bf16* out, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[lane + 32 * i] = base::to_bf16(x[i]);
}

// By a warp.
__device__ inline void write_key(const WriteKeysParams& p, std::int64_t token, int lane) {
  const std::int64_t slot = cuda::slot_at(p.at, token);
  if (slot < 0 || slot >= p.cache.slots) return;
  HeadValues x;
  double mean = 0, variance = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = static_cast<double>(cuda::load_real(p.k, p.k_f32, token * p.k_row + (lane + 32 * i) * p.k_step));
    mean += x[i];
  }
  mean = sum_of_warp(mean) / 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) variance += (x[i] - mean) * (x[i] - mean);
  const double scale = 1 / sqrt(sum_of_warp(variance) / 128 + static_cast<double>(p.eps));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = lane + 32 * i;
    x[i] = (x[i] - mean) * scale * static_cast<double>(cuda::load_real(p.weight, p.weight_f32, at * p.weight_step)) +
           static_cast<double>(cuda::load_real(p.bias, p.bias_f32, at * p.bias_step));
  }
  if (p.round_bf16) round_to_bf16(x);
  turn(p, x, token, lane);
  const cuda::SlotPlace place(p.cache, slot);
  if (p.fp8) {
    const float key_scale = store_codes(x, p.rule, p.floor, place.page + place.offset * 128, lane);
    if (lane == 0)
      reinterpret_cast<float*>(place.page + static_cast<std::int64_t>(p.cache.page_size) * 128)[place.offset] =
          key_scale;
  } else {
    store_bf16(x, reinterpret_cast<bf16*>(place.page + place.offset * p.cache.row_bytes), lane);
  }
}

// These do not let the next kernel start: scores fill every multiprocessor, and would lie badly beside what is left
// here (64 rows at 32K: 96 us instead of 82).
template <class Arch>
__global__ void write_keys_kernel(const __grid_constant__ WriteKeysParams p) {
  cuda::wait_for_kernel();
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kHeadWarps + threadIdx.x / 32;
  if (token < p.tokens) write_key(p, token, static_cast<int>(threadIdx.x % 32));
}

template <class Arch>
__global__ void queries_kernel(const __grid_constant__ QueryParams p) {
  cuda::wait_for_kernel();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kHeadWarps + threadIdx.x / 32;
  if (const std::int64_t key = at - p.tokens * p.heads; key >= 0) {
    if (key < p.keys.tokens) write_key(p.keys, key, lane);
    return;
  }
  const std::int64_t token = at / p.heads, head = at % p.heads;
  HeadValues x;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = static_cast<double>(
        cuda::load_real(p.q, p.q_f32, token * p.q_token + head * p.q_head + (lane + 32 * i) * p.q_step));
  turn(p, x, token, lane);
  const std::int64_t out = token * p.out_token + head * p.out_head;
  float scale = 1.f;
  if (p.fp8) scale = store_codes(x, p.rule, p.floor, static_cast<unsigned char*>(p.out) + out, lane);
  else store_bf16(x, static_cast<bf16*>(p.out) + out, lane);
  if (lane == 0) {
    const double weight =
        static_cast<double>(cuda::load_real(p.weights, p.weights_f32, token * p.weights_token + head * p.weights_head));
    p.out_weights[token * p.out_weights_token + head * p.out_weights_head] =
        static_cast<float>(weight * static_cast<double>(p.weight_scale) * static_cast<double>(scale));
  }
}

}  // namespace sievemla::stage::indexer
