// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/model/checkpoint_test.cc -- checkpoints in one file or many, in three dtypes, every tensor in its place.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cmath>

#include "base/number.h"
#include "model/decoder.h"
#include "model/files.h"
#include "model/golden.h"
#include "support/near.h"

namespace sievemla::test {
namespace {

using model::Checkpoint;
using model::Config;
using model::Decoder;
using model::DecoderOptions;

const std::vector<std::int32_t> kPrompt = [] {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < 70; ++i) ids.push_back(i * 37 % 256);  // longer than index_topk
  return ids;
}();

std::vector<float> logits_of(const fs::path& directory) {
  const Config config = model::load_config(directory);
  const Checkpoint checkpoint(directory);
  DecoderOptions options;
  options.max_tokens = 80;
  return Decoder(config, checkpoint, options).forward(kPrompt);
}
std::vector<float> logits_of(const Model& model) {
  const TempDir dir;
  model.write(dir);
  return logits_of(dir.path());
}

// The checkpoint with a change is refused, and the message says so.
template <class E = BadFile>
void bad(const std::function<void(Model&)>& change, std::initializer_list<std::string_view> parts) {
  Model model;
  change(model);
  const TempDir dir;
  model.write(dir);
  refused<E>([&] { logits_of(dir.path()); }, parts);
}

// BF16 weights, in another dtype.
std::string converted(const Tensor& t, bool to_f16) {
  std::string out;
  for (std::size_t i = 0; i < t.bytes.size(); i += 2) {
    bf16 x;
    std::memcpy(&x, t.bytes.data() + i, 2);
    const std::uint32_t u = std::uint32_t{x.bits} << 16;
    if (!to_f16) {
      out.append(reinterpret_cast<const char*>(&u), 4);
      continue;
    }
    // bf16 has 8 bits of significand, f16 11: exact for exponents of -14 and above; below, zero.
    const int exponent = static_cast<int>((u >> 23) & 255u) - 127;
    EXPECT_LE(exponent, 15);
    const std::uint16_t half = static_cast<std::uint16_t>(
        ((u >> 16) & 0x8000u) |
        (exponent < -14 ? 0u : (static_cast<unsigned>(exponent + 15) << 10) | ((u >> 13) & 1023u)));
    out.append(reinterpret_cast<const char*>(&half), 2);
  }
  return out;
}

void write_shards(const TempDir& dir, const Model& model, int shards) {
  write_file(dir / "config.json", model.config.dump());
  std::vector<Tensors> parts(static_cast<std::size_t>(shards));
  Json map = Json::object();
  std::size_t i = 0;
  for (const auto& [name, tensor] : model.tensors) {
    const std::size_t part = i++ % parts.size();
    parts[part][name] = tensor;
    map[name] = "model-" + std::to_string(part) + ".safetensors";
  }
  for (std::size_t part = 0; part < parts.size(); ++part)
    write_file(dir / ("model-" + std::to_string(part) + ".safetensors"), to_file(parts[part]));
  write_file(dir / "model.safetensors.index.json", Json{{"metadata", {{"total_size", 0}}}, {"weight_map", map}}.dump());
}

TEST(Checkpoint, ShardsAreOneModel) {
  const TempDir dir;
  write_shards(dir, Model{}, 3);
  EXPECT_EQ(logits_of(dir.path()), logits_of(golden_dir("glm5-tiny")));
}

TEST(Checkpoint, WeightsInF32) {
  Model model;
  for (auto& [name, t] : model.tensors)
    if (t.dtype == "BF16") t = {"F32", t.shape, converted(t, false)};
  EXPECT_EQ(logits_of(model), logits_of(golden_dir("glm5-tiny")));
}

TEST(Checkpoint, WeightsInF16) {
  Model model;
  for (auto& [name, t] : model.tensors)
    if (t.dtype == "BF16") t = {"F16", t.shape, converted(t, true)};
  // Weights below 2^-14 became zero: a logit changes by 2^-14 times activations of order 1, far below 1e-2 of the
  // largest.
  EXPECT_LT(relative_error(logits_of(model), logits_of(golden_dir("glm5-tiny"))), 1e-2);
}

TEST(Checkpoint, TiedEmbeddings) {
  Model model;
  const Tensor embed = model.tensors["model.embed_tokens.weight"];
  model.tensors["lm_head.weight"] = embed;
  const std::vector<float> want = logits_of(model);
  model.config["tie_word_embeddings"] = true;
  EXPECT_EQ(logits_of(model), want);  // a head that is there is not used, nor is it extra
  model.tensors.erase("lm_head.weight");
  EXPECT_EQ(logits_of(model), want);
}

TEST(Checkpoint, WhatIsNotExtra) {
  const TempDir dir;
  Model model;
  model.tensors["model.layers.2.self_attn.q_a_proj.weight"] = {"F32", {1}, std::string(4, '\xff')};  // NaN, never read
  model.tensors["model.layers.78.eh_proj.weight"] = {"I32", {1}, std::string(4, '\0')};
  model.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"F32", {1}, std::string(4, '\0')};
  EXPECT_EQ(logits_of(model), logits_of(golden_dir("glm5-tiny")));

  Model shared;  // layer 1 shares, and has the indexer's weights all the same
  shared.config["indexer_types"] = {"full", "shared"};
  const std::vector<float> want = logits_of(shared);
  std::erase_if(shared.tensors, [](const auto& t) { return t.first.starts_with("model.layers.1.self_attn.indexer."); });
  EXPECT_EQ(logits_of(shared), want);
  EXPECT_NE(want, logits_of(golden_dir("glm5-tiny")));
}

TEST(Checkpoint, IndexerTypesInThreeSpellings) {
  Model model;
  model.config["indexer_types"] = {"full", "shared"};
  const std::vector<float> want = logits_of(model);
  model.config.erase("indexer_types");
  model.config["index_topk_pattern"] = "FS";
  EXPECT_EQ(logits_of(model), want);
  model.config.erase("index_topk_pattern");
  model.config["index_topk_freq"] = 2;
  model.config["index_skip_topk_offset"] = 1;
  EXPECT_EQ(logits_of(model), want);
}

TEST(Checkpoint, ATextConfigInside) {
  Model model;
  model.config = Json{{"model_type", "something_with_vision"}, {"text_config", model.config}};
  EXPECT_EQ(logits_of(model), logits_of(golden_dir("glm5-tiny")));
}

TEST(BadFile, MissingTensor) {
  for (const char* name :
       {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
        "model.layers.1.self_attn.indexer.k_norm.bias", "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"})
    bad([&](Model& m) { m.tensors.erase(name); },
        {"the model needs this tensor: got none", std::string("tensor ") + name});
}

TEST(BadFile, ExtraTensor) {
  for (const char* name : {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.4.up_proj.weight",
                           "model.layers.x.weight", "model.layers.-1.a", "model.layers.1", "extra"})
    bad([&](Model& m) { m.tensors[name] = {"F32", {1}, std::string(4, '\0')}; },
        {"the model has no such tensor: got an extra tensor", std::string("tensor ") + name});
  bad([](Model& m) { m.config["first_k_dense_replace"] = 2; }, {"needs this tensor"});
}

TEST(BadFile, WrongShape) {
  const auto shape = [](std::vector<std::int64_t> s) {
    return [s](Model& m) { m.tensors["model.layers.0.self_attn.o_proj.weight"].shape = s; };
  };
  bad(shape({512, 32}), {"the shape must be [32, 512]: got [512, 32]", "o_proj.weight"});
  bad(shape({32 * 512}), {"got [16384]"});
  bad(shape({32, 512, 1}), {"got [32, 512, 1]"});
  bad([](Model& m) { m.config["num_attention_heads"] = 1, m.config["num_key_value_heads"] = 1; },
      {"the shape must be"});
  bad([](Model& m) { m.config["vocab_size"] = 1 << 24; }, {"the shape must be [16777216, 32]: got [256, 32]"});
}

TEST(BadFile, WrongDType) {
  for (const char* dtype : {"I32", "F8_E4M3", "U8"})
    bad(
        [&](Model& m) {
          Tensor& t = m.tensors["model.norm.weight"];
          t.dtype = dtype;
          t.bytes.assign(dtype == std::string("I32") ? 128 : 32, '\0');
        },
        {"weights are F32, BF16 or F16: got ", dtype, "tensor model.norm.weight"});
  bad([](Model& m) { m.tensors["model.norm.weight"].dtype = "F8_E8M0"; },
      {"weights are F32, BF16 or F16: got F8_E8M0", "tensor model.norm.weight"});
}

TEST(BadFile, WeightsThatAreNotFinite) {
  struct Place {
    std::string name;
    std::size_t at;
  };
  for (const Place& place :
       {Place{"model.norm.weight", 62}, Place{"model.layers.0.self_attn.kv_b_proj.weight", 4000},
        Place{"model.embed_tokens.weight", 0}, Place{"model.layers.1.mlp.experts.2.up_proj.weight", 2}})
    for (const std::string& value : {std::string("\xc0\x7f"), std::string("\x80\xff")})  // NaN, -inf
      bad([&](Model& m) { m.tensors[place.name].bytes.replace(place.at, 2, value); },
          {"weights must be finite: got a NaN or an infinity", "tensor " + place.name});
  bad(
      [](Model& m) {
        m.tensors["model.layers.1.mlp.gate.e_score_correction_bias"].bytes.replace(0, 4, "\xff\xff\xff\x7f");
      },
      {"finite", "e_score_correction_bias"});
}

TEST(BadFile, Fp8Weights) {
  bad<Unsupported>(
      [](Model& m) {
        m.tensors["model.layers.0.self_attn.o_proj.weight"].dtype = "F8_E4M3";
        m.tensors["model.layers.0.self_attn.o_proj.weight"].bytes.resize(32 * 512);
        m.tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"] = {"F32", {1, 4}, std::string(16, '\0')};
      },
      {"FP8 weights are not supported by run", "o_proj.weight_scale_inv"});
}

// A layer for multi-token prediction, in formats that the rest is not in.
TEST(Checkpoint, AnUnusedLayerMayBeInAnyFormat) {
  Model model;
  const std::string at = "model.layers.2.self_attn.o_proj.";
  model.tensors[at + "weight"] = {"F8_E4M3", {8, 8}, std::string(64, '\0')};
  model.tensors[at + "weight_scale_inv"] = {"F32", {1, 1}, std::string(4, '\0')};
  model.tensors["model.layers.2.scale"] = {"F8_E8M0", {3}, std::string(3, '\0')};
  EXPECT_EQ(logits_of(model), logits_of(Model()));
}

TEST(BadFile, Folders) {
  refused([] { Checkpoint c("/nonexistent/model"); }, {"a readable directory", "/nonexistent/model"});
  refused([] { Checkpoint c(golden_dir("glm5-tiny") / "config.json"); }, {"a readable directory"});
  const TempDir dir;
  refused([&] { Checkpoint c(dir.path()); }, {"readable", "model.safetensors"});
  if (::geteuid() != 0) {
    fs::permissions(dir.path(), fs::perms::none);
    refused([&] { Checkpoint c(dir.path()); }, {"readable"});
  }
}

TEST(BadFile, TruncatedCheckpoint) {
  const TempDir dir;
  const std::string whole = read_file(golden_dir("glm5-tiny") / "model.safetensors");
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{7}, std::size_t{100}, whole.size() / 2, whole.size() - 1}) {
    write_file(dir / "model.safetensors", whole.substr(0, size));
    refused([&] { Checkpoint c(dir.path()); }, {"model.safetensors"});
  }
}

// A name that is there and cannot be opened is named, instead of another file or none.
TEST(BadFile, LinksThatLeadNowhere) {
  const TempDir dir;
  const std::string index = "model.safetensors.index.json";
  fs::create_symlink(index, dir / index);
  refused([&] { Checkpoint(dir.path()); }, {"readable", "Too many levels", index});
  fs::remove(dir / index);
  fs::create_symlink("none", dir / index);
  refused([&] { Checkpoint(dir.path()); }, {"readable", "No such file", index});
  write_shards(dir, Model{}, 1);  // through the link
  fs::create_symlink("model.safetensors", dir / "model.safetensors");
  refused([&] { Checkpoint(dir.path()); }, {"readable", "Too many levels", "model.safetensors)"});
}

TEST(BadFile, Index) {
  const auto bad_index = [](const std::function<void(Json&)>& change, std::initializer_list<std::string_view> parts) {
    const TempDir dir;
    write_shards(dir, Model{}, 2);
    Json index = Json::parse(read_file(dir / "model.safetensors.index.json"));
    change(index);
    write_file(dir / "model.safetensors.index.json", index.dump());
    refused([&] { Checkpoint c(dir.path()); }, parts);
  };
  const std::string norm = "model.norm.weight";
  bad_index([](Json& j) { j = 3; }, {"weight_map", "index.json"});
  bad_index([](Json& j) { j.erase("weight_map"); }, {"weight_map"});
  bad_index([](Json& j) { j["weight_map"] = {1, 2}; }, {"weight_map"});
  for (const Json& name : {Json("../model-0.safetensors"), Json("/etc/passwd"), Json("a/b"), Json(".."), Json(""),
                           Json(1), Json(std::string("a\0b", 3))})
    bad_index([&](Json& j) { j["weight_map"][norm] = name; }, {"own directory", "tensor " + norm});
  bad_index([&](Json& j) { j["weight_map"][norm] = "none.safetensors"; }, {"none.safetensors"});
  bad_index([&](Json& j) { j["weight_map"]["extra"] = "model-0.safetensors"; },
            {"must have this tensor", "tensor extra"});
  bad_index([&](Json& j) { j["weight_map"].erase(norm); }, {"must be in the index", "tensor " + norm});
}

TEST(BadFile, Golden) {
  const Config config = model::load_config(golden_dir("glm5-tiny"));
  const Tensors good = read_tensors(golden_dir("glm5-tiny") / "golden.safetensors");
  const auto bad_golden = [&](const std::function<void(Tensors&)>& change,
                              std::initializer_list<std::string_view> parts) {
    const TempDir dir;
    Tensors tensors = good;
    change(tensors);
    write_file(dir / "golden.safetensors", to_file(tensors));
    refused([&] { model::load_golden(dir / "golden.safetensors", config); }, parts);
  };
  for (const auto& entry : good) {
    const std::string& name = entry.first;
    bad_golden([&](Tensors& t) { t.erase(name); }, {"tensor " + name});
    bad_golden([&](Tensors& t) { t[name].dtype = t[name].dtype == "F32" ? "I32" : "F32"; },
               {"dtype", "tensor " + name});
  }
  bad_golden([](Tensors& t) { t["prompt_ids"].bytes[1] = 1; }, {"the vocabulary of 256", "prompt_ids"});
  bad_golden([](Tensors& t) { t["layers.1.topk"].bytes[0] = 1; }, {"positions up to t", "layers.1.topk"});
  bad_golden([](Tensors& t) { t["generated_ids"] = {"I32", {0}, ""}; }, {"generated tokens"});
  bad_golden([](Tensors& t) { t["layers.0.attn_input"].shape = {32, 135}; }, {"[135, 32]: got [32, 135]"});
}

TEST(BadFile, DecoderCalls) {
  const fs::path directory = golden_dir("glm5-tiny");
  const Config config = model::load_config(directory);
  const Checkpoint checkpoint(directory);
  const auto make = [&](const std::function<void(DecoderOptions&)>& change) {
    DecoderOptions options;
    options.max_tokens = 16;
    change(options);
    return Decoder(config, checkpoint, options);
  };
  refused<InvalidArgument>([&] { make([](auto& o) { o.page_size = 0; }); }, {"page_size"});
  refused<InvalidArgument>([&] { make([](auto& o) { o.chunk = -1; }); }, {"chunk"});
  refused<InvalidArgument>([&] { make([](auto& o) { o.max_tokens = 4097; }); }, {"max_position_embeddings (4096)"});
  refused<InvalidArgument>([&] { make([](auto& o) { o.kv_format = KvFormat::fp8_nope; }); }, {"fp8_nope for 512 | 64"});
  Decoder decoder = make([](auto&) {});
  const auto feed = [&](std::vector<std::int32_t> ids) { return decoder.forward(ids); };
  refused<InvalidArgument>([&] { feed({}); }, {"none"});
  refused<InvalidArgument>([&] { feed({1, 256}); }, {"got 256"});
  refused<InvalidArgument>([&] { feed({-1}); }, {"got -1"});
  refused<InvalidArgument>([&] { feed(std::vector<std::int32_t>(17)); }, {"got 17 after 0 of 16"});
  EXPECT_EQ(decoder.length(), 0);
  feed(std::vector<std::int32_t>(16));
  refused<InvalidArgument>([&] { feed({1}); }, {"got 1 after 16 of 16"});

  Config other = config;
  other.rope = 32;
  refused<Unsupported>([&] { Decoder(other, checkpoint, {}); }, {"qk_rope_head_dim"});
}

}  // namespace
}  // namespace sievemla::test
