// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cuda/params.h -- what the writers and gatherers of caches are told. Plain C++; strides are in bytes where
// nothing else is said.
#pragma once
#include <cstdint>

#include "cuda/cache.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

struct LatentParams {
  cuda::SlotList at;
  cuda::Pages cache;
  KvFormat format;  // bf16, fp8_ds_mla or fp8_nope
  int latent, rope;
  // [n, latent] and [n, rope] f32 or bf16: of the writer; of the gatherer one tensor [n, latent + rope], and no second.
  void* latents;
  void* ropes;
  bool f32;
  std::int64_t latents_row, ropes_row;  // in elements
  ScaleRule rule;
};

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
