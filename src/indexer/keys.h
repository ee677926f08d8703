// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/keys.h -- which keys a row of scores sees, and where each lies; paged and contiguous keys look alike.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/view.h"
#include "kv/index_page.h"
#include "sievemla/indexer.h"

namespace sievemla::stage::indexer {

// Row t sees keys [first, first + length) of `request`; key first + c scores into column c.
struct RowKeys {
  std::int64_t request, first, length;
};

inline RowKeys keys_of_row(const IndexScoreArgs& args, std::int64_t t) {
  const std::int64_t length = std::max<std::int64_t>(base::load_int(args.lengths, t), 0);
  if (length == 0) return {0, 0, 0};  // a padded row: its request and start may be anything
  if (args.contiguous.keys) {
    const TensorView& starts = args.contiguous.starts;
    return {0, starts ? base::load_int(starts, t) : 0, length};
  }
  const std::int64_t rows = args.q.dim(0), requests = args.paged.block_table.dim(0);
  return {base::request_of(args.paged.row_request, t, rows, requests), 0, length};
}

inline DType key_dtype(const IndexScoreArgs& args) {
  return args.contiguous.keys ? args.contiguous.keys.dtype : args.paged.cache.pages.dtype;
}

// Key j of a request; `key` is null where its page lies outside the block table or the cache.
inline kv::IndexKeyAddress key_address(const IndexScoreArgs& args, std::int64_t request, std::int64_t j) {
  if (const ContiguousKeys& c = args.contiguous; c.keys) {
    std::byte* scale = c.scales ? static_cast<std::byte*>(c.scales.data) + 4 * base::offset(c.scales, j) : nullptr;
    return {static_cast<std::byte*>(c.keys.data) + base::offset(c.keys, j) * size_of(c.keys.dtype), scale};
  }
  const IndexCache& cache = args.paged.cache;
  const TensorView& table = args.paged.block_table;
  const std::int64_t page_size = cache.page_size(), logical = j / page_size;
  if (logical >= table.dim(1)) return {nullptr, nullptr};
  const std::int64_t physical = *base::at<std::int32_t>(table, request, logical);
  if (physical < 0 || physical >= cache.pages.dim(0)) return {nullptr, nullptr};
  return kv::index_key_address(cache, physical * page_size + j % page_size);
}

// Keys that lie at equal distances; steps in bytes.
struct KeyRun {
  const std::byte *key, *scale;  // of the first, null where key_address says so
  std::int64_t key_step, scale_step;
};

// f(j, n, run) for the runs [j, j + n) that make up keys [first, first + count) of a request.
template <class F>
void for_each_run(const IndexScoreArgs& args, std::int64_t request, std::int64_t first, std::int64_t count, F&& f) {
  if (count == 0) return;
  if (const ContiguousKeys& c = args.contiguous; c.keys) {
    const kv::IndexKeyAddress at = key_address(args, request, first);
    return f(first, count, KeyRun{at.key, at.scale, c.keys.step(0) * size_of(c.keys.dtype), 4 * c.scales.stride[0]});
  }
  const IndexCache& cache = args.paged.cache;
  const std::int64_t page_size = cache.page_size(), end = first + count;
  const std::int64_t step = cache.format == IndexFormat::fp8 ? kIndexDim : cache.pages.step(1);
  for (std::int64_t j = first, n; j < end; j += n) {
    n = std::min(end - j, page_size - j % page_size);
    const kv::IndexKeyAddress at = key_address(args, request, j);
    f(j, n, KeyRun{at.key, at.scale, step * size_of(cache.pages.dtype), 4});
  }
}

// Head h of row t's query.
template <class Real>
void load_query(const TensorView& q, std::int64_t t, std::int64_t h, Real* out) {
  kv::load_index_values(q.dtype, static_cast<const std::byte*>(q.data) + base::offset(q, t, h) * size_of(q.dtype), out);
}

}  // namespace sievemla::stage::indexer
