// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/mistakes_test.cc -- each known mistake of this stage, made on purpose, changes what both backends
// answer by far more than any tolerance used elsewhere.
#include <gtest/gtest.h>

#include "base/fault.h"
#include "indexer/problem.h"

namespace sievemla::test {
namespace {

using base::Fault;

struct Active {
  explicit Active(Fault fault) { base::active_fault = fault; }
  ~Active() { base::active_fault = Fault::none; }
};

std::vector<float> key_of(const Backend& backend, Fault fault) {
  const Active active(fault);
  Random random(5);
  std::vector<float> k = random.f32s(kIndexDim), weight = random.f32s(kIndexDim), bias = random.f32s(kIndexDim),
                     table(kIndexRope, 0.6f), out(kIndexDim, kNan);
  for (float& x : k) x += 0.5f;
  const std::int32_t position = 0, slot = 0;
  WriteIndexKeysArgs args;
  args.k = tensor(k.data(), {1, kIndexDim});
  args.norm_weight = tensor(weight.data(), {kIndexDim});
  args.norm_bias = tensor(bias.data(), {kIndexDim});
  args.rope = {RopeStyle::interleaved, tensor(&position, {1}), tensor(table.data(), {1, kIndexRope})};
  args.slots = tensor(&slot, {1});
  args.cache = {IndexFormat::f32, tensor(out.data(), {1, 1, kIndexDim})};
  write_index_keys(backend, args);
  return out;
}

std::vector<float> query_of(const Backend& backend, Fault fault) {
  const Active active(fault);
  const std::vector<float> q = Random(6).f32s(kIndexDim), table(kIndexRope, 0.6f);
  const float weight = 1;
  const std::int32_t position = 0;
  std::vector<float> out(kIndexDim, kNan), out_weight(1, kNan);
  IndexQueryArgs args;
  args.q = tensor(q.data(), {1, 1, kIndexDim});
  args.weights = tensor(&weight, {1, 1});
  args.weight_scale = 1;
  args.rope = {RopeStyle::half_split, tensor(&position, {1}), tensor(table.data(), {1, kIndexRope})};
  args.out_q = tensor(out.data(), {1, 1, kIndexDim});
  args.out_weights = tensor(out_weight.data(), {1, 1});
  index_queries(backend, args);
  return out;
}

TEST(IndexerMistake, KeyNormWithoutMeanOrBias) {
  for (const Backend& backend : host_backends())
    for (Fault fault : {Fault::k_norm_without_mean, Fault::k_norm_without_bias})
      EXPECT_GT(relative_error(key_of(backend, fault), key_of(backend, Fault::none)), 0.1) << backend.name();
}

TEST(IndexerMistake, RopeOnTheLast64) {
  for (const Backend& backend : host_backends()) {
    const Fault fault = Fault::indexer_rope_last_64;
    EXPECT_GT(relative_error(key_of(backend, fault), key_of(backend, Fault::none)), 0.1) << backend.name();
    EXPECT_GT(relative_error(query_of(backend, fault), query_of(backend, Fault::none)), 0.1) << backend.name();
  }
}

TEST(IndexerMistake, NoRelu) {
  const ScoreProblem problem({.lengths = {100, 40}, .heads = 3});
  for (const Backend& backend : host_backends()) {
    const std::vector<float> right = problem.run(backend);
    const Active active(Fault::no_relu);
    EXPECT_GT(relative_error(problem.run(backend), right), 0.1) << backend.name();
    EXPECT_FALSE(problem.agrees(problem.run(backend), true)) << backend.name();
  }
}

}  // namespace
}  // namespace sievemla::test
