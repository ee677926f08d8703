// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/cuda/params.h -- what the merging kernel is told. Plain C++; strides in elements.
#pragma once
#include <cstdint>

namespace sievemla::stage::combine {

struct CudaParams {
  std::int64_t parts, heads, width;
  const void* partial_out;
  bool partial_f32;  // else bf16
  std::int64_t partial_part, partial_token, partial_head;
  const float* partial_lse;
  std::int64_t lse_part, lse_token, lse_head;
  const float* sink;
  std::int64_t sink_step;
  void* out;
  bool out_f32;  // else bf16
  std::int64_t out_token, out_head, out_step;
  float* lse;
  std::int64_t out_lse_token, out_lse_head;
};

}  // namespace sievemla::stage::combine
