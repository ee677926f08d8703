// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/model/golden_test.cc -- the decoder against Hugging Face transformers, and against itself in every way to run it.
#include "model/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/compare.h"
#include "base/view.h"
#include "model/files.h"

namespace sievemla::test {
namespace {

using model::Checkpoint;
using model::CheckReport;
using model::Config;
using model::Decoder;
using model::DecoderOptions;
using model::Golden;

const std::vector<std::string> kModels = {"glm5-tiny", "glm52-tiny", "dsv32-tiny"};
const std::vector<Backend> kBackends = {Backend::reference(), Backend::cpu({.threads = 1, .host = {}})};

struct Loaded {
  explicit Loaded(const std::string& name)
      : directory(golden_dir(name)),
        config(model::load_config(directory)),
        checkpoint(directory),
        golden(model::load_golden(directory / "golden.safetensors", config)) {}
  fs::path directory;
  Config config;
  Checkpoint checkpoint;
  Golden golden;

  DecoderOptions options(const Backend& backend) const {
    DecoderOptions o;
    o.backend = backend;
    o.norm_eps = model::NormEps::hf;
    o.max_tokens = golden.rows();
    return o;
  }
  std::vector<std::int32_t> fed() const {
    std::vector<std::int32_t> ids = golden.prompt;
    ids.insert(ids.end(), golden.generated.begin(), golden.generated.end() - 1);
    return ids;
  }
};

void expect_passed(const Loaded& m, const DecoderOptions& options) {
  const CheckReport report = model::check_golden(m.config, m.checkpoint, m.golden, options);
  for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
  for (const model::CheckRow& row : report.rows) EXPECT_TRUE(row.error >= 0) << row.layer << ' ' << row.stage;
  if (!report.tokens_judged) return;
  EXPECT_EQ(report.tokens, m.golden.generated);
  // Each layer is judged: its selection and its output, and scores where it has an indexer; then the logits.
  const auto full = std::count(m.config.full_indexer.begin(), m.config.full_indexer.end(), true);
  EXPECT_EQ(report.rows.size(), static_cast<std::size_t>(2 * m.config.layers + full + 1));
}

void golden_on_every_backend(const std::string& name) {
  const Loaded m(name);
  EXPECT_EQ(m.golden.tolerance.attn_output, 5e-6);
  for (const Backend& backend : kBackends) {
    SCOPED_TRACE(backend.name());
    expect_passed(m, m.options(backend));
  }
  expect_passed(m, m.options(Backend::cpu({.threads = 2, .host = {}})));
}

TEST(Golden, Glm5Tiny) { golden_on_every_backend("glm5-tiny"); }
TEST(Golden, Glm52Tiny) { golden_on_every_backend("glm52-tiny"); }
TEST(Golden, Dsv32Tiny) { golden_on_every_backend("dsv32-tiny"); }

TEST(Golden, PageSizes) {
  for (const std::string& name : kModels) {
    const Loaded m(name);
    for (const Backend& backend : kBackends)
      for (const std::int64_t page_size : {16, 48, 64, 176}) {
        SCOPED_TRACE(name + " " + backend.name() + " " + std::to_string(page_size));
        DecoderOptions options = m.options(backend);
        options.page_size = page_size;
        Decoder decoder(m.config, m.checkpoint, options);
        const model::Generated got = model::generate(decoder, m.golden.prompt, {.tokens = 16, .ignore_eos = true});
        EXPECT_EQ(got.tokens, m.golden.generated);
      }
  }
}

// Rows are independent of each other and each kernel is batch-invariant here, so all of this is bitwise.
std::vector<float> all_logits(const Loaded& m, const DecoderOptions& options, const model::Observer& observer = {}) {
  return Decoder(m.config, m.checkpoint, options).forward(m.fed(), Decoder::Logits::all, observer);
}

TEST(Golden, Chunks) {
  for (const std::string& name : kModels) {
    const Loaded m(name);
    for (const Backend& backend : kBackends) {
      DecoderOptions options = m.options(backend);
      const std::vector<float> want = all_logits(m, options);
      for (const std::int64_t chunk : {1, 7, 64}) {
        SCOPED_TRACE(name + " " + backend.name() + " " + std::to_string(chunk));
        options.chunk = chunk;
        EXPECT_EQ(all_logits(m, options), want);
      }
    }
  }
}

TEST(Golden, ChunksWithQuantisedCaches) {
  const Loaded m("glm52-tiny");
  DecoderOptions options = m.options(kBackends[1]);
  options.kv_format = KvFormat::fp8_ds_mla;
  options.index_format = IndexFormat::fp8;
  const std::vector<float> want = all_logits(m, options);
  for (const std::int64_t chunk : {1, 7, 64}) {
    options.chunk = chunk;
    EXPECT_EQ(all_logits(m, options), want);
  }
}

TEST(Golden, DecodeEqualsPrefill) {
  for (const std::string& name : kModels) {
    const Loaded m(name);
    for (const Backend& backend : kBackends) {
      SCOPED_TRACE(name + " " + backend.name());
      const std::vector<float> prefill = all_logits(m, m.options(backend));
      Decoder decoder(m.config, m.checkpoint, m.options(backend));
      std::vector<float> steps = decoder.forward(m.golden.prompt);
      for (std::size_t i = 0; i + 1 < m.golden.generated.size(); ++i) {
        const std::vector<float> step = decoder.forward(std::span(&m.golden.generated[i], 1));
        steps.insert(steps.end(), step.begin(), step.end());
      }
      EXPECT_EQ(steps, std::vector<float>(prefill.end() - static_cast<std::ptrdiff_t>(steps.size()), prefill.end()));
    }
  }
}

TEST(Golden, ThreadsChangeNoBit) {
  const Loaded m("glm5-tiny");
  const std::vector<float> want = all_logits(m, m.options(Backend::cpu({.threads = 1, .host = {}})));
  for (const int threads : {2, 3, 8})
    EXPECT_EQ(all_logits(m, m.options(Backend::cpu({.threads = threads, .host = {}}))), want) << threads;
}

TEST(Golden, StagesOneByOneEqualThePipeline) {
  const Loaded m("glm52-tiny");
  for (const Backend& backend : kBackends)
    for (const bool scores : {false, true}) {
      int blocks = 0;
      const model::Observer observer{.block = [&](const model::BlockTrace&) { ++blocks; }, .scores = scores};
      EXPECT_EQ(all_logits(m, m.options(backend), observer), all_logits(m, m.options(backend)));
      EXPECT_EQ(blocks, 4);
    }
}

TEST(Golden, PhysicalPagesAreScrambled) {
  const Loaded m("glm5-tiny");
  DecoderOptions options = m.options(kBackends[1]);
  options.page_size = 16;
  const model::Observer observer{.block = [&](const model::BlockTrace& trace) {
    std::int64_t in_place = 0;
    for (std::int64_t t = 0; t < trace.args.latent.slots.dim(0); ++t)
      in_place += base::load_int(trace.args.latent.slots, t) == t;
    EXPECT_LT(in_place, m.golden.rows() / 2);
  }};
  all_logits(m, options, observer);
}

// ---- other formats: block by block ------------------------------------------------------------------

void blocks_pass(KvFormat kv, IndexFormat index) {
  for (const std::string& name : kModels) {
    const Loaded m(name);
    for (const Backend& backend : kBackends) {
      SCOPED_TRACE(name + " " + backend.name());
      DecoderOptions options = m.options(backend);
      options.kv_format = kv;
      options.index_format = index;
      const CheckReport report = model::check_golden(m.config, m.checkpoint, m.golden, options);
      for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
      EXPECT_FALSE(report.tokens_judged);
      EXPECT_EQ(report.tokens.size(), m.golden.generated.size());
      for (const char* stage : {"indexer", "attention"})
        EXPECT_TRUE(std::any_of(report.rows.begin(), report.rows.end(), [&](const auto& row) {
          return row.stage == stage && row.bound == model::kSameBytesTolerance;
        }));
    }
  }
}

TEST(Golden, Bf16Cache) { blocks_pass(KvFormat::bf16, IndexFormat::f32); }
TEST(Golden, Fp8Cache) { blocks_pass(KvFormat::fp8_ds_mla, IndexFormat::f32); }
TEST(Golden, Fp8Indexer) { blocks_pass(KvFormat::bf16, IndexFormat::fp8); }
TEST(Golden, Bf16Indexer) { blocks_pass(KvFormat::f32, IndexFormat::bf16); }
TEST(Golden, Fp8CacheAndIndexer) { blocks_pass(KvFormat::fp8_ds_mla, IndexFormat::fp8); }

// meta.json has the effect of rounding, simulated in double with queries rounded too. Ours keeps f32 queries, so it must
// err no more than that, and more than a tenth of it, or nothing was rounded.
TEST(Golden, RoundingIsAsLargeAsItShouldBe) {
  for (const std::string& name : kModels) {
    const Loaded m(name);
    const Json meta = Json::parse(read_file(m.directory / "meta.json"))["what_rounding_looks_like"];
    for (const auto& [kv, key] : std::map<KvFormat, std::string>{
             {KvFormat::bf16, "bf16 q and kv rows"}, {KvFormat::fp8_ds_mla, "bf16 q, 656-byte fp8 kv rows"}}) {
      DecoderOptions options = m.options(Backend::cpu({.threads = 1, .host = {}}));
      options.kv_format = kv;
      Decoder decoder(m.config, m.checkpoint, options);
      double error = 0;
      for (std::size_t l = 0; l < m.golden.layers.size(); ++l) {
        const Golden::Layer& layer = m.golden.layers[l];
        const std::vector<float> out = decoder.attention_block(static_cast<int>(l), layer.attn_input, layer.topk);
        error =
            std::max(error, base::relative_error(out, {static_cast<const float*>(layer.attn_output.data), out.size()}));
      }
      const double simulated = meta[key]["attn_output_max_rel_err"];
      EXPECT_LT(error, 1.5 * simulated) << name << ' ' << key;
      EXPECT_GT(error, 0.1 * simulated) << name << ' ' << key;
    }
  }
}

TEST(Golden, AnFp8IndexerSelectsNearlyTheSame) {
  for (const std::string& name : kModels) {
    const Loaded m(name);
    const Json meta = Json::parse(read_file(m.directory / "meta.json"))["what_rounding_looks_like"];
    const double simulated = meta["bf16 q and kv rows, fp8 indexer"]["topk_overlap"]["mean"];
    DecoderOptions options = m.options(Backend::cpu({.threads = 1, .host = {}}));
    options.index_format = IndexFormat::fp8;
    Decoder decoder(m.config, m.checkpoint, options);
    std::int64_t same = 0, all = 0;
    for (std::size_t l = 0; l < m.golden.layers.size(); ++l) {
      if (!m.config.full_indexer[l]) continue;
      const TensorView want = m.golden.layers[l].topk;
      const model::Observer observer{.block = [&](const model::BlockTrace& trace) {
        for (std::int64_t t = m.config.index_topk; t < want.dim(0); ++t) {
          const std::int32_t *a = base::at<std::int32_t>(trace.positions, t), *b = base::at<std::int32_t>(want, t);
          std::vector<std::int32_t> both;
          std::set_intersection(a, a + want.dim(1), b, b + want.dim(1), std::back_inserter(both));
          same += static_cast<std::int64_t>(both.size());
          all += want.dim(1);
        }
      }};
      decoder.attention_block(static_cast<int>(l), m.golden.layers[l].attn_input, {}, observer);
    }
    // The same rule for scales, so only sums in another order move a key across the cut: a hundredth of the ids at most.
    EXPECT_NEAR(static_cast<double>(same) / static_cast<double>(all), simulated, 0.01) << name;
  }
}

// ---- generation -------------------------------------------------------------------------------------

TEST(Generate, StopsAtAnEndOfTextToken) {
  Loaded m("glm5-tiny");
  const std::int32_t third = m.golden.generated[2];
  const auto first = std::find(m.golden.generated.begin(), m.golden.generated.end(), third);
  m.config.eos_token_ids = {1000, third};
  Decoder decoder(m.config, m.checkpoint, m.options(kBackends[1]));
  std::vector<std::int32_t> seen;
  const auto generate = [&](bool ignore) {
    seen.clear();
    return model::generate(
        decoder, m.golden.prompt,
        {.tokens = 16, .ignore_eos = ignore, .on_token = [&](std::int32_t id) { seen.push_back(id); }});
  };
  EXPECT_EQ(generate(false).tokens, std::vector<std::int32_t>(m.golden.generated.begin(), first + 1));
  EXPECT_EQ(generate(true).tokens, m.golden.generated);
  EXPECT_EQ(seen, m.golden.generated);
  EXPECT_TRUE(model::generate(decoder, m.golden.prompt, {.tokens = 0}).tokens.empty());
}

TEST(Generate, GreedyTakesTheLowestOfEquals) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(model::greedy(std::vector<float>{1, 3, 3, 2}), 1);
  EXPECT_EQ(model::greedy(std::vector<float>{nan, -5, nan, -4}), 3);
  EXPECT_EQ(model::greedy(std::vector<float>{-INFINITY, -INFINITY}), 0);
}

TEST(Generate, BlocksNeedASelectionWhereTheyShareOne) {
  const Loaded m("glm52-tiny");
  Decoder decoder(m.config, m.checkpoint, m.options(kBackends[1]));
  refused<InvalidArgument>([&] { decoder.attention_block(2, m.golden.layers[2].attn_input, {}); }, {"handed in"});
  refused<InvalidArgument>([&] { decoder.attention_block(4, m.golden.layers[2].attn_input, {}); }, {"got 4"});
}

}  // namespace
}  // namespace sievemla::test
