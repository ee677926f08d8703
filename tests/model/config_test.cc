// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/model/config_test.cc -- every key of config.json, in every spelling, and what is refused.
#include "model/config.h"

#include <gtest/gtest.h>

#include "model/files.h"
#include "model/rope.h"

namespace sievemla::test {
namespace {

using model::Config;

Json config_of(const std::string& name) { return Json::parse(read_file(golden_dir(name) / "config.json")); }
Config parse(const Json& json) { return model::parse_config(json.dump()); }

// glm5-tiny's config with one key changed.
Json glm(const std::string& key, const Json& value) {
  Json json = config_of("glm5-tiny");
  json[key] = value;
  return json;
}
void bad(const Json& json, std::initializer_list<std::string_view> parts) {
  refused([&] { parse(json); }, parts);
}

TEST(Config, Glm) {
  const Config c = model::load_config(golden_dir("glm52-tiny"));
  EXPECT_EQ(c.model_type, "glm_moe_dsa");
  EXPECT_EQ(c.layers, 4);
  EXPECT_EQ(c.latent, 512);
  EXPECT_EQ(c.nope, 192);
  EXPECT_EQ(c.index_topk, 32);
  EXPECT_EQ(c.index_rope, RopeStyle::interleaved);
  EXPECT_EQ(c.full_indexer, (std::vector<bool>{true, true, false, false}));
  EXPECT_EQ(c.moe, (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(c.rope_config.theta, 1e6);
  EXPECT_FALSE(c.rope_config.yarn);
  EXPECT_EQ(c.rms_norm_eps, 1e-5);
  EXPECT_TRUE(c.eos_token_ids.empty());
}

TEST(Config, DeepSeek) {
  const Config c = model::load_config(golden_dir("dsv32-tiny") / "config.json");
  EXPECT_EQ(c.index_rope, RopeStyle::half_split);
  EXPECT_EQ(c.expert_groups, 4);
  EXPECT_EQ(c.topk_groups, 2);
  EXPECT_TRUE(c.rope_config.yarn);
  EXPECT_EQ(c.rope_config.factor, 40);
  EXPECT_EQ(c.rope_config.original_max_position, 4096);
  EXPECT_NEAR(model::softmax_scale(c), 0.1352337788608801, 1e-15);  // meta.json
  EXPECT_EQ(c.full_indexer, std::vector<bool>(2, true));
}

TEST(Config, OldAndNewRopeKeysAreTheSame) {
  const Json old = config_of("dsv32-tiny");
  Json renewed = old;
  renewed["rope_parameters"] = old["rope_scaling"];
  renewed["rope_parameters"]["rope_theta"] = old["rope_theta"];
  renewed["rope_parameters"]["rope_type"] = "yarn";
  for (const char* key : {"rope_scaling", "rope_theta"}) renewed.erase(key);
  renewed["rope_parameters"].erase("type");
  EXPECT_EQ(model::cos_sin_table(parse(old), 300), model::cos_sin_table(parse(renewed), 300));
  EXPECT_EQ(model::softmax_scale(parse(old)), model::softmax_scale(parse(renewed)));

  Json plain = config_of("glm5-tiny");
  const Config new_keys = parse(plain);
  plain.erase("rope_parameters");
  plain["rope_theta"] = 1000000;
  plain["rope_scaling"] = nullptr;
  EXPECT_EQ(model::cos_sin_table(parse(plain), 300), model::cos_sin_table(new_keys, 300));
  plain.erase("rope_theta");
  EXPECT_EQ(parse(plain).rope_config.theta, 10000);
}

TEST(Config, YarnDefaults) {
  Json json = config_of("dsv32-tiny");
  for (const char* key : {"mscale", "mscale_all_dim", "beta_fast", "beta_slow"}) json["rope_scaling"].erase(key);
  const Config c = parse(json);
  EXPECT_EQ(c.rope_config.beta_fast, 32);
  EXPECT_EQ(c.rope_config.beta_slow, 1);
  EXPECT_DOUBLE_EQ(model::softmax_scale(c), 1 / std::sqrt(128. + 64));
  // Without mscale keys cosines carry 0.1 ln(factor) + 1.
  EXPECT_FLOAT_EQ(model::cos_sin_table(c, 1)[0], static_cast<float>(0.1 * std::log(40.) + 1));
  json["rope_scaling"]["attention_factor"] = 2.5;
  EXPECT_FLOAT_EQ(model::cos_sin_table(parse(json), 1)[0], 2.5f);
}

TEST(Config, RopeRotatesAsCase20Says) {
  const float row[] = {std::cos(1.f), std::cos(0.01f), std::sin(1.f), std::sin(0.01f)};
  std::vector<float> x = {1, 2, 3, 4};
  model::rotate(x.data(), row, 4, RopeStyle::half_split);
  const float half[] = {-1.984111f, 1.959901f, 2.462378f, 4.019800f};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(x[i], half[i], 2e-6);
  x = {1, 2, 3, 4};
  model::rotate(x.data(), row, 4, RopeStyle::interleaved);
  const float pairs[] = {-1.142640f, 1.922076f, 2.959851f, 4.029799f};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(x[i], pairs[i], 2e-6);
}

TEST(Config, IndexerTypesByListPatternAndFrequency) {
  Json json = config_of("glm52-tiny");
  json["num_hidden_layers"] = 8;
  json.erase("indexer_types");
  json["index_topk_freq"] = 4;
  json["index_skip_topk_offset"] = 3;
  const std::vector<bool> by_frequency = parse(json).full_indexer;
  EXPECT_EQ(by_frequency, (std::vector<bool>{true, true, true, false, false, false, true, false}));
  json["index_topk_pattern"] = "FFFSSSFS";
  json["index_topk_freq"] = 1;  // a pattern wins
  EXPECT_EQ(parse(json).full_indexer, by_frequency);
  json["index_topk_pattern"] = "FFFFFFFF";
  json["indexer_types"] = {"full", "full", "full", "shared", "shared", "shared", "full", "shared"};  // a list wins
  EXPECT_EQ(parse(json).full_indexer, by_frequency);
  for (const char* key : {"indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"})
    json.erase(key);
  EXPECT_EQ(parse(json).full_indexer, std::vector<bool>(8, true));

  json = config_of("glm52-tiny");  // GLM-5.2
  json.erase("indexer_types");
  json["num_hidden_layers"] = 78;
  json["index_topk_freq"] = 4;
  json["index_skip_topk_offset"] = 3;
  const std::vector<bool> real = parse(json).full_indexer;
  EXPECT_EQ(std::count(real.begin(), real.end(), true), 21);
}

TEST(Config, OtherSpellings) {
  EXPECT_EQ(parse(glm("eos_token_id", 7)).eos_token_ids, (std::vector<std::int64_t>{7}));
  EXPECT_EQ(parse(glm("eos_token_id", {7, 9})).eos_token_ids, (std::vector<std::int64_t>{7, 9}));
  EXPECT_EQ(parse(glm("mlp_layer_types", {"sparse", "dense"})).moe, (std::vector<bool>{true, false}));
  EXPECT_EQ(parse(glm("indexer_rope_interleave", false)).index_rope, RopeStyle::half_split);
  Json json = config_of("glm5-tiny");
  json.erase("indexer_rope_interleave");
  EXPECT_EQ(parse(json).index_rope, RopeStyle::interleaved);
  const Json nested = {{"model_type", "something_with_vision"}, {"text_config", json}};
  EXPECT_EQ(parse(nested).hidden, 32);
  json = config_of("dsv32-tiny");
  json["indexer_rope_interleave"] = true;
  EXPECT_EQ(parse(json).index_rope, RopeStyle::interleaved);
}

TEST(BadFile, ConfigThatIsNotOne) {
  for (const char* text : {"", "[]", "3", "{", "null", "{\"model_type\":\"glm_moe_dsa\"", "\"x\""})
    refused([&] { model::parse_config(text); }, {": got ", "config.json"});
  refused([] { model::load_config("/nonexistent/config.json"); }, {"readable", "/nonexistent/config.json"});
}

TEST(BadFile, ConfigMissesAKey) {
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
        "max_position_embeddings", "rms_norm_eps", "model_type"}) {
    Json json = config_of("glm5-tiny");
    json.erase(key);
    bad(json, {"the key is needed: got none (config.json: ", key});
    json[key] = nullptr;
    bad(json, {"the key is needed", key});
  }
}

TEST(BadFile, ConfigNumbers) {
  for (const char* key : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
                          "index_n_heads", "index_topk", "max_position_embeddings", "n_group", "num_experts_per_tok"})
    for (const Json& value : {Json("32"), Json(0), Json(-1), Json(2.5), Json(true), Json::array({32}), Json::object(),
                              Json(std::int64_t{1} << 40), Json(UINT64_MAX), Json(1e30)})
      bad(glm(key, value), {"a whole number in [", "is needed: got ", std::string("(config.json: ") + key + ")"});
  bad(glm("num_hidden_layers", "two"), {"got \"two\" (config.json: num_hidden_layers)"});
  bad(glm("rms_norm_eps", "1e-5"), {"a number in [", "config.json: rms_norm_eps"});
  bad(glm("rms_norm_eps", 0), {"a number in ["});
  bad(glm("norm_topk_prob", 1), {"true or false", "norm_topk_prob"});
  bad(glm("eos_token_id", "</s>"), {"eos_token_id"});
  bad(glm("eos_token_id", {1, -1}), {"eos_token_id"});
}

TEST(BadFile, ConfigModelType) {
  bad(glm("model_type", "llama"),
      {"the model type is glm_moe_dsa or deepseek_v32: got \"llama\" (config.json: model_type)"});
  bad(glm("model_type", 5), {"a string is needed"});
  bad(glm("model_type", std::string(10'000, 'x')), {"..."});
}

TEST(BadFile, ConfigKeysWithOneMeaning) {
  bad(glm("hidden_act", "gelu"), {"only \"silu\" is supported: got \"gelu\" (config.json: hidden_act)"});
  bad(glm("attention_bias", true), {"attention_bias"});
  bad(glm("scoring_func", "softmax"), {"scoring_func"});
  bad(glm("topk_method", "greedy"), {"topk_method"});
  bad(glm("moe_layer_freq", 2), {"moe_layer_freq"});
  bad(glm("rope_interleave", false), {"rope_interleave"});
}

TEST(BadFile, ConfigRope) {
  bad(glm("rope_parameters", 3), {"an object is needed", "rope_parameters"});
  bad(glm("rope_parameters", {{"rope_type", "llama3"}}),
      {"default or yarn: got \"llama3\" (config.json: rope_parameters.rope_type)"});
  bad(glm("rope_parameters", {{"rope_type", "yarn"}}), {"the key is needed", "rope_parameters.factor"});
  bad(glm("rope_parameters", {{"rope_type", "yarn"}, {"factor", 0}}), {"rope_parameters.factor"});
  bad(glm("rope_parameters", {{"rope_theta", 0}}), {"rope_parameters.rope_theta"});
  bad(glm("rope_parameters", {{"rope_theta", "1e6"}}), {"rope_parameters.rope_theta"});
}

TEST(BadFile, ConfigLists) {
  bad(glm("indexer_types", {"full"}), {"one entry per layer (2)", "indexer_types"});
  bad(glm("indexer_types", {"full", "half"}), {"full or shared: got \"half\""});
  bad(glm("indexer_types", {"shared", "full"}), {"layer 0"});
  bad(glm("indexer_types", "full"), {"one entry per layer"});
  bad(glm("index_topk_pattern", "FX"), {"F or S: got \"X\""});
  bad(glm("index_topk_pattern", "SF"), {"layer 0"});
  bad(glm("mlp_layer_types", {"dense", 1}), {"sparse or dense: got 1"});
}

TEST(BadFile, ConfigSizesThatDisagree) {
  bad(glm("num_key_value_heads", 1), {"num_attention_heads (2)", "num_key_value_heads"});
  bad(glm("qk_head_dim", 255), {"(256): got 255"});
  bad(glm("qk_rope_head_dim", 63), {"even"});
  bad(glm("index_head_dim", 62), {"index_head_dim"});
  bad(glm("n_group", 3), {"evenly"});
  bad(glm("n_group", 4), {"at least two"});
  bad(glm("topk_group", 2), {"at most n_group"});
  bad(glm("num_experts_per_tok", 5), {"have 4 experts: got 5"});
}

}  // namespace
}  // namespace sievemla::test
