// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/trace_test.cc -- the trace reader: what it takes from a file, and that nothing in the file is trusted.
#include <gtest/gtest.h>

#include "base/view.h"
#include "cli/trace_files.h"
#include "model/trace.h"

namespace sievemla::test {
namespace {

using model::IndexerTrace;
using model::SparseMlaTrace;
using model::Trace;

Trace read(const std::string& bytes) { return model::read_trace(std::make_unique<model::SafeTensors>(bytes, "t")); }

// Refused with a message that has all of `parts`, among them the tensor's name.
void refused_trace(const Tensors& tensors, std::initializer_list<std::string_view> parts,
                   const Json& metadata = nullptr) {
  const std::string bytes = to_file(tensors, metadata);
  refused([&] { read(bytes); }, parts);
}

TEST(Trace, SparseMlaGolden) {
  const Trace trace = model::load_trace(golden_dir("trace-glm5") / "trace.safetensors");
  const auto& call = std::get<SparseMlaTrace>(trace.call);
  EXPECT_EQ(call.latent, 512);
  EXPECT_EQ(call.rope, 64);
  EXPECT_FLOAT_EQ(call.scale, 0.0625f);
  EXPECT_FALSE(call.sink);
  ASSERT_EQ(call.caches.size(), 3u);
  EXPECT_EQ(call.caches[0].name, "bf16");
  EXPECT_EQ(call.caches[0].kv.format, KvFormat::bf16);
  EXPECT_EQ(call.caches[1].kv.format, KvFormat::fp8_ds_mla);
  EXPECT_EQ(call.caches[2].name, "fp8_pow2");
  for (const auto& cache : call.caches) {
    EXPECT_EQ(cache.kv.slots(), 2112);
    EXPECT_TRUE(cache.out && cache.lse);
  }
  // Row 0 has all lanes, rows 1 and 2 fewer, row 4 none.
  std::int64_t selected = 0;
  const std::vector<std::int32_t> indices = values<std::int32_t>(sparse_trace().at("indices"));
  const std::vector<std::int32_t> lengths = values<std::int32_t>(sparse_trace().at("topk_length"));
  for (std::size_t t = 0; t < 6; ++t)
    for (std::size_t i = 0; i < static_cast<std::size_t>(lengths[t]); ++i)
      selected += indices[t * 2048 + i] >= 0 && indices[t * 2048 + i] < 2112;
  EXPECT_EQ(call.selected(call.caches[0]), selected);
}

TEST(Trace, IndexerGolden) {
  const Trace trace = model::load_trace(golden_dir("trace-indexer") / "trace.safetensors");
  const auto& call = std::get<IndexerTrace>(trace.call);
  EXPECT_EQ(call.keys.format, IndexFormat::fp8);
  EXPECT_EQ(call.keys.page_size(), 64);
  EXPECT_EQ(call.keys.pages.dim(0), 20);
  EXPECT_EQ(call.width, 1024);
  EXPECT_EQ(call.k, 128);
  EXPECT_EQ(call.visible(), 1024 + 1023 + 1000 + 577 + 129 + 128 + 64 + 1);
}

TEST(Trace, KindFollowsFromTheTensors) {
  const std::string sparse = to_file(small_sparse_trace()), indexer = to_file(indexer_trace());
  EXPECT_TRUE(std::holds_alternative<SparseMlaTrace>(read(sparse).call));
  EXPECT_TRUE(std::holds_alternative<IndexerTrace>(read(indexer).call));
}

TEST(Trace, KindInTheMetadataDecides) {
  refused_trace(small_sparse_trace(), {"[tokens, heads, 128]", "tensor q"}, {{"kind", "indexer_trace"}});
  refused_trace(indexer_trace(), {"[tokens, heads, latent + rope]", "tensor q"}, {{"kind", "sparse_mla_trace"}});
  refused_trace(indexer_trace(), {"sparse_mla_trace or indexer_trace", "'topk_trace' (t: __metadata__.kind)"},
                {{"kind", "topk_trace"}});
  refused_trace({}, {"indices", "k_pages", "neither"});
}

TEST(Trace, RowTypesByWidth) {
  Tensors t = small_sparse_trace();
  t.erase("kv_fp8");
  keep_columns(t.at("q"), 512);
  const std::int64_t slots = 3;
  for (const auto& [dtype, width, format] :
       {std::tuple("BF16", 512, KvFormat::bf16), std::tuple("F32", 512, KvFormat::f32),
        std::tuple("U8", 528, KvFormat::fp8_nope), std::tuple("U8", 656, KvFormat::fp8_nope)}) {
    const std::size_t size = dtype[0] == 'U' ? 1 : dtype[0] == 'B' ? 2 : 4;
    Tensors with = t;
    with["kv_x"] = {dtype, {slots, width}, std::string(static_cast<std::size_t>(slots * width) * size, '\0')};
    const std::string bytes = to_file(with);
    const Trace trace = read(bytes);
    const auto& call = std::get<SparseMlaTrace>(trace.call);
    ASSERT_EQ(call.caches.size(), 1u);
    EXPECT_EQ(call.caches[0].kv.format, format);
    EXPECT_EQ(call.caches[0].kv.slots(), slots);
    EXPECT_EQ(call.rope, 0);
  }
  for (const auto& [dtype, width] : {std::pair("BF16", 576), std::pair("U8", 512), std::pair("I32", 512)}) {
    const std::size_t size = dtype[0] == 'U' ? 1 : dtype[0] == 'B' ? 2 : 4;
    t["kv_x"] = {dtype, {slots, width}, std::string(static_cast<std::size_t>(slots * width) * size, '\0')};
    refused_trace(t, {"tensor kv_x", "bf16 [slots, 512]", "u8 [slots, 528] (fp8_nope)", std::to_string(width)});
  }
}

TEST(Trace, WidthsFromTheMetadata) {
  Tensors t = small_sparse_trace();
  for (const char* name : {"kv_fp8", "out_fp8", "lse_fp8"}) t.erase(name);
  keep_columns(t.at("q"), 12);
  t["kv_x"] = {"F32", {5, 12}, std::string(5 * 12 * 4, '\0')};
  const std::string bytes = to_file(t, {{"latent", "8"}, {"rope", "4"}});
  const Trace trace = read(bytes);
  EXPECT_EQ(std::get<SparseMlaTrace>(trace.call).latent, 8);
  EXPECT_EQ(std::get<SparseMlaTrace>(trace.call).rope, 4);
  refused_trace(t, {"tensor q", "12 with latent 512"});
  refused_trace(t, {"tensor q", "12 with latent 8 and rope 5"}, {{"latent", "8"}, {"rope", "5"}});
  for (const char* latent : {"", "0", "-8", "8.0", "x", "99999999999999999999"})
    refused_trace(t, {"__metadata__.latent", latent}, {{"latent", latent}});
}

TEST(Trace, SparseMlaShapesAndTypes) {
  const Tensors good = small_sparse_trace();
  struct Change {
    const char* tensor;
    std::function<void(Tensor&)> change;
  };
  const auto dtype = [](const char* d) { return [d](Tensor& t) { t.dtype = d; }; };
  const auto rows = [](std::int64_t n) { return [n](Tensor& t) { keep_rows(t, n); }; };
  const auto columns = [](std::int64_t n) { return [n](Tensor& t) { keep_columns(t, n); }; };
  const Change changes[] = {
      {"q", rows(1)},
      {"q", rows(0)},
      {"q", columns(575)},
      {"q", dtype("F16")},
      {"indices", rows(1)},
      {"indices", [](Tensor& t) { t.shape = {1, 2, 2048}; }},
      {"indices", dtype("F32")},
      {"topk_length", rows(1)},
      {"topk_length", dtype("F32")},
      {"softmax_scale", [](Tensor& t) { t.shape = {1, 1}; }},
      {"softmax_scale", [](Tensor& t) { set(t, std::vector<float>{std::nanf("")}); }},
      {"softmax_scale", [](Tensor& t) { set(t, std::vector<float>{-0.0625f}); }},
      {"softmax_scale", [](Tensor& t) { set(t, std::vector<float>{HUGE_VALF}); }},
      {"kv_fp8", columns(655)},
      {"kv_fp8", [](Tensor& t) { t.shape = {2112, 164, 4}; }},
      {"out_fp8", rows(1)},
      {"out_fp8", columns(511)},
      {"out_fp8", dtype("I32")},
      {"lse_fp8", columns(63)},
  };
  for (const Change& c : changes) {
    SCOPED_TRACE(c.tensor);
    Tensors t = good;
    c.change(t.at(c.tensor));
    const std::string bytes = to_file(t);
    refused([&] { read(bytes); }, {"(t: tensor "});
  }
  for (const char* name : {"q", "softmax_scale"}) {
    Tensors t = good;
    t.erase(name);
    refused_trace(t, {"t: tensor " + std::string(name)});
  }
  Tensors t = good;
  t.erase("kv_fp8");
  refused_trace(t, {"kv_*"});
  t = good;
  t["sink"] = make_tensor<float>("F32", {63}, std::vector<float>(63));
  refused_trace(t, {"tensor sink"});
}

TEST(Trace, OptionalTensorsMayBeAbsent) {
  Tensors t = small_sparse_trace();
  for (const char* name : {"topk_length", "out_fp8", "lse_fp8", "poison_slots"}) t.erase(name);
  t["sink"] = make_tensor<float>("F32", {64}, std::vector<float>(64));
  t["something_else"] = make_tensor<float>("F32", {1}, {1.f});
  const std::string bytes = to_file(t);
  const Trace trace = read(bytes);
  const auto& call = std::get<SparseMlaTrace>(trace.call);
  EXPECT_TRUE(call.sink);
  EXPECT_FALSE(call.topk_length);
  EXPECT_FALSE(call.caches[0].out);

  t = indexer_trace();
  for (const char* name : {"row_request", "logits", "topk", "topk_slots"}) t.erase(name);
  const std::string indexer = to_file(t);
  const Trace second = read(indexer);
  EXPECT_EQ(std::get<IndexerTrace>(second.call).width, 1024);
  EXPECT_EQ(std::get<IndexerTrace>(second.call).k, 1024);  // 2048, but no more than there are
  const std::string with_k = to_file(t, {{"topk", "7"}});
  const Trace third = read(with_k);
  EXPECT_EQ(std::get<IndexerTrace>(third.call).k, 7);
}

TEST(Trace, IndexerShapesAndTypes) {
  const Tensors good = indexer_trace();
  const auto element = [&](const char* name, std::size_t i, std::int32_t value) {
    Tensors t = good;
    std::vector<std::int32_t> v = values<std::int32_t>(t.at(name));
    v.at(i) = value;
    set(t.at(name), v);
    return t;
  };
  const auto changed = [&](const char* name, const std::function<void(Tensor&)>& change) {
    Tensors t = good;
    change(t.at(name));
    return t;
  };
  refused_trace(element("row_request", 3, 1), {"[0, 0]: got 1 (t: tensor row_request, element 3)"});
  refused_trace(element("row_request", 0, -1), {"got -1"});
  refused_trace(element("row_lens", 7, 1025), {"tensor row_lens, element 7", "1025 of 1024"});
  refused_trace(element("context_lens", 0, 1025), {"[0, 1024]: got 1025 (t: tensor context_lens"});
  refused_trace(element("context_lens", 0, 100), {"tensor row_lens", "1024 of 100"});
  refused_trace(element("context_lens", 0, -1), {"context_lens"});
  refused_trace(element("block_table", 2, 20), {"[-1, 19]: got 20 (t: tensor block_table, element 2)"});
  refused_trace(element("block_table", 2, -2), {"block_table"});
  refused_trace(changed("q", [](Tensor& t) { keep_columns(t, 127); }), {"tensor q"});
  refused_trace(changed("q", [](Tensor& t) { t.dtype = "I32", t.shape = {8, 32, 32}; }), {"tensor q"});
  refused_trace(changed("weights", [](Tensor& t) { keep_columns(t, 31); }), {"tensor weights"});
  refused_trace(changed("k_pages", [](Tensor& t) { keep_columns(t, 8447); }), {"tensor k_pages", "got 8447"});
  refused_trace(changed("k_pages", [](Tensor& t) { keep_rows(t, 3); }), {"block_table"});
  refused_trace(changed("logits", [](Tensor& t) { keep_rows(t, 7); }), {"tensor logits"});
  refused_trace(changed("logits", [](Tensor& t) { keep_columns(t, 1000); }), {"tensor row_lens", "1024 of 1000"});
  refused_trace(changed("topk", [](Tensor& t) { keep_rows(t, 1); }), {"tensor topk"});
  refused_trace(changed("topk_slots", [](Tensor& t) { keep_columns(t, 127); }), {"tensor topk_slots"});
  refused_trace(good, {"4224 bytes", "got 8448"}, {{"page_size", "32"}});
  refused_trace(good, {"page_size", "'0'"}, {{"page_size", "0"}});
}

// A file of a few bytes must not ask for gigabytes.
TEST(Trace, SmallFilesStaySmall) {
  Tensors t = indexer_trace();
  for (const char* name : {"logits", "topk", "topk_slots"}) t.erase(name);
  set(t.at("context_lens"), std::vector<std::int32_t>{2'000'000'000});
  set(t.at("row_lens"), std::vector<std::int32_t>(8, 2'000'000'000));
  t["k_pages"] = {"U8", {0, 132LL * 2'000'000'000}, ""};
  set(t.at("block_table"), std::vector<std::int32_t>(16, -1));
  refused_trace(t, {"context_lens"});
  t = indexer_trace();
  for (const char* name : {"row_request", "logits", "topk", "topk_slots"}) t.erase(name);
  const std::string most = to_file(t, {{"topk", "2048"}});  // more than the 1024 keys, as models ask for
  EXPECT_EQ(std::get<IndexerTrace>(read(most).call).k, 2048);
  refused_trace(t, {"__metadata__.topk", "from 0 to 2048: got '2049'"}, {{"topk", "2049"}});
  // 2^18 rows of 1 key: 34 MB of queries, which must not become 2^29 selected ids.
  const std::int64_t rows = 1 << 18;
  const auto size = static_cast<std::size_t>(rows);
  t["q"] = {"U8", {rows, 1, 128}, std::string(size * 128, '\0')};
  t["weights"] = {"F32", {rows, 1}, std::string(size * 4, '\0')};
  t["row_lens"] = {"I32", {rows}, std::string(size * 4, '\0')};
  set(t.at("context_lens"), std::vector<std::int32_t>{1});
  refused_trace(t, {"tensor q", "at most 268435456 keys: got 262144 rows of 2048"}, {{"topk", "2048"}});
  t = small_sparse_trace();
  t["q"] = {"BF16", {std::int64_t{1} << 60, 0, 576}, ""};
  refused_trace(t, {"tensor q"});
}

TEST(Trace, TruncatedAnywhere) {
  for (const Tensors& tensors : {small_sparse_trace(), indexer_trace()}) {
    const std::string whole = to_file(tensors);
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{9}, std::size_t{500},
                                   whole.size() / 2, whole.size() - 1}) {
      const std::string part = whole.substr(0, size);
      refused([&] { read(part); }, {"(t"});
    }
  }
}

}  // namespace
}  // namespace sievemla::test
