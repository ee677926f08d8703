// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "api/checks.h"

#include <algorithm>
#include <array>
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

// Extents and strides are not negative, the last element's byte offset fits 63 bits, and the data is aligned.
void check_extents(const TensorView& view, const Where& where) {
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
  expects(reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(size_of(view.dtype)) == 0,
          "data must be aligned to its dtype", where, view.data, " for ", sievemla::name_of(view.dtype));
}

// No two elements at one address: taken in the order of their strides, each dimension steps over all that the ones
// before it reach. (A layout that is distinct but interleaved otherwise is refused too.)
void check_distinct(const TensorView& view, const Where& where) {
  std::array<int, TensorView::kMaxRank> order{};  // dimensions of more than one, insertion-sorted by stride
  int n = 0;
  for (int d = 0; d < view.rank; ++d) {
    if (view.dim(d) == 0) return;
    if (view.dim(d) == 1) continue;
    int i = n++;
    for (; i > 0 && view.step(order[static_cast<std::size_t>(i - 1)]) > view.step(d); --i)
      order[static_cast<std::size_t>(i)] = order[static_cast<std::size_t>(i - 1)];
    order[static_cast<std::size_t>(i)] = d;
  }
  std::int64_t reach = 0;  // the largest offset so far
  for (int i = 0; i < n; ++i) {
    const int d = order[static_cast<std::size_t>(i)];
    expects(view.step(d) > reach, "elements that are written must not overlap", where, describe(view), ", stride ",
            view.step(d), " in dimension ", d);
    reach += (view.dim(d) - 1) * view.step(d);
  }
}

// Slots are counted in 63 bits.
void check_slots(const TensorView& pages, const Where& where) {
  expects(pages.dim(0) <= INT64_MAX / pages.dim(1), "pages * page size must fit 63 bits", where, describe(pages));
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Description& description) {
  const TensorView& view = description.view;
  if (!view) return out << "absent";
  if (view.rank < 0 || view.rank > TensorView::kMaxRank) return out << "rank " << view.rank;
  return out << shape_text(view.shape.data(), static_cast<std::size_t>(view.rank)) << ' '
             << sievemla::name_of(view.dtype);
}

void check_tensor(const Backend& backend, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<DType> dtypes, const Where& where) {
  bool fits = view.rank == static_cast<int>(shape.size());
  for (int i = 0; fits && i < view.rank; ++i) {
    const std::int64_t extent = shape.begin()[i];
    fits = extent == kAny || extent == view.dim(i);
  }
  if (!fits) {
    const std::string wanted = shape_text(shape.begin(), shape.size());
    throw InvalidArgument(error_message("the shape must be " + wanted, where, describe(view)));
  }
  if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
    std::string rule = "the dtype must be " + list(dtypes);
    if (view.dtype != DType::f16) throw InvalidArgument(error_message(rule, where, describe(view)));
    if (std::find(dtypes.begin(), dtypes.end(), DType::bf16) != dtypes.end())
      rule += " (serve the model with --dtype bfloat16)";
    throw Unsupported(error_message(rule, where, describe(view)));
  }
  check_extents(view, where);
  if (view.device != backend.device()) {
    const std::string rule = "the tensor must be on the backend's device " + name_of(backend.device());
    throw InvalidArgument(error_message(rule, where, name_of(view.device)));
  }
}

void check_output(const Backend& backend, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<DType> dtypes, const Where& where) {
  check_tensor(backend, view, shape, dtypes, where);
  check_distinct(view, where);
}

void check_bound(std::int64_t value, std::int64_t most, const char* rule, const Where& where) {
  expects(value >= 0 && value <= most, rule, where, value, ", at most ", most);
}

void check_scale_rule(ScaleRule rule, const Where& where) {
  expects(rule == ScaleRule::arbitrary || rule == ScaleRule::power_of_two || rule == ScaleRule::engine,
          "a scale rule is arbitrary, power_of_two or engine", where, static_cast<int>(rule));
}

void check_contiguous_rows(const TensorView& view, const Where& where) {
  const int last = view.rank - 1;
  expects(last < 0 || view.dim(last) <= 1 || view.step(last) == 1, "the last dimension must be contiguous", where,
          "stride ", last < 0 ? 0 : view.step(last));
}

void check_cache(const Backend& backend, const KvCache& cache, const Where& where) {
  const KvFormatInfo& format = info(cache.format);
  expects(cache.latent >= 1 && cache.latent <= 65536, "the latent width must be 1 to 65536", where, cache.latent);
  expects(cache.rope >= 0 && cache.rope <= 65536, "the rope width must be 0 to 65536", where, cache.rope);
  expects(format.latent == 0 || format.latent == cache.latent, "the latent width must be the format's", where,
          cache.latent, ", a row of ", format.name, " has ", format.latent);
  expects(format.rope < 0 || format.rope == cache.rope, "the rope width must be the format's", where, cache.rope,
          ", a row of ", format.name, " has ", format.rope);
  check_tensor(backend, cache.pages, {kAny, kAny, kAny}, {format.storage}, where);
  check_contiguous_rows(cache.pages, where);
  const std::int64_t row = format.row_bytes(cache.latent, cache.rope) / size_of(format.storage);
  expects(cache.pages.dim(2) >= row, "the last dimension must hold a row", where, describe(cache.pages),
          ", a row takes ", row);
  expects(cache.pages.dim(1) >= 1, "the page size must be at least 1", where, cache.pages.dim(1));
  check_slots(cache.pages, where);
  TensorView rows = cache.pages;  // without what pads them
  rows.shape[2] = row;
  check_distinct(rows, where);
}

void check_cache(const Backend& backend, const IndexCache& cache, const Where& where) {
  const DType storage = storage_of(cache.format);
  const bool fp8 = cache.format == IndexFormat::fp8;
  check_tensor(backend, cache.pages, {kAny, kAny, fp8 ? kIndexKeyBytes : kIndexDim}, {storage}, where);
  check_contiguous_rows(cache.pages, where);
  expects(cache.page_size() >= 1, "the page size must be at least 1", where, cache.page_size());
  check_slots(cache.pages, where);
  expects(!fp8 || cache.page_size() == 1 || cache.pages.step(1) == kIndexKeyBytes,  // its scales come after its keys
          "an fp8 page must be contiguous: row stride 132", where, cache.pages.step(1));
  check_distinct(cache.pages, where);
}

void check_write_slots(const Backend& backend, const TensorView& slots, std::int64_t tokens, std::int64_t cache_slots,
                       const Where& where) {
  check_tensor(backend, slots, {tokens}, {DType::i32, DType::i64}, where);
  if (!on_host(backend)) return;
  for (std::int64_t t = 0; t < tokens; ++t)
    if (const std::int64_t slot = base::load_int(slots, t); slot >= cache_slots)
      throw InvalidArgument(error_message("a slot must be below " + std::to_string(cache_slots) + ", the cache's slots",
                                          where, slot, " for token ", t));
}

void check_row_request(const Backend& backend, const TensorView& row_request, std::int64_t rows, std::int64_t requests,
                       const Where& where) {
  if (row_request) {
    check_tensor(backend, row_request, {rows}, {DType::i32}, where);
  } else if (rows > 0) {
    expects(requests > 0 && rows % requests == 0, "without row_request the rows must divide evenly among the requests",
            where, rows, " rows, ", requests, " requests");
  }
}

void check_slot_map(const Backend& backend, const SlotMap& map, std::int64_t rows, const Where& where) {
  check_tensor(backend, map.block_table, {kAny, kAny}, {DType::i32}, where + ".block_table");
  check_row_request(backend, map.row_request, rows, map.block_table.dim(0), where + ".row_request");
  expects(map.page_size >= 1, "the page size must be at least 1", where + ".page_size", map.page_size);
  const Shard& s = map.shard;
  expects(s.ranks >= 1 && s.rank >= 0 && s.rank < s.ranks && s.interleave >= 1,
          "a shard needs 0 <= rank < ranks and interleave >= 1", where + ".shard", "rank ", s.rank, ", ranks ", s.ranks,
          ", interleave ", s.interleave);
}

void check_workspace(Workspace workspace, std::int64_t needed, const Where& where) {
  expects(workspace.bytes >= needed, "the workspace must be large enough", where, workspace.bytes, " bytes, needed ",
          needed);
  if (needed == 0) return;
  expects(workspace.data != nullptr, "the workspace must have data", where, "null");
  expects(reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlign == 0,
          "the workspace must be aligned to 256 bytes", where, workspace.data);
}

}  // namespace sievemla::api
