// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/formats.cc -- the descriptors of the row types, made from their list, and the names of the index formats.
#include "kv/formats.h"

#include <array>
#include <string>

#include "sievemla/error.h"

namespace sievemla {
namespace {

template <class... Rows>
constexpr auto descriptors(kv::RowTypes<Rows...>) {
  return std::array{KvFormatInfo{Rows::kFormat, Rows::kName, Rows::kStorage, Rows::kLatent, Rows::kRope,
                                 Rows::kScaleGroup, Rows::kSource}...};
}
constexpr auto kKvFormats = descriptors(kv::AllRows{});

struct IndexFormatInfo {
  IndexFormat format;
  std::string_view name;
  DType storage;
};
constexpr IndexFormatInfo kIndexFormats[] = {
    {IndexFormat::f32, "f32", DType::f32},
    {IndexFormat::bf16, "bf16", DType::bf16},
    {IndexFormat::fp8, "fp8", DType::u8},
};

// The format of the row of `table` that has this name.
template <class Table>
auto by_name(const Table& table, std::string_view name, const char* what) {
  std::string names;
  for (const auto& row : table) {
    if (row.name == name) return row.format;
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  throw InvalidArgument(error_message(std::string(what) + " is one of " + names, what, "'", name, "'"));
}

}  // namespace

std::span<const KvFormatInfo> kv_formats() { return kKvFormats; }

const KvFormatInfo& info(KvFormat format) {
  for (const KvFormatInfo& row : kKvFormats)
    if (row.format == format) return row;
  throw InvalidArgument(error_message("a row type must be in kv_formats()", "KvFormat", static_cast<int>(format)));
}

KvFormat kv_format_by_name(std::string_view name) { return by_name(kKvFormats, name, "kv format"); }

std::int64_t KvFormatInfo::row_bytes(int latent_width, int rope_width) const {
  return kv::visit(format, [&](auto row) { return row.row_bytes(latent_width, rope_width); });
}

std::string_view name_of(IndexFormat format) {
  for (const IndexFormatInfo& row : kIndexFormats)
    if (row.format == format) return row.name;
  return "?";
}

DType storage_of(IndexFormat format) {
  for (const IndexFormatInfo& row : kIndexFormats)
    if (row.format == format) return row.storage;
  throw InvalidArgument(error_message("an index format is f32, bf16 or fp8", "IndexFormat", static_cast<int>(format)));
}

IndexFormat index_format_by_name(std::string_view name) { return by_name(kIndexFormats, name, "index format"); }

}  // namespace sievemla
