// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/formats.h -- the list of row types. A new one: a header with its byte map, and its name here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kv/fp8_rows.h"
#include "kv/plain.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

template <class... Rows>
struct RowTypes {};
using AllRows = RowTypes<F32Row, Bf16Row, Fp8DsMlaRow, Fp8NopeRow>;

namespace detail {
template <class F, class Row, class... Rest>
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
  const std::int64_t page = slot / cache.page_size(), offset = slot % cache.page_size();
  return static_cast<std::byte*>(cache.pages.data) +
         (page * cache.pages.step(0) + offset * cache.pages.step(1)) * size_of(cache.pages.dtype);
}

// The row of a slot, dequantised: out[0, latent + rope). Double holds every format exactly.
template <class Real>
void load_row(const KvCache& cache, std::int64_t slot, Real* out) {
  const std::byte* row = row_address(cache, slot);
  visit(cache.format, [&](auto type) { type.load(row, cache.latent, cache.rope, out); });
}

}  // namespace sievemla::kv
