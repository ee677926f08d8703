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

// 128 values of `dtype` (u8 = e4m3) that lie side by side: a key without its scale, or a head of a query.
template <class Real>
void load_index_values(DType dtype, const std::byte* from, Real* out) {
  for (int i = 0; i < kIndexDim; ++i) {
    switch (dtype) {
      case DType::u8: out[i] = static_cast<Real>(kE4m3Value[static_cast<std::uint8_t>(from[i])]); break;
      case DType::bf16: out[i] = static_cast<Real>(base::to_f32(reinterpret_cast<const bf16*>(from)[i])); break;
      default: out[i] = static_cast<Real>(reinterpret_cast<const float*>(from)[i]); break;
    }
  }
}

// The scale of a key, 1 where the format has none.
inline float load_index_scale(const IndexKeyAddress& at) {
  float scale = 1.f;
  if (at.scale) std::memcpy(&scale, at.scale, sizeof scale);
  return scale;
}

// The key of a slot, WITHOUT its scale, which is returned (1 where the format has none).
template <class Real>
Real load_index_key(const IndexCache& cache, std::int64_t slot, Real* out) {
  const IndexKeyAddress at = index_key_address(cache, slot);
  load_index_values(cache.pages.dtype, at.key, out);
  return static_cast<Real>(load_index_scale(at));
}

// amax is raised to these before it is divided by 448, as engines do, so that an all-zero key gets their bytes too.
inline constexpr float kIndexKeyFloor = 1e-4f, kIndexQueryFloor = 1e-10f;

// Stores 128 values as `dtype`, rounded once, and returns their scale: 1, or what quantise_group chose for u8 = e4m3.
// There the values are rounded to f32 first: given those bits the codes are defined, and backends may differ by one
// code where their f32 values straddle a rounding edge (and then in the scale, if that value is the largest).
template <class Real>
float store_index_values(const Real* x, DType dtype, ScaleRule rule, float floor, std::byte* to) {
  if (dtype == DType::u8) {
    float rounded[kIndexDim];
    for (int i = 0; i < kIndexDim; ++i) rounded[i] = static_cast<float>(x[i]);
    return quantise_group(rounded, kIndexDim, rule, floor, reinterpret_cast<std::uint8_t*>(to));
  }
  base::visit_real(dtype, [&](auto type) {
    using T = decltype(type);
    for (int i = 0; i < kIndexDim; ++i) reinterpret_cast<T*>(to)[i] = base::round_to<T>(x[i]);
  });
  return 1.f;
}

// Writes the key of a slot, and its scale where the format has one. `store` is store_index_values or does the same.
template <class Real, class Store>
void store_index_key(const IndexCache& cache, std::int64_t slot, const Real* key, ScaleRule rule, Store&& store) {
  const IndexKeyAddress at = index_key_address(cache, slot);
  const float scale = store(key, cache.pages.dtype, rule, kIndexKeyFloor, at.key);
  if (at.scale) std::memcpy(at.scale, &scale, sizeof scale);
}
template <class Real>
void store_index_key(const IndexCache& cache, std::int64_t slot, const Real* key, ScaleRule rule) {
  store_index_key(cache, slot, key, rule, store_index_values<Real>);
}

}  // namespace sievemla::kv
