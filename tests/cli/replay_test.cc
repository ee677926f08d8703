// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/replay_test.cc -- sievemla replay: the golden traces, and traces changed in one thing.
#include "cli/program.h"
#include "cli/trace_files.h"

namespace sievemla::test {
namespace {

// Writes a trace and replays it.
class Replay : public testing::Test {
 protected:
  std::string write(const Tensors& tensors, const Json& metadata = nullptr) {
    write_file(dir_ / "trace.safetensors", to_file(tensors, metadata));
    return (dir_ / "trace.safetensors").string();
  }
  Json rows(const std::string& path, int status = 0) {
    return json_of({"replay", path, "--json"}, "replay", status).value("rows", Json::array());
  }
  const TempDir dir_;
};

using Places = std::set<std::pair<std::string, std::string>>;

TEST_F(Replay, SparseMlaGolden) {
  Places places;
  for (const Json& row : rows(golden("trace-glm5/trace.safetensors"))) {
    places.emplace(row.at("backend"), row.at("cache"));
    EXPECT_TRUE(row.at("checked"));
    const double bound = row.at("bound");  // of a tier that computes in f32, or whose operands are bf16
    EXPECT_TRUE(row.at("backend") == "reference" ? bound == 1e-6 : bound == 1e-4 || bound == 2e-3) << row;
    EXPECT_LE(row.at("error"), bound) << row;
    EXPECT_GT(row.at("us"), 0);
    EXPECT_GT(row.at("gflops"), 0);
    EXPECT_GT(row.at("gbps"), 0);
  }
  EXPECT_EQ(places, (Places{{"reference", "bf16"},
                            {"reference", "fp8"},
                            {"reference", "fp8_pow2"},
                            {"cpu", "bf16"},
                            {"cpu", "fp8"},
                            {"cpu", "fp8_pow2"}}));
}

TEST_F(Replay, IndexerGolden) {
  Places places;
  for (const Json& row : rows(golden("trace-indexer/trace.safetensors"))) {
    places.emplace(row.at("backend"), row.at("stage"));
    EXPECT_LE(row.at("error"), row.at("stage") == "topk" ? 0 : row.at("backend") == "reference" ? 1e-6 : 1e-4) << row;
  }
  EXPECT_EQ(places, (Places{{"reference", "indexer"}, {"reference", "topk"}, {"cpu", "indexer"}, {"cpu", "topk"}}));
}

TEST_F(Replay, OneBackendIfNamed) {
  for (const std::string backend : {"reference", "cpu"}) {
    const Json json =
        json_of({"replay", write(small_sparse_trace()), "--backend", backend, "--threads", "1", "--json"}, "replay");
    ASSERT_EQ(json.at("rows").size(), 1u);
    EXPECT_EQ(json.at("rows")[0].at("backend"), backend);
  }
}

TEST_F(Replay, WithoutGoldensNothingIsChecked) {
  Tensors t = small_sparse_trace();
  t.erase("out_fp8");
  t.erase("lse_fp8");
  for (const Json& row : rows(write(t))) {
    EXPECT_FALSE(row.at("checked"));
    EXPECT_TRUE(row.at("error").is_null());
    EXPECT_GT(row.at("us"), 0);
  }
  t = indexer_trace();
  for (const char* name : {"logits", "topk", "topk_slots", "row_request"}) t.erase(name);
  EXPECT_EQ(rows(write(t)).size(), 4u);
  EXPECT_NE(run_program({"replay", write(t)}).out.find("not checked"), std::string::npos);
}

TEST_F(Replay, PoisonedSlotsChangeNothing) {
  Tensors t = sparse_trace();
  for (const std::int32_t slot : values<std::int32_t>(t.at("poison_slots")))
    for (const char* name : {"kv_bf16", "kv_fp8", "kv_fp8_pow2"}) {
      Tensor& kv = t.at(name);
      const std::size_t row = kv.bytes.size() / static_cast<std::size_t>(kv.shape[0]);
      kv.bytes.replace(static_cast<std::size_t>(slot) * row, row, row, '\xFF');
    }
  for (const Json& row : rows(write(t))) EXPECT_TRUE(row.at("passed")) << row;
}

// Each golden is compared: an error planted in any of them is seen.
TEST_F(Replay, AWrongOutputIsSeen) {
  for (const char* name : {"out_fp8", "lse_fp8"}) {
    Tensors t = small_sparse_trace();
    std::vector<float> v = values<float>(t.at(name));
    v.back() += 0.1f;
    set(t.at(name), v);
    const std::string path = write(t);
    for (const Json& row : rows(path, 1)) {
      EXPECT_FALSE(row.at("passed"));
      EXPECT_GT(row.at("error"), 1e-4);
    }
    expect_failure({"replay", path}, 1, {"attention on reference must match the trace within 1.0e-06"});
  }
  Tensors t = indexer_trace();
  std::vector<float> logits = values<float>(t.at("logits"));
  logits.front() *= 1.1f;
  logits.front() += 1.f;
  set(t.at("logits"), logits);
  expect_failure({"replay", write(t)}, 1, {"indexer on reference"});
  for (const char* name : {"topk", "topk_slots"}) {
    t = indexer_trace();
    std::vector<std::int32_t> ids = values<std::int32_t>(t.at(name));
    ids.front() += 1;
    set(t.at(name), ids);
    expect_failure({"replay", write(t)}, 1, {"topk on reference"});
  }
}

TEST_F(Replay, InfinitiesMustStandAtEqualPlaces) {
  Tensors t = small_sparse_trace();
  std::vector<float> lse = values<float>(t.at("lse_fp8"));
  lse[3] = -HUGE_VALF;
  set(t.at("lse_fp8"), lse);
  for (const Json& row : rows(write(t), 1)) {
    EXPECT_FALSE(row.at("passed"));
    EXPECT_TRUE(row.at("checked"));
    EXPECT_EQ(row.at("error"), "inf");  // JSON has no infinite number
  }
}

TEST_F(Replay, QueriesInF32AndSlotsInI64) {
  Tensors t = small_sparse_trace();
  std::vector<std::int64_t> wide;
  for (const std::int32_t slot : values<std::int32_t>(t.at("indices"))) wide.push_back(slot);
  t["indices"] = make_tensor("I64", t.at("indices").shape, wide);
  std::vector<std::uint32_t> q;
  for (const std::uint16_t bits : values<std::uint16_t>(t.at("q"))) q.push_back(std::uint32_t{bits} << 16);
  t["q"] = make_tensor("F32", t.at("q").shape, q);
  for (const Json& row : rows(write(t))) EXPECT_TRUE(row.at("passed")) << row;
}

// Any T, H, K and N: the first rows, heads and lanes alone, where topk_length allows to cut lanes.
TEST_F(Replay, OtherShapes) {
  Tensors t = small_sparse_trace("bf16");
  keep_rows(t.at("q"), 1);
  for (const char* name : {"indices", "topk_length", "out_bf16", "lse_bf16"}) keep_rows(t.at(name), 1);
  t["q"].bytes.resize(3 * 576 * 2);
  t["q"].shape[1] = 3;
  t["out_bf16"].bytes.resize(3 * 512 * 4);
  t["out_bf16"].shape[1] = 3;
  keep_columns(t.at("lse_bf16"), 3);
  for (const Json& row : rows(write(t))) EXPECT_TRUE(row.at("passed")) << row;

  t.erase("out_bf16");
  t.erase("lse_bf16");
  keep_columns(t.at("indices"), 0);  // no lanes at all
  t.erase("topk_length");
  EXPECT_EQ(rows(write(t)).size(), 2u);
  keep_rows(t.at("kv_bf16"), 0);  // and no slots
  EXPECT_EQ(rows(write(t)).size(), 2u);
}

// The rope cut off: rows of 528 bytes, the same at 656, and bf16 rows of 512.
TEST_F(Replay, RowsWithoutRope) {
  Tensors t = small_sparse_trace();
  keep_columns(t.at("q"), 512);
  t["kv_padded"] = t.at("kv_fp8");
  keep_columns(t.at("kv_fp8"), 528);
  t["kv_bf16"] = sparse_trace().at("kv_bf16");
  keep_columns(t.at("kv_bf16"), 512);
  for (const char* name : {"out_fp8", "lse_fp8"}) t.erase(name);
  {
    const model::Trace trace = model::load_trace(write(t));
    const auto& call = std::get<model::SparseMlaTrace>(trace.call);
    ASSERT_EQ(call.caches.size(), 3u);
    ASSERT_EQ(call.caches[1].name, "fp8");
    const Outputs fp8 = reference_outputs(call, call.caches[1]), bf16 = reference_outputs(call, call.caches[0]);
    for (const auto& [name, made] : {std::pair("fp8", &fp8), std::pair("padded", &fp8), std::pair("bf16", &bf16)}) {
      t[std::string("out_") + name] = make_tensor("F32", {2, 64, 512}, made->out);
      t[std::string("lse_") + name] = make_tensor("F32", {2, 64}, made->lse);
    }
  }
  const Json checked = rows(write(t));
  EXPECT_EQ(checked.size(), 6u);
  for (const Json& row : checked) EXPECT_TRUE(row.at("passed")) << row;
}

// With a sink, outputs shrink and lse does not change.
TEST_F(Replay, Sink) {
  Tensors t = small_sparse_trace();
  t["sink"] = make_tensor("F32", {64}, std::vector<float>(64, 1e4f));  // takes all of the softmax
  t.at("out_fp8").bytes.assign(t.at("out_fp8").bytes.size(), '\0');
  for (const Json& row : rows(write(t))) EXPECT_TRUE(row.at("passed")) << row;
}

// Two requests that share the cache; the second sees the pages in the same order.
TEST_F(Replay, SeveralRequests) {
  Tensors t = indexer_trace();
  Tensor& table = t.at("block_table");
  table.bytes += table.bytes;
  table.shape[0] = 2;
  set(t.at("context_lens"), std::vector<std::int32_t>{1024, 1024});
  t.at("context_lens").shape[0] = 2;
  set(t.at("row_request"), std::vector<std::int32_t>{1, 0, 1, 1, 0, 0, 1, 0});
  for (const Json& row : rows(write(t))) EXPECT_TRUE(row.at("passed")) << row;
  t.erase("row_request");  // dealt evenly: four rows each
  for (const Json& row : rows(write(t))) EXPECT_TRUE(row.at("passed")) << row;
}

TEST_F(Replay, UnquantisedKeys) {
  Tensors t;
  t["q"] = make_tensor("F32", {2, 1, 128}, std::vector<float>(256, 1.f));
  t["weights"] = make_tensor<float>("F32", {2, 1}, {1.f, -0.5f});
  t["k_pages"] = make_tensor("BF16", {2, 2 * 128}, std::vector<std::uint16_t>(512, 0x3F80));  // 1
  t["block_table"] = make_tensor<std::int32_t>("I32", {1, 2}, {1, 0});
  t["context_lens"] = make_tensor<std::int32_t>("I32", {1}, {3});
  t["row_lens"] = make_tensor<std::int32_t>("I32", {2}, {3, -1});
  const float kNone = -HUGE_VALF;
  t["logits"] = make_tensor<float>("F32", {2, 3}, {128, 128, 128, kNone, kNone, kNone});
  t["topk"] = make_tensor<std::int32_t>("I32", {2, 2}, {0, 1, -1, -1});
  t["topk_slots"] = make_tensor<std::int32_t>("I32", {2, 2}, {2, 3, -1, -1});
  for (const Json& row : rows(write(t))) EXPECT_TRUE(row.at("passed")) << row;
}

TEST_F(Replay, AFileNameNeedNotBeUtf8) {
  const std::string path = (dir_ / "\xFF.safetensors").string();
  fs::rename(write(indexer_trace()), path);
  EXPECT_EQ(rows(path).size(), 4u);
}

TEST_F(Replay, BadFiles) {
  const std::string path = write(small_sparse_trace());
  const std::string whole = read_file(path);
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, whole.size() - 1}) {
    write_file(path, whole.substr(0, size));
    expect_failure({"replay", path}, 2, {path});
  }
  expect_failure({"replay", dir_.path().string()}, 2, {"directory"});
  expect_failure({"replay", "/nowhere"}, 2, {"/nowhere"});
  expect_failure({"replay", ""}, 2);
  expect_failure({"replay", golden("glm5-tiny/golden.safetensors")}, 2, {"indices", "k_pages"});
}

}  // namespace
}  // namespace sievemla::test
