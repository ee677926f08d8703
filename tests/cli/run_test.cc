// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/run_test.cc -- sievemla run: the goldens, prompts, and what a prompt may not be.
#include "cli/program.h"

namespace sievemla::test {
namespace {

constexpr const char* kModels[] = {"glm5-tiny", "glm52-tiny", "dsv32-tiny"};

std::vector<std::string> check(const std::string& model, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"run", golden_dir(model).string(), "--check",
                                        (golden_dir(model) / "golden.safetensors").string(), "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::vector<int> generated(const std::string& model) {
  const Tensor ids = read_tensors(golden_dir(model) / "golden.safetensors").at("generated_ids");
  std::vector<int> tokens(ids.bytes.size() / sizeof(int));
  std::memcpy(tokens.data(), ids.bytes.data(), ids.bytes.size());
  return tokens;
}

std::string prompt_ids(const std::string& model) {
  const Tensor ids = read_tensors(golden_dir(model) / "golden.safetensors").at("prompt_ids");
  std::string text;
  for (std::size_t i = 0; i < ids.bytes.size(); i += sizeof(std::int32_t)) {
    std::int32_t id;
    std::memcpy(&id, ids.bytes.data() + i, sizeof id);
    text += (i ? "," : "") + std::to_string(id);
  }
  return text;
}

TEST(CliRun, GoldensEndToEnd) {
  for (const std::string model : kModels)
    for (const std::string backend : {"reference", "cpu"}) {
      SCOPED_TRACE(model + " on " + backend);
      const Json json = json_of(check(model, {"--norm-eps", "hf", "--backend", backend}), "run");
      EXPECT_TRUE(json.at("check").at("passed"));
      EXPECT_TRUE(json.at("check").at("tokens_judged"));
      EXPECT_TRUE(json.at("check").at("failures").empty());
      EXPECT_EQ(json.at("tokens").get<std::vector<int>>(), generated(model));
      EXPECT_EQ(json.at("backend"), backend);
      for (const Json& row : json.at("layers")) {
        EXPECT_TRUE(row.at("checked")) << row;
        EXPECT_LE(row.at("error"), row.at("bound")) << row;
      }
    }
}

TEST(CliRun, RanksAreMergedByCombine) {
  const Json json = json_of(check("glm52-tiny", {"--norm-eps", "hf", "--ranks", "3", "--threads", "1"}), "run");
  EXPECT_TRUE(json.at("check").at("passed"));
  EXPECT_EQ(json.at("ranks"), 3);
  EXPECT_EQ(json.at("tokens").get<std::vector<int>>(), generated("glm52-tiny"));
  int merges = 0;
  for (const Json& row : json.at("layers")) merges += row.at("stage") == "combine" && row.at("us") > 0;
  EXPECT_EQ(merges, 4);
  const std::string model = golden_dir("glm5-tiny").string();
  for (const std::string ranks : {"0", "65", "-1", "two"})
    expect_failure({"run", model, "--prompt", "x", "--ranks", ranks}, 2,
                   {"--ranks must be a whole number from 1 to 64"});
}

// The engines' eps is the default, and misses a golden of transformers by little: the program says why.
TEST(CliRun, DefaultEpsHintsAtHf) {
  const Outcome outcome = run_program(check("glm5-tiny", {}));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(is_complaint(outcome.err));
  EXPECT_NE(outcome.err.find("try --norm-eps hf"), std::string::npos) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_FALSE(json.at("check").at("passed"));
  EXPECT_NE(json.at("check").at("hint").get<std::string>().find("--norm-eps hf"), std::string::npos);
}

TEST(CliRun, OtherFormatsBlockByBlock) {
  const std::pair<const char*, const char*> formats[] = {{"bf16", "f32"}, {"fp8_ds_mla", "fp8"}, {"f32", "fp8"}};
  for (const std::string model : kModels)
    for (const auto& [kv, index] : formats) {
      SCOPED_TRACE(model + " " + kv + " " + index);
      const Json json = json_of(
          check(model, {"--kv-format", kv, "--index-format", index, "--norm-eps", "hf", "--threads", "1"}), "run");
      EXPECT_TRUE(json.at("check").at("passed"));
      EXPECT_FALSE(json.at("check").at("tokens_judged"));
      EXPECT_FALSE(json.at("layers").empty());
    }
}

TEST(CliRun, AnotherModelsGoldenIsABadFile) {
  expect_failure({"run", golden_dir("glm5-tiny").string(), "--check", golden("dsv32-tiny/golden.safetensors")}, 2,
                 {"golden.safetensors"});
  expect_failure({"run", golden_dir("glm5-tiny").string(), "--check", golden_dir("glm5-tiny").string()}, 2,
                 {"directory"});
  expect_failure({"run", golden_dir("glm5-tiny").string(), "--check", "nowhere"}, 2, {"nowhere"});
}

TEST(CliRun, PromptIdsAreTheGoldensPrompt) {
  const Json json = json_of({"run", golden_dir("glm5-tiny").string(), "--prompt-ids", prompt_ids("glm5-tiny"),
                             "--norm-eps", "hf", "--page-size", "48", "--chunk", "7", "--threads", "1", "--json"},
                            "run");
  EXPECT_EQ(json.at("tokens").get<std::vector<int>>(), generated("glm5-tiny"));
  EXPECT_GT(json.at("tokens_per_s"), 0);
  EXPECT_EQ(json.at("prompt_tokens"), 120);
  EXPECT_FALSE(json.contains("check"));
  std::set<std::string> stages;
  for (const Json& row : json.at("layers")) {
    stages.insert(row.at("stage"));
    EXPECT_TRUE(row.at("layer").is_number() && row.at("us") > 0) << row;
    EXPECT_FALSE(row.at("checked")) << row;
    EXPECT_TRUE(row.at("error").is_null()) << row;
  }
  EXPECT_EQ(stages, (std::set<std::string>{"write", "indexer", "topk", "attention"}));
}

TEST(CliRun, TextIsItsBytes) {
  const std::string model = golden_dir("glm5-tiny").string();
  const auto tokens = [&](const std::string& option, const std::string& prompt) {
    return json_of({"run", model, option, prompt, "-n", "4", "--threads", "1", "--json"}, "run").at("tokens");
  };
  EXPECT_EQ(tokens("--prompt", "Az\n"), tokens("--prompt-ids", "65,122,10"));
  EXPECT_EQ(tokens("--prompt", "\xFF\xC3("), tokens("--prompt-ids", "255,195,40"));  // no UTF-8
}

TEST(CliRun, WhatAPromptMayNotBe) {
  const std::string model = golden_dir("glm5-tiny").string();
  for (const std::string ids : {"", ",", "1,", "1,,2", "x", "-1", "256", "1 2", "1;2", "99999999999999999999"})
    expect_failure({"run", model, "--prompt-ids", ids}, 2, {"from 0 to 255", "--prompt-ids"});
  expect_failure({"run", model, "--prompt", ""}, 2, {"at least one token"});
  // 4096 positions; the last token is not fed back.
  expect_failure({"run", model, "--prompt", "abc", "-n", "4095"}, 2, {"max_position_embeddings 4096: got 3 + 4095"});
  expect_failure({"run", model, "--prompt", "abc", "-n", "2147483647"}, 2, {"max_position_embeddings"});
  expect_failure({"run", model, "--prompt", std::string(5000, 'a')}, 2, {"max_position_embeddings"});
}

TEST(CliRun, TextNeedsAVocabularyOfBytes) {
  Model model;
  model.config["vocab_size"] = 512;
  const TempDir dir;
  model.write(dir);
  expect_failure({"run", dir.path().string(), "--prompt", "x"}, 2, {"no tokenizer here, use --prompt-ids", "512"});
}

TEST(CliRun, StopsAtEndOfText) {
  const std::vector<int> tokens = generated("glm5-tiny");
  const TempDir dir;
  Model model;
  const auto run = [&](const Json& eos, const std::vector<std::string>& more) {
    model.config["eos_token_id"] = eos;
    model.write(dir);
    std::vector<std::string> arguments = {
        "run",   dir.path().string(), "--prompt-ids", prompt_ids("glm5-tiny"), "--norm-eps", "hf", "--threads", "1",
        "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return json_of(arguments, "run").at("tokens").get<std::vector<int>>();
  };
  const std::vector<int> first(tokens.begin(), tokens.begin() + 3);
  EXPECT_EQ(run(tokens[2], {}), first);
  EXPECT_EQ(run({tokens[7], tokens[2]}, {}), first);
  EXPECT_EQ(run(tokens[2], {"--ignore-eos"}), tokens);
  EXPECT_EQ(run(nullptr, {}), tokens);
}

TEST(CliRun, BadCheckpoints) {
  const TempDir dir;
  expect_failure({"run", "/nowhere", "--prompt", "x"}, 2, {"/nowhere"});
  expect_failure({"run", dir.path().string(), "--prompt", "x"}, 2, {"config.json"});
  expect_failure({"run", golden("glm5-tiny/model.safetensors"), "--prompt", "x"}, 2);
  Model model;
  model.config["hidden_size"] = "32";
  model.write(dir);
  expect_failure({"run", dir.path().string(), "--prompt", "x"}, 2, {"hidden_size"});
  model = Model();
  model.tensors.erase("model.norm.weight");
  model.write(dir);
  expect_failure({"run", dir.path().string(), "--prompt", "x"}, 2, {"model.norm.weight"});
  const std::string whole = read_file(golden("glm5-tiny/model.safetensors"));
  Model().write(dir);
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{100}, whole.size() - 1}) {
    write_file(dir / "model.safetensors", whole.substr(0, size));
    expect_failure({"run", dir.path().string(), "--prompt", "x"}, 2, {"model.safetensors"});
  }
}

}  // namespace
}  // namespace sievemla::test
