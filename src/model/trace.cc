// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "model/trace.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include "base/view.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

constexpr std::int64_t kMaxHeads = 128;
constexpr std::int64_t kMaxWidth = 1 << 16;  // of a cache row; far beyond any model
constexpr std::int64_t kDefaultTopk = 2048;
constexpr std::int64_t kMaxScores = std::int64_t{1} << 28;  // that the file does not hold itself: 1 GiB of f32

std::string shape_text(const StoredTensor& t) {
  std::string text = t.dtype + " [";
  for (int i = 0; i < t.view.rank; ++i) text += (i ? ", " : "") + std::to_string(t.view.dim(i));
  return text + "]";
}

// A file with the checks that its tensors need. Every complaint names the file and the tensor.
class Reader {
 public:
  explicit Reader(const SafeTensors& file) : file_(file) {}

  template <class... Got>
  void require(bool ok, const std::string& rule, const std::string& part, const Got&... got) const {
    if (!ok) throw BadFile(error_message(rule, file_.name() + ": " + part, got...));
  }

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }

  // A tensor of this rank and one of these dtypes; extents of -1 are free.
  TensorView tensor(const std::string& name, std::initializer_list<std::int64_t> shape, const std::string& shape_rule,
                    std::initializer_list<DType> dtypes) const {
    const StoredTensor& t = file_.tensor(name);
    bool ok = t.view.rank == static_cast<int>(shape.size()) &&
              std::find(dtypes.begin(), dtypes.end(), t.view.dtype) != dtypes.end();
    int i = 0;
    for (const std::int64_t extent : shape) {
      ok = ok && (extent < 0 || t.view.dim(i) == extent);
      ++i;
    }
    std::string types;
    for (const DType d : dtypes) types += (types.empty() ? "" : " or ") + std::string(name_of(d));
    require(ok, "a trace's " + name + " is " + types + " " + shape_rule, "tensor " + name, shape_text(t));
    return t.view;
  }
  TensorView optional(const std::string& name, std::initializer_list<std::int64_t> shape, const std::string& shape_rule,
                      std::initializer_list<DType> dtypes) const {
    return has(name) ? tensor(name, shape, shape_rule, dtypes) : TensorView{};
  }

  // A whole number of the metadata in [min, max].
  std::optional<std::int64_t> number(const std::string& key, std::int64_t min, std::int64_t max) const {
    const auto entry = file_.metadata().find(key);
    if (entry == file_.metadata().end()) return std::nullopt;
    const std::string& text = entry->second;
    std::int64_t value = 0;
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
    require(fault == std::errc() && end == text.data() + text.size() && value >= min && value <= max,
            key + " must be a whole number from " + std::to_string(min) + " to " + std::to_string(max),
            "__metadata__." + key, "'", text, "'");
    return value;
  }

  // Every element of an integer vector lies in [min, max].
  void range(const TensorView& v, const std::string& name, std::int64_t min, std::int64_t max) const {
    for (std::int64_t i = 0; i < v.elements(); ++i) {
      const std::int64_t x = *(base::at<std::int32_t>(v, 0) + i);
      require(x >= min && x <= max, name + " must lie in [" + std::to_string(min) + ", " + std::to_string(max) + "]",
              "tensor " + name + ", element " + std::to_string(i), x);
    }
  }

 private:
  const SafeTensors& file_;
};

// How the rows of one kv_* tensor are stored; the widths are the trace's.
KvCache read_cache(const SafeTensors& file, const std::string& name, int latent, int rope) {
  const StoredTensor& t = file.tensor(name);
  const std::int64_t width = t.view.rank == 2 ? t.view.dim(1) : -1;
  for (const KvFormatInfo& f : kv_formats()) {
    if (f.storage != t.view.dtype) continue;
    if ((f.latent != 0 && f.latent != latent) || (f.rope >= 0 && f.rope != rope)) continue;
    const std::int64_t bytes = f.row_bytes(latent, rope);
    const bool padded = f.format == KvFormat::fp8_nope && width == info(KvFormat::fp8_ds_mla).row_bytes(latent, 64);
    if (width * size_of(f.storage) != bytes && !padded) continue;
    KvCache cache{f.format, latent, rope, t.view};
    cache.pages.rank = 3;
    cache.pages.shape = {t.view.dim(0), 1, width, 0};
    cache.pages.stride = {width, width, 1, 0};
    return cache;
  }
  std::string rows;
  for (const KvFormatInfo& f : kv_formats())
    if ((f.latent == 0 || f.latent == latent) && (f.rope < 0 || f.rope == rope))
      rows += (rows.empty() ? "" : ", ") + std::string(name_of(f.storage)) + " [slots, " +
              std::to_string(f.row_bytes(latent, rope) / size_of(f.storage)) + "] (" + std::string(f.name) + ")";
  throw BadFile(error_message(
      "a cache of latent " + std::to_string(latent) + " and rope " + std::to_string(rope) + " is one of " + rows,
      file.name() + ": tensor " + name, shape_text(t)));
}

SparseMlaTrace read_sparse_mla(const SafeTensors& file) {
  const Reader reader(file);
  SparseMlaTrace trace;
  trace.q = reader.tensor("q", {-1, -1, -1}, "[tokens, heads, latent + rope]", {DType::bf16, DType::f32});
  const std::int64_t tokens = trace.q.dim(0), heads = trace.q.dim(1), width = trace.q.dim(2);
  reader.require(tokens >= 1, "a trace has at least one query row", "tensor q", tokens);
  reader.require(heads >= 1 && heads <= kMaxHeads, "a trace has 1 to " + std::to_string(kMaxHeads) + " heads",
                 "tensor q", heads);
  reader.require(width >= 1 && width <= kMaxWidth, "a query is 1 to " + std::to_string(kMaxWidth) + " wide", "tensor q",
                 width);
  const std::int64_t latent = reader.number("latent", 1, kMaxWidth).value_or(512);
  const std::int64_t rope = reader.number("rope", 0, kMaxWidth).value_or(width - latent);
  reader.require(rope >= 0 && latent + rope == width,
                 "a query is as wide as latent and rope together (__metadata__, by default 512 and what is left)",
                 "tensor q", width, " with latent ", latent, " and rope ", rope);
  trace.latent = static_cast<int>(latent);
  trace.rope = static_cast<int>(rope);

  trace.indices =
      reader.tensor("indices", {tokens, -1}, "[tokens, topk] with the tokens of q", {DType::i32, DType::i64});
  trace.topk_length = reader.optional("topk_length", {tokens}, "[tokens] with the tokens of q", {DType::i32});
  trace.scale = *base::at<float>(reader.tensor("softmax_scale", {1}, "[1]", {DType::f32}), 0);
  reader.require(std::isfinite(trace.scale) && trace.scale > 0, "softmax_scale is positive and finite",
                 "tensor softmax_scale", trace.scale);
  trace.sink = reader.optional("sink", {heads}, "[heads] with the heads of q", {DType::f32});

  for (const std::string& name : file.names()) {
    if (name.rfind("kv_", 0) != 0) continue;
    SparseMlaTrace::Cache cache;
    cache.name = name.substr(3);
    cache.kv = read_cache(file, name, trace.latent, trace.rope);
    cache.out = reader.optional("out_" + cache.name, {tokens, heads, latent},
                                "[tokens, heads, latent] with the sizes of q", {DType::f32});
    cache.lse =
        reader.optional("lse_" + cache.name, {tokens, heads}, "[tokens, heads] with the sizes of q", {DType::f32});
    trace.caches.push_back(std::move(cache));
  }
  reader.require(!trace.caches.empty(), "a sparse_mla_trace has at least one cache, a tensor named kv_*", "tensors",
                 "none");
  return trace;
}

IndexerTrace read_indexer(const SafeTensors& file) {
  const Reader reader(file);
  IndexerTrace trace;
  trace.q = reader.tensor("q", {-1, -1, kIndexDim}, "[tokens, heads, 128]", {DType::u8, DType::bf16, DType::f32});
  const std::int64_t tokens = trace.q.dim(0), heads = trace.q.dim(1);
  reader.require(tokens >= 1, "a trace has at least one query row", "tensor q", tokens);
  reader.require(heads >= 1 && heads <= kMaxHeads, "a trace has 1 to " + std::to_string(kMaxHeads) + " heads",
                 "tensor q", heads);
  trace.weights = reader.tensor("weights", {tokens, heads}, "[tokens, heads] with the sizes of q", {DType::f32});

  const TensorView pages =
      reader.tensor("k_pages", {-1, -1}, "[pages, page_size * 132 bytes, or 128 elements if unquantised]",
                    {DType::u8, DType::bf16, DType::f32});
  const bool fp8 = pages.dtype == DType::u8;
  reader.require(fp8 || trace.q.dtype != DType::u8, "queries of u8 (e4m3) go with keys of u8", "tensor q",
                 name_of(trace.q.dtype), " with ", name_of(pages.dtype), " keys");
  const std::int64_t key = fp8 ? kIndexKeyBytes : kIndexDim;
  const std::int64_t page_size = reader.number("page_size", 1, std::numeric_limits<std::int32_t>::max())
                                     .value_or(std::max<std::int64_t>(pages.dim(1) / key, 1));
  reader.require(pages.dim(1) == page_size * key,
                 "a page of " + std::to_string(page_size) + " keys is " + std::to_string(page_size * key) + " " +
                     (fp8 ? "bytes" : "elements"),
                 "tensor k_pages", pages.dim(1));
  trace.keys.format = fp8 ? IndexFormat::fp8 : pages.dtype == DType::bf16 ? IndexFormat::bf16 : IndexFormat::f32;
  trace.keys.pages = pages;
  trace.keys.pages.rank = 3;
  trace.keys.pages.shape = {pages.dim(0), page_size, key, 0};
  trace.keys.pages.stride = {pages.dim(1), key, 1, 0};

  trace.block_table = reader.tensor("block_table", {-1, -1}, "[requests, max pages]", {DType::i32});
  const std::int64_t requests = trace.block_table.dim(0);
  reader.require(requests >= 1, "a trace has at least one request", "tensor block_table", requests);
  reader.range(trace.block_table, "block_table", -1, pages.dim(0) - 1);
  const TensorView context_lens =
      reader.tensor("context_lens", {requests}, "[requests] with the requests of block_table", {DType::i32});
  // A context lies in its block table, and holds no slot twice.
  reader.range(context_lens, "context_lens", 0, std::min(trace.block_table.dim(1), pages.dim(0)) * page_size);
  trace.row_request = reader.optional("row_request", {tokens}, "[tokens] with the tokens of q", {DType::i32});
  if (trace.row_request) reader.range(trace.row_request, "row_request", 0, requests - 1);
  else
    reader.require(tokens % requests == 0, "without row_request every request has as many rows", "tensor q", tokens,
                   " rows for ", requests, " requests");

  trace.logits =
      reader.optional("logits", {tokens, -1}, "[tokens, longest context] with the tokens of q", {DType::f32});
  trace.row_lens = reader.tensor("row_lens", {tokens}, "[tokens] with the tokens of q", {DType::i32});
  for (std::int64_t r = 0; r < requests; ++r) trace.width = std::max(trace.width, base::load_int(context_lens, r));
  if (trace.logits) trace.width = trace.logits.dim(1);
  reader.require(trace.logits || trace.width <= kMaxScores / tokens,
                 "a trace without logits has at most " + std::to_string(kMaxScores) + " scores", "tensor q", tokens,
                 " rows of ", trace.width);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t length = base::load_int(trace.row_lens, t);
    const std::int64_t context = base::load_int(context_lens, base::request_of(trace.row_request, t, tokens, requests));
    reader.require(length <= std::min(context, trace.width),
                   "a row sees no more than its request's context, nor than logits has columns",
                   "tensor row_lens, element " + std::to_string(t), length, " of ", std::min(context, trace.width));
  }

  trace.topk = reader.optional("topk", {tokens, -1}, "[tokens, k] with the tokens of q", {DType::i32});
  // A number is no tensor: it must not ask for memory that a short file is not worth.
  trace.k =
      trace.topk
          ? trace.topk.dim(1)
          : reader.number("topk", 0, std::max(kDefaultTopk, trace.width)).value_or(std::min(kDefaultTopk, trace.width));
  const bool only_slots = !trace.topk && reader.has("topk_slots");
  reader.require(trace.topk || only_slots || trace.k <= kMaxScores / tokens,
                 "a trace without topk selects at most " + std::to_string(kMaxScores) + " keys", "tensor q", tokens,
                 " rows of ", trace.k);
  trace.topk_slots = reader.optional("topk_slots", {tokens, only_slots ? -1 : trace.k},
                                     "[tokens, k] with the sizes of topk", {DType::i32});
  if (only_slots) trace.k = trace.topk_slots.dim(1);
  return trace;
}

}  // namespace

std::int64_t SparseMlaTrace::selected(const Cache& cache) const {
  std::int64_t count = 0;
  for (std::int64_t t = 0; t < q.dim(0); ++t) {
    const std::int64_t lanes = topk_length ? std::min(base::load_int(topk_length, t), indices.dim(1)) : indices.dim(1);
    for (std::int64_t i = 0; i < lanes; ++i) {
      const std::int64_t slot = base::load_int(indices, t, i);
      count += slot >= 0 && slot < cache.kv.slots();
    }
  }
  return count;
}

std::int64_t IndexerTrace::visible() const {
  std::int64_t count = 0;
  for (std::int64_t t = 0; t < q.dim(0); ++t) count += std::max<std::int64_t>(base::load_int(row_lens, t), 0);
  return count;
}

Trace read_trace(std::unique_ptr<SafeTensors> file) {
  const auto kind = file->metadata().find("kind");
  const bool named = kind != file->metadata().end();
  const std::string_view name = named ? std::string_view(kind->second) : "";
  Trace trace;
  if (named ? name == "sparse_mla_trace" : file->find("indices") != nullptr) trace.call = read_sparse_mla(*file);
  else if (named ? name == "indexer_trace" : file->find("k_pages") != nullptr) trace.call = read_indexer(*file);
  else if (named)
    throw BadFile(error_message("a trace's kind is sparse_mla_trace or indexer_trace",
                                file->name() + ": __metadata__.kind", "'", name, "'"));
  else
    throw BadFile(
        error_message("a trace without a kind in __metadata__ holds indices (sparse_mla_trace) or k_pages "
                      "(indexer_trace)",
                      file->name() + ": tensors", "neither"));
  trace.file = std::move(file);
  return trace;
}

Trace load_trace(const std::filesystem::path& path) { return read_trace(std::make_unique<SafeTensors>(path)); }

}  // namespace sievemla::model
