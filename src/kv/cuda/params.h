// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cuda/params.h -- what the writers and gatherers of caches are told. Plain C++; strides are in bytes where
// nothing else is said.
#pragma once
#include <cstdint>

#include "cuda/latent.h"

namespace sievemla::kv {

struct IndexGatherParams {
  cuda::SlotList at;
  cuda::Pages cache;
  int key_bytes;  // 128, or 256 of a bf16 cache
  bool scaled;
  unsigned char* keys;
  std::int64_t keys_row;
  float* scales;
  std::int64_t scales_step;  // in elements
};

}  // namespace sievemla::kv
