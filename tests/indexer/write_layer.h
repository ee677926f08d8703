// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/write_layer.h -- a seeded call of write_layer, beside the separate steps that it stands for.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "indexer/head_problem.h"
#include "sievemla/kv_cache.h"
#include "sievemla/pipeline.h"

namespace sievemla::test {

template <class T>
struct WriteLayer {
  static constexpr int kTokens = 24, kLatent = 512, kIndexRows = 30, kTopk = 77;
  static constexpr float kEps = 1e-5f;
  static constexpr DType kInput = sizeof(T) == 2 ? DType::bf16 : DType::f32;
  RopeStyle style;
  int rope_width;
  KvFormat format;
  KeyProblem keys;
  std::vector<T> latent, rope, normalised, rotated;
  std::vector<float> weight;
  std::vector<std::int64_t> slots;

  WriteLayer(RopeStyle rope_style, KvFormat kv, int rope_values)
      : style(rope_values > 0 ? rope_style : RopeStyle::none),
        rope_width(rope_values),
        format(kv),
        keys(kTokens, rope_style, kInput),
        weight(Random(5).f32s(kLatent)) {
    Random random(6);
    for (int t = 0; t < kTokens; ++t)
      for (int i = 0; i < kLatent; ++i)  // of all sizes, and larger than its square root's inverse
        latent.push_back(base::round_to<T>(random.uniform_f32(1.f) * std::exp2(static_cast<float>(t % 9) * 3 - 12)));
    for (int i = 0; i < kTokens * rope_width; ++i) rope.push_back(base::round_to<T>(random.uniform_f32(2.f)));
    latent[2 * kLatent + 130] = base::round_to<T>(std::numeric_limits<float>::quiet_NaN());
    for (int i = 0; i < kLatent; ++i) latent[static_cast<std::size_t>(3 * kLatent + i)] = base::round_to<T>(0.f);
    for (const std::int64_t slot : random.distinct(kTokens, 2 * kTokens)) slots.push_back(slot);
    slots[7] = -1, keys.slots[7] = -1;
    keys.slots[9] = -1;  // its latent is written all the same
    for (int t = 0; t < kTokens; ++t) add_steps(t);
  }

  Buffer kv_cache() const { return Buffer(storage(), kTokens / 8 * 16 * row()); }
  WriteLatentArgs separate(const Buffer& cache, ScaleRule rule) const {
    return latent_args(normalised, rotated, cache, rule);
  }
  WriteIndexKeysArgs key_args(const Buffer& cache, ScaleRule rule) const {
    WriteIndexKeysArgs a = keys.args(cache, IndexFormat::fp8);
    a.scale = rule, a.hadamard = rule == ScaleRule::arbitrary, a.round_bf16 = kInput == DType::bf16;
    return a;
  }
  WriteLayerArgs args(const Buffer& kv, const Buffer& index, ScaleRule rule, std::vector<std::int32_t>& indices) const {
    WriteLayerArgs a;
    a.latent = latent_args(latent, rope, kv, rule);
    a.latent_weight = tensor(weight.data(), {kLatent}), a.latent_eps = kEps;
    a.rope = keys.rope(), a.rope.style = style;
    a.keys = key_args(index, rule);
    a.indices = tensor(indices.data(), {kIndexRows, kTopk}), a.indices.stride[0] = kTopk + 2;
    return a;
  }
  static std::vector<std::int32_t> indices() { return std::vector<std::int32_t>(kIndexRows * (kTopk + 2), 5); }
  static testing::AssertionResult filled(const std::vector<std::int32_t>& indices) {
    for (std::size_t i = 0; i < indices.size(); ++i)
      if (indices[i] != (i % (kTopk + 2) < kTopk ? -1 : 5)) return testing::AssertionFailure() << i;
    return testing::AssertionSuccess();
  }

 private:
  DType storage() const { return info(format).storage; }
  std::int64_t row() const { return info(format).row_bytes(kLatent, rope_width) / size_of(storage()); }
  WriteLatentArgs latent_args(const std::vector<T>& x, const std::vector<T>& r, const Buffer& cache,
                              ScaleRule rule) const {
    WriteLatentArgs a;
    a.latent = tensor(x.data(), {kTokens, kLatent});
    if (rope_width > 0) a.rope = tensor(r.data(), {kTokens, rope_width});
    a.slots = tensor(slots.data(), {kTokens});
    a.cache = {format, kLatent, rope_width, cache.view({kTokens / 8, 16, row()})};
    a.scale = rule;
    return a;
  }
  // RMSNorm and rope of a token, rounded to T.
  void add_steps(int t) {
    const auto value = [](T x) { return static_cast<double>(base::to_f32(x)); };
    double mean = 0;
    for (int i = 0; i < kLatent; ++i)
      mean += std::pow(value(latent[static_cast<std::size_t>(t * kLatent + i)]), 2) / kLatent;
    for (int i = 0; i < kLatent; ++i)
      normalised.push_back(base::round_to<T>(value(latent[static_cast<std::size_t>(t * kLatent + i)]) /
                                             std::sqrt(mean + static_cast<double>(kEps)) *
                                             static_cast<double>(weight[static_cast<std::size_t>(i)])));
    std::vector<double> x;
    for (int i = 0; i < rope_width; ++i) x.push_back(value(rope[static_cast<std::size_t>(t * rope_width + i)]));
    for (const double turned :
         roped(x, style, keys.table.data() + keys.positions[static_cast<std::size_t>(t)] * kIndexRope))
      rotated.push_back(base::round_to<T>(turned));
  }
};

// f(problem, rule) for the formats, styles and dtypes that engines have.
template <class F>
void for_each_write_layer(F&& f) {
  const auto all = [&](auto type) {
    using T = decltype(type);
    for (const RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none})
      for (const auto& [format, rope] :
           {std::pair{KvFormat::bf16, 64}, {KvFormat::bf16, 0}, {KvFormat::fp8_ds_mla, 64}, {KvFormat::fp8_nope, 0}})
        for (const ScaleRule rule : {ScaleRule::arbitrary, ScaleRule::power_of_two, ScaleRule::engine}) {
          SCOPED_TRACE(testing::Message() << name_of(style) << ", " << info(format).name << ", rope " << rope);
          f(WriteLayer<T>(style, format, rope), rule);
        }
  };
  all(float{}), all(bf16{});
}

}  // namespace sievemla::test
