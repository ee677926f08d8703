// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/call_trace.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attention/rows.h"
#include "base/view.h"
#include "kv/formats.h"
#include "kv/index_page.h"
#include "sievemla/error.h"

namespace sievemla::cli {
namespace {

// The tensors of a safetensors file, side by side in the order they are added.
class File {
 public:
  template <class T>
  void add(const std::string& name, const char* dtype, const std::vector<std::int64_t>& shape,
           std::span<const T> values) {
    const std::size_t begin = data_.size(), bytes = values.size_bytes();
    data_.resize(begin + bytes);
    if (bytes > 0) std::memcpy(data_.data() + begin, values.data(), bytes);
    header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, begin + bytes}}};
  }

  void write(const std::filesystem::path& path, const nlohmann::ordered_json& metadata) {
    header_["__metadata__"] = metadata;
    std::string header = header_.dump();
    header.append((8 - header.size() % 8) % 8, ' ');  // so that the data is aligned
    const std::uint64_t length = header.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length).write(header.data(), std::ssize(header));
    file.write(data_.data(), std::ssize(data_)).flush();
    if (!file) throw Error(error_message("the trace must be writable", path.string(), std::strerror(errno)));
  }

 private:
  nlohmann::ordered_json header_;
  std::vector<char> data_;
};

const char* type_name(DType dtype) {
  return dtype == DType::u8 ? "U8" : dtype == DType::bf16 ? "BF16" : dtype == DType::f32 ? "F32" : "I32";
}

// The bytes of a contiguous tensor.
std::span<const char> bytes_of(const TensorView& view) {
  return {static_cast<const char*>(view.data), static_cast<std::size_t>(view.elements() * size_of(view.dtype))};
}

}  // namespace

void write_attention_trace(const std::filesystem::path& path, const AttentionArgs& args, std::span<const float> out,
                           std::span<const float> lse) {
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1);
  const int latent = args.kv.latent, rope = args.kv.rope;

  const stage::attention::Rows rows_of(args);
  const std::int64_t topk = rows_of.most_lanes(tokens);
  std::vector<std::int64_t> indices;
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t lane = 0; lane < topk; ++lane)
      indices.push_back(lane < rows_of.lanes(t) ? rows_of.slot(t, lane) : -1);

  // As f32, which holds bf16 exactly.
  std::vector<float> q(static_cast<std::size_t>(tokens * heads * (latent + rope)));
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t h = 0; h < heads; ++h)
      stage::attention::load_query(args, t, h, q.data() + (t * heads + h) * (latent + rope), 1);

  const KvFormatInfo& format = info(args.kv.format);
  const std::int64_t row_bytes = format.row_bytes(latent, rope);
  std::vector<char> rows(static_cast<std::size_t>(args.kv.slots() * row_bytes));
  for (std::int64_t slot = 0; slot < args.kv.slots(); ++slot)
    std::memcpy(rows.data() + slot * row_bytes, kv::row_address(args.kv, slot), static_cast<std::size_t>(row_bytes));

  const std::string name(format.name);
  File file;
  file.add<float>("q", "F32", {tokens, heads, latent + rope}, q);
  file.add<std::int64_t>("indices", "I64", {tokens, topk}, indices);
  file.add<float>("softmax_scale", "F32", {1}, std::span(&args.scale, 1));
  if (args.sink)
    file.add<float>("sink", "F32", {heads}, {base::at<float>(args.sink, 0), static_cast<std::size_t>(heads)});
  file.add<char>("kv_" + name, type_name(format.storage), {args.kv.slots(), row_bytes / size_of(format.storage)}, rows);
  file.add<float>("out_" + name, "F32", {tokens, heads, latent}, out);
  file.add<float>("lse_" + name, "F32", {tokens, heads}, lse);
  file.write(path, {{"kind", "sparse_mla_trace"}, {"latent", std::to_string(latent)}, {"rope", std::to_string(rope)}});
}

void write_scores_trace(const std::filesystem::path& path, const IndexScoreArgs& args, std::span<const float> logits) {
  const std::int64_t rows = args.q.dim(0), width = args.logits.dim(1);
  const bool paged{args.paged.cache.pages};
  const DType storage = paged ? args.paged.cache.pages.dtype : args.contiguous.keys.dtype;
  const std::int64_t key_bytes = kIndexDim * size_of(storage);

  std::vector<char> keys;
  const auto add = [&](const void* from, std::int64_t n) {
    keys.insert(keys.end(), static_cast<const char*>(from), static_cast<const char*>(from) + n);
  };
  const std::int64_t slots = paged ? args.paged.cache.slots() : args.contiguous.keys.dim(0);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    if (paged) {
      const kv::IndexKeyAddress at = kv::index_key_address(args.paged.cache, slot);
      add(at.key, key_bytes);
      if (at.scale) add(at.scale, sizeof(float));
    } else {
      add(static_cast<const char*>(args.contiguous.keys.data) + slot * key_bytes, key_bytes);
      if (args.contiguous.scales) add(base::at<float>(args.contiguous.scales, slot), sizeof(float));
    }
  }

  std::vector<std::int32_t> lengths, table;
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int64_t length = std::max<std::int64_t>(base::load_int(args.lengths, t), 0);
    lengths.push_back(static_cast<std::int32_t>(length));
    for (std::int64_t p = 0; p < width; ++p) {
      std::int64_t slot = -1;
      if (p < length && !paged) {
        slot = p + (args.contiguous.starts ? base::load_int(args.contiguous.starts, t) : 0);
      } else if (p < length) {
        const TensorView& pages = args.paged.block_table;
        const std::int64_t request = base::request_of(args.paged.row_request, t, rows, pages.dim(0)),
                           size = args.paged.cache.page_size();
        slot = base::load_int(pages, request, p / size) * size + p % size;
      }
      table.push_back(static_cast<std::int32_t>(slot));
    }
  }

  const std::int64_t key_elements = storage == DType::u8 ? kIndexKeyBytes : kIndexDim;
  File file;
  file.add("q", type_name(args.q.dtype), {rows, args.q.dim(1), kIndexDim}, bytes_of(args.q));
  file.add("weights", "F32", {rows, args.q.dim(1)}, bytes_of(args.weights));
  file.add<char>("k_pages", type_name(storage), {slots, key_elements}, keys);
  file.add<std::int32_t>("block_table", "I32", {rows, width}, table);
  file.add<std::int32_t>("context_lens", "I32", {rows}, lengths);
  file.add<std::int32_t>("row_lens", "I32", {rows}, lengths);
  file.add<float>("logits", "F32", {rows, width}, logits);
  file.write(path, {{"kind", "indexer_trace"}, {"page_size", "1"}, {"topk", "1"}});
}

}  // namespace sievemla::cli
