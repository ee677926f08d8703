// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/index_page.h -- indexer keys in their cache.
//
//   fp8 page of P tokens:  [0, 128 P)        e4m3 key of token i at 128 i
//                          [128 P, 132 P)    f32 scale of token i at 128 P + 4 i
//   f32, bf16 page:        key of token i at i * row stride
//
// Source: DeepGEMM fp8_paged_mqa_logits, vLLM indexer_k_quant_and_cache. Golden bytes: tests/golden/trace-indexer.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/view.h"
#include "kv/e4m3.h"
#include "kv/quantise.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

// Where a slot's key starts; f32 and bf16 caches have no scale.
struct IndexKeyAddress {
  std::byte* key;
  std::byte* scale;
};

inline IndexKeyAddress index_key_address(const IndexCache& cache, std::int64_t slot) {
  const std::int64_t page = slot / cache.page_size(), i = slot % cache.page_size();
  std::byte* base = static_cast<std::byte*>(cache.pages.data) + page * cache.pages.step(0) * size_of(cache.pages.dtype);
  if (cache.format != IndexFormat::fp8) return {base + i * cache.pages.step(1) * size_of(cache.pages.dtype), nullptr};
  return {base + i * kIndexDim, base + cache.page_size() * kIndexDim + i * 4};
}

// The key of a slot, WITHOUT its scale, which is returned (1 where the format has none).
template <class Real>
Real load_index_key(const IndexCache& cache, std::int64_t slot, Real* out) {
  const IndexKeyAddress at = index_key_address(cache, slot);
  switch (cache.format) {
    case IndexFormat::f32:
      for (int i = 0; i < kIndexDim; ++i) out[i] = static_cast<Real>(reinterpret_cast<const float*>(at.key)[i]);
      return 1;
    case IndexFormat::bf16:
      for (int i = 0; i < kIndexDim; ++i)
        out[i] = static_cast<Real>(base::to_f32(reinterpret_cast<const bf16*>(at.key)[i]));
      return 1;
    case IndexFormat::fp8: break;
  }
  for (int i = 0; i < kIndexDim; ++i) out[i] = static_cast<Real>(kE4m3Value[static_cast<std::uint8_t>(at.key[i])]);
  float scale;
  std::memcpy(&scale, at.scale, sizeof scale);
  return static_cast<Real>(scale);
}

inline constexpr float kIndexAmaxFloor = 1e-4f;  // of engines, so that an all-zero key gets their bytes too

// Writes the key of a slot; fp8: quantised with one scale.
inline void store_index_key(const IndexCache& cache, std::int64_t slot, const float* key, ScaleRule rule) {
  const IndexKeyAddress at = index_key_address(cache, slot);
  switch (cache.format) {
    case IndexFormat::f32: std::memcpy(at.key, key, kIndexDim * sizeof(float)); return;
    case IndexFormat::bf16:
      for (int i = 0; i < kIndexDim; ++i) reinterpret_cast<bf16*>(at.key)[i] = base::to_bf16(key[i]);
      return;
    case IndexFormat::fp8: break;
  }
  const float scale =
      quantise_group(key, kIndexDim, rule, kIndexAmaxFloor, reinterpret_cast<std::uint8_t*>(at.key));
  std::memcpy(at.scale, &scale, sizeof scale);
}

}  // namespace sievemla::kv
