// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/formats.h -- the list of row types. A new one: a header with its byte map, and its name here.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/view.h"
#include "kv/fp8_rows.h"
#include "kv/plain.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

// Constants, and the two directions: `load` dequantises into float, double or bf16, rounding once; `store` takes f32 or
// bf16 and writes row_bytes bytes, no more.
template <class Row>
concept RowType = requires(std::byte* row, std::span<const float> x, double* out) {
  { Row::kFormat } -> std::convertible_to<KvFormat>;
  { Row::kName } -> std::convertible_to<std::string_view>;
  { Row::kSource } -> std::convertible_to<std::string_view>;
  { Row::kStorage } -> std::convertible_to<DType>;
  { Row::kLatent + Row::kRope + Row::kScaleGroup } -> std::convertible_to<int>;
  { Row::row_bytes(512, 64) } -> std::same_as<std::int64_t>;
  Row::load(row, 512, 64, out);
  Row::store(row, x, x, ScaleRule{});
};

template <RowType... Rows>
struct RowTypes {};
using AllRows = RowTypes<F32Row, Bf16Row, Fp8DsMlaRow, Fp8NopeRow>;

namespace detail {
template <class F, RowType Row, RowType... Rest>
decltype(auto) visit(KvFormat format, F&& f, RowTypes<Row, Rest...>) {
  if constexpr (sizeof...(Rest) == 0) return f(Row{});
  else return format == Row::kFormat ? f(Row{}) : visit(format, std::forward<F>(f), RowTypes<Rest...>{});
}
}  // namespace detail

// f(Row{}) for the row type of `format`, which is one of the list.
template <class F>
decltype(auto) visit(KvFormat format, F&& f) {
  return detail::visit(format, std::forward<F>(f), AllRows{});
}

// First byte of a slot's row. The slot is in [0, cache.slots()).
inline std::byte* row_address(const KvCache& cache, std::int64_t slot) {
  const auto [page, offset] = base::divide(slot, cache.page_size());
  return static_cast<std::byte*>(cache.pages.data) +
         (page * cache.pages.step(0) + offset * cache.pages.step(1)) * size_of(cache.pages.dtype);
}

// The row of a slot, dequantised: out[0, latent + rope). Double holds every format exactly; float and bf16 round once.
template <class T>
void load_row(const KvCache& cache, std::int64_t slot, T* out) {
  const std::byte* row = row_address(cache, slot);
  visit(cache.format, [&](auto type) { type.load(row, cache.latent, cache.rope, out); });
}

// Writes the row of a slot from latent[0, cache.latent) and rope[0, cache.rope), f32 or bf16. No rope: null.
template <class T>
void store_row(const KvCache& cache, std::int64_t slot, const T* latent, const T* rope, ScaleRule rule) {
  const std::span latents(latent, static_cast<std::size_t>(cache.latent));
  const std::span ropes(rope, static_cast<std::size_t>(cache.rope));
  visit(cache.format, [&](auto type) { type.store(row_address(cache, slot), latents, ropes, rule); });
}

}  // namespace sievemla::kv
