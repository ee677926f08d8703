// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/mistakes_test.cc -- each known mistake of this stage, made on purpose, is caught by the check of
// the formula (heads_test.cc, scores_test.cc) that passes without it.
#include <gtest/gtest.h>

#include "base/fault.h"
#include "indexer/head_problem.h"

namespace sievemla::test {
namespace {

using base::Fault;

struct Active {
  explicit Active(Fault fault) { base::active_fault = fault; }
  ~Active() { base::active_fault = Fault::none; }
};

testing::AssertionResult keys_agree(const Backend& backend, Fault fault) {
  const Active active(fault);
  const KeyProblem problem(5, RopeStyle::interleaved, DType::f32);
  const Buffer cache = problem.cache(IndexFormat::f32);
  write_index_keys(backend, problem.args(cache, IndexFormat::f32));
  return problem.agrees(cache, backend);
}

testing::AssertionResult queries_agree(const Backend& backend, Fault fault) {
  const Active active(fault);
  const QueryProblem problem(RopeStyle::half_split, DType::f32);
  const Buffer out(DType::f32, QueryProblem::kTokens * QueryProblem::kHeads * kIndexDim);
  std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads, kNan);
  index_queries(backend, problem.args(out, weights));
  return problem.agrees(out, weights, backend);
}

TEST(IndexerMistake, KeyNormWithoutMeanOrBias) {
  for (const Backend& backend : host_backends()) {
    EXPECT_TRUE(keys_agree(backend, Fault::none));
    EXPECT_FALSE(keys_agree(backend, Fault::k_norm_without_mean)) << backend.name();
    EXPECT_FALSE(keys_agree(backend, Fault::k_norm_without_bias)) << backend.name();
  }
}

TEST(IndexerMistake, RopeOnTheLast64) {
  for (const Backend& backend : host_backends()) {
    EXPECT_FALSE(keys_agree(backend, Fault::indexer_rope_last_64)) << backend.name();
    EXPECT_TRUE(queries_agree(backend, Fault::none));
    EXPECT_FALSE(queries_agree(backend, Fault::indexer_rope_last_64)) << backend.name();
  }
}

TEST(IndexerMistake, NoRelu) {
  const ScoreProblem problem({.lengths = {100, 40}, .heads = 3});
  for (const Backend& backend : host_backends()) {
    EXPECT_TRUE(problem.agrees(problem.run(backend), true)) << backend.name();
    const Active active(Fault::no_relu);
    EXPECT_FALSE(problem.agrees(problem.run(backend), true)) << backend.name();
  }
}

}  // namespace
}  // namespace sievemla::test
