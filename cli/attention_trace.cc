// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/attention_trace.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/view.h"
#include "kv/formats.h"
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

// Queries side by side, as f32: it holds bf16 exactly.
std::vector<float> queries(const AttentionArgs& args) {
  std::vector<float> q;
  for (std::int64_t t = 0; t < args.q.dim(0); ++t)
    for (std::int64_t h = 0; h < args.q.dim(1); ++h)
      for (int i = 0; i < args.kv.latent + args.kv.rope; ++i)
        q.push_back(args.q_rope && i >= args.kv.latent ? base::load_f32(args.q_rope, t, h, i - args.kv.latent)
                                                       : base::load_f32(args.q, t, h, i));
  return q;
}

// The slots that token t goes through.
std::vector<std::int64_t> slots(const Slots& rows, const AttentionArgs& args, std::int64_t t) {
  const TensorView& indices = rows.indices;
  const std::int64_t q_len = indices.rank == 3 ? indices.dim(1) : 1, topk = indices.dim(indices.rank - 1);
  const std::int64_t live = rows.topk_length ? std::min(base::load_int(rows.topk_length, t), topk) : topk;
  std::vector<std::int64_t> lanes;
  for (std::int64_t i = 0; i < live; ++i)
    lanes.push_back(indices.rank == 3 ? base::load_int(indices, t / q_len, t % q_len, i)
                                      : base::load_int(indices, t, i));
  static_cast<void>(args);
  return lanes;
}
std::vector<std::int64_t> slots(const BlockTable& rows, const AttentionArgs& args, std::int64_t t) {
  const std::int64_t requests = rows.lengths.dim(0), q_len = args.q.dim(0) / requests, page_size = args.kv.page_size();
  const std::int64_t request = t / q_len, seen = base::load_int(rows.lengths, request) - q_len + 1 + t % q_len;
  std::vector<std::int64_t> lanes;
  for (std::int64_t p = 0; p < std::min(seen, rows.table.dim(1) * page_size); ++p) {
    const std::int64_t page = base::load_int(rows.table, request, p / page_size);
    lanes.push_back(page < 0 ? -1 : page * page_size + p % page_size);
  }
  return lanes;
}

}  // namespace

void write_attention_trace(const std::filesystem::path& path, const AttentionArgs& args, std::span<const float> out,
                           std::span<const float> lse) {
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1);
  const int latent = args.kv.latent, rope = args.kv.rope;

  std::vector<std::vector<std::int64_t>> lists;
  for (std::int64_t t = 0; t < tokens; ++t)
    lists.push_back(std::visit([&](const auto& rows) { return slots(rows, args, t); }, args.rows));
  std::size_t topk = 0;
  for (const auto& list : lists) topk = std::max(topk, list.size());
  std::vector<std::int64_t> indices;
  for (auto& list : lists) {
    list.resize(topk, -1);
    indices.insert(indices.end(), list.begin(), list.end());
  }

  const KvFormatInfo& format = info(args.kv.format);
  const std::int64_t row_bytes = format.row_bytes(latent, rope);
  std::vector<char> rows(static_cast<std::size_t>(args.kv.slots() * row_bytes));
  for (std::int64_t slot = 0; slot < args.kv.slots(); ++slot)
    std::memcpy(rows.data() + slot * row_bytes, kv::row_address(args.kv, slot), static_cast<std::size_t>(row_bytes));

  const std::string name(format.name);
  const char* dtype = format.storage == DType::u8 ? "U8" : format.storage == DType::bf16 ? "BF16" : "F32";
  File file;
  file.add<float>("q", "F32", {tokens, heads, latent + rope}, queries(args));
  file.add<std::int64_t>("indices", "I64", {tokens, static_cast<std::int64_t>(topk)}, indices);
  file.add<float>("softmax_scale", "F32", {1}, std::span(&args.scale, 1));
  if (args.sink)
    file.add<float>("sink", "F32", {heads}, {base::at<float>(args.sink, 0), static_cast<std::size_t>(heads)});
  file.add<char>("kv_" + name, dtype, {args.kv.slots(), row_bytes / size_of(format.storage)}, rows);
  file.add<float>("out_" + name, "F32", {tokens, heads, latent}, out);
  file.add<float>("lse_" + name, "F32", {tokens, heads}, lse);
  file.write(path, {{"kind", "sparse_mla_trace"}, {"latent", std::to_string(latent)}, {"rope", std::to_string(rope)}});
}

}  // namespace sievemla::cli
