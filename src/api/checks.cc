// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "api/checks.h"

#include <algorithm>
#include <cstddef>

#include "base/view.h"
#include "sievemla/error.h"

namespace sievemla::api {
namespace {

std::string name_of(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

std::string list(std::initializer_list<DType> dtypes) {
  std::string text;
  for (DType t : dtypes) text += (text.empty() ? "" : " or ") + std::string(sievemla::name_of(t));
  return text;
}

std::string shape_text(const std::int64_t* extents, std::size_t rank) {
  std::string text = "[";
  for (std::size_t i = 0; i < rank; ++i) {
    if (i) text += ", ";
    text += extents[i] == kAny ? "*" : std::to_string(extents[i]);
  }
  return text + "]";
}

// Extents and strides are not negative, and the last element's byte offset fits 63 bits.
void check_extents(const TensorView& view, std::string_view where) {
  __int128 last = 0;
  bool empty = false;
  for (int i = 0; i < view.rank; ++i) {
    expects(view.dim(i) >= 0, "an extent must not be negative", where, describe(view));
    expects(view.step(i) >= 0, "a stride must not be negative", where, view.step(i), " in dimension ", i);
    empty |= view.dim(i) == 0;
    last += static_cast<__int128>(std::max<std::int64_t>(view.dim(i) - 1, 0)) * view.step(i);
  }
  if (empty) return;
  expects((last + 1) * size_of(view.dtype) <= INT64_MAX, "byte offsets must fit 63 bits", where, describe(view));
  expects(view.data != nullptr, "a tensor that is not empty must have data", where, "null");
}

}  // namespace

std::string describe(const TensorView& view) {
  if (!view) return "absent";
  return shape_text(view.shape.data(), static_cast<std::size_t>(view.rank)) + " " + sievemla::name_of(view.dtype);
}

void check_tensor(const Backend& backend, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<DType> dtypes, std::string_view where) {
  const std::string wanted = shape_text(shape.begin(), shape.size());
  bool fits = view.rank == static_cast<int>(shape.size());
  for (int i = 0; fits && i < view.rank; ++i) {
    const std::int64_t extent = shape.begin()[i];
    fits = extent == kAny || extent == view.dim(i);
  }
  expects(fits, "the shape must be " + wanted, where, describe(view));
  if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
    const std::string rule = "the dtype must be " + list(dtypes);
    if (view.dtype == DType::f16)
      throw Unsupported(error_message(rule + " (serve the model with --dtype bfloat16)", where, describe(view)));
    throw InvalidArgument(error_message(rule, where, describe(view)));
  }
  check_extents(view, where);
  expects(view.device == backend.device(), "the tensor must be on the backend's device " + name_of(backend.device()),
          where, name_of(view.device));
}

void check_contiguous_rows(const TensorView& view, std::string_view where) {
  const int last = view.rank - 1;
  expects(last < 0 || view.dim(last) <= 1 || view.step(last) == 1, "the last dimension must be contiguous", where,
          "stride ", last < 0 ? 0 : view.step(last));
}

void check_cache(const Backend& backend, const KvCache& cache, std::string_view where) {
  const KvFormatInfo& format = info(cache.format);
  const std::string name(format.name);
  expects(cache.latent >= 1 && cache.latent <= 65536, "the latent width must be 1 to 65536", where, cache.latent);
  expects(cache.rope >= 0 && cache.rope <= 65536, "the rope width must be 0 to 65536", where, cache.rope);
  expects(format.latent == 0 || format.latent == cache.latent,
          "a row of " + name + " has a latent of " + std::to_string(format.latent), where, cache.latent);
  expects(format.rope < 0 || format.rope == cache.rope,
          "a row of " + name + " has a rope of " + std::to_string(format.rope), where, cache.rope);
  check_tensor(backend, cache.pages, {kAny, kAny, kAny}, {format.storage}, where);
  check_contiguous_rows(cache.pages, where);
  const std::int64_t row = format.row_bytes(cache.latent, cache.rope) / size_of(format.storage);
  expects(cache.pages.dim(2) >= row, "the last dimension must hold a row of " + std::to_string(row), where,
          describe(cache.pages));
  expects(cache.pages.dim(1) >= 1, "the page size must be at least 1", where, cache.pages.dim(1));
  expects(cache.pages.dim(1) == 1 || cache.pages.step(1) >= row, "rows must not overlap: row stride >= row", where,
          "row stride ", cache.pages.step(1), ", row ", row);
}

void check_cache(const Backend& backend, const IndexCache& cache, std::string_view where) {
  const bool fp8 = cache.format == IndexFormat::fp8;
  const DType storage = fp8 ? DType::u8 : cache.format == IndexFormat::bf16 ? DType::bf16 : DType::f32;
  check_tensor(backend, cache.pages, {kAny, kAny, fp8 ? kIndexKeyBytes : kIndexDim}, {storage}, where);
  check_contiguous_rows(cache.pages, where);
  expects(cache.page_size() >= 1, "the page size must be at least 1", where, cache.page_size());
  const std::int64_t row = cache.pages.dim(2), step = cache.pages.step(1);
  if (fp8) {  // the page is one block of bytes, and its scales are read as f32
    expects(cache.page_size() == 1 || step == kIndexKeyBytes, "an fp8 page must be contiguous: row stride 132", where,
            step);
  } else {
    expects(cache.page_size() == 1 || step >= row, "keys must not overlap: row stride >= 128", where, step);
  }
}

void check_write_slots(const Backend& backend, const TensorView& slots, std::int64_t tokens, std::int64_t cache_slots,
                       std::string_view where) {
  check_tensor(backend, slots, {tokens}, {DType::i32, DType::i64}, where);
  if (backend.kind() == BackendKind::cuda) return;
  for (std::int64_t t = 0; t < tokens; ++t)
    if (const std::int64_t slot = base::load_int(slots, t); slot >= cache_slots)
      throw InvalidArgument(error_message("a slot must be below " + std::to_string(cache_slots) + ", the cache's slots",
                                          where, slot, " for token ", t));
}

void check_row_request(const Backend& backend, const TensorView& row_request, std::int64_t rows, std::int64_t requests,
                       std::string_view where) {
  if (row_request) {
    check_tensor(backend, row_request, {rows}, {DType::i32}, where);
  } else if (rows > 0) {
    expects(requests > 0 && rows % requests == 0,
            "without row_request the rows must divide evenly among the requests", where, rows, " rows, ", requests,
            " requests");
  }
}

void check_slot_map(const Backend& backend, const SlotMap& map, std::int64_t rows, std::string_view where) {
  const std::string at(where);
  check_tensor(backend, map.block_table, {kAny, kAny}, {DType::i32}, at + ".block_table");
  check_row_request(backend, map.row_request, rows, map.block_table.dim(0), at + ".row_request");
  expects(map.page_size >= 1, "the page size must be at least 1", at + ".page_size", map.page_size);
  const Shard& s = map.shard;
  expects(s.ranks >= 1 && s.rank >= 0 && s.rank < s.ranks && s.interleave >= 1,
          "a shard needs 0 <= rank < ranks and interleave >= 1", at + ".shard", "rank ", s.rank, ", ranks ", s.ranks,
          ", interleave ", s.interleave);
}

void check_workspace(Workspace workspace, std::int64_t needed, std::string_view where) {
  expects(workspace.bytes >= needed, "the workspace must hold " + std::to_string(needed) + " bytes", where,
          workspace.bytes);
  expects(needed == 0 || (workspace.data != nullptr &&
                          reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlign == 0),
          "the workspace must be aligned to 256 bytes", where, workspace.data);
}

}  // namespace sievemla::api
