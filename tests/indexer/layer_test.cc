// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/layer_test.cc -- write_layer on the host backends: the bytes of the separate steps, and its rules.
#include "indexer/write_layer.h"
#include "sievemla/error.h"

namespace sievemla::test {
namespace {

TEST(WriteLayer, IsTheSeparateSteps) {
  for_each_write_layer([]<class T>(const WriteLayer<T>& problem, ScaleRule rule) {
    for (const Backend& backend : host_backends({1, 3})) {
      const Buffer want = problem.kv_cache(), got = want, index_want = problem.keys.cache(IndexFormat::fp8),
                   index_got = index_want;
      std::vector<std::int32_t> indices = problem.indices();
      write_layer(backend, problem.args(got, index_got, rule, indices));
      write_latent(backend, problem.separate(want, rule));
      write_index_keys(backend, problem.key_args(index_want, rule));
      EXPECT_EQ(got.bytes, want.bytes) << backend.name();
      EXPECT_EQ(index_got.bytes, index_want.bytes) << backend.name();
      EXPECT_TRUE(problem.filled(indices)) << backend.name();
    }
  });
}

TEST(WriteLayer, WithoutAnIndexer) {
  const WriteLayer<bf16> problem(RopeStyle::interleaved, KvFormat::fp8_ds_mla, 64);
  const Buffer want = problem.kv_cache(), got = want, index = problem.keys.cache(IndexFormat::fp8), untouched = index;
  std::vector<std::int32_t> indices = problem.indices();
  WriteLayerArgs args = problem.args(got, index, ScaleRule::arbitrary, indices);
  args.keys = {}, args.indices = {};
  write_layer(Backend::cpu(), args);
  write_latent(Backend::cpu(), problem.separate(want, ScaleRule::arbitrary));
  EXPECT_EQ(got.bytes, want.bytes);
  EXPECT_EQ(index.bytes, untouched.bytes);
  EXPECT_EQ(indices, problem.indices());
}

TEST(WriteLayer, SaysWhatIsWrong) {
  const WriteLayer<bf16> problem(RopeStyle::interleaved, KvFormat::fp8_ds_mla, 64);
  const Buffer kv = problem.kv_cache(), index = problem.keys.cache(IndexFormat::fp8), before = kv;
  std::vector<std::int32_t> indices = problem.indices();
  const std::pair<const char*, void (*)(WriteLayerArgs&)> mistakes[] = {
      {"write_layer: latent_eps", [](WriteLayerArgs& a) { a.latent_eps = 0; }},
      {"write_layer: latent_weight", [](WriteLayerArgs& a) { a.latent_weight.shape[0] = 500; }},
      {"write_layer: rope.style", [](WriteLayerArgs& a) { a.rope.style = RopeStyle::unset; }},
      {"write_layer: rope.positions", [](WriteLayerArgs& a) { a.rope.cos_sin.shape[0] = 1; }},
      {"write_layer: keys.k",
       [](WriteLayerArgs& a) { a.keys.k.shape[0] = a.keys.slots.shape[0] = a.keys.rope.positions.shape[0] = 3; }},
      {"write_layer: indices", [](WriteLayerArgs& a) { a.indices.dtype = DType::i64; }},
      {"write_index_keys: norm_bias", [](WriteLayerArgs& a) { a.keys.norm_bias = {}; }},
      {"write_latent: rope", [](WriteLayerArgs& a) { a.latent.rope = {}; }},
  };
  for (const auto& [where, mistake] : mistakes) {
    WriteLayerArgs args = problem.args(kv, index, ScaleRule::arbitrary, indices);
    mistake(args);
    try {
      write_layer(Backend::cpu(), args);
      ADD_FAILURE() << where;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(where), std::string::npos) << e.what();
    }
  }
  EXPECT_EQ(kv.bytes, before.bytes) << "a bad call wrote";
}

}  // namespace
}  // namespace sievemla::test
