// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/verify_test.cc -- the self-test: sound kernels pass, broken ones do not, a failing case can be replayed.
#include "cli/verify.h"

#include <gtest/gtest.h>

#include "api/kernel_lists.h"
#include "base/compare.h"
#include "base/view.h"
#include "cli/trace_files.h"
#include "model/trace.h"
#include "sievemla/indexer.h"
#include "support/workspace.h"

namespace sievemla::test {
namespace {

using cli::Verdict;
using cli::VerifyOptions;
using stage::attention::AttentionKernel;

VerifyOptions options(int cases) {
  VerifyOptions o;
  o.backends = {Backend::reference(), Backend::cpu({2, {}})};
  o.cases = cases;
  return o;
}

TEST(Verify, EveryHostKernelAgrees) {
  int steps = 0;
  VerifyOptions o = options(8);
  o.step = [&](std::string_view) { ++steps; };
  std::set<std::string> stages;
  for (const Verdict& verdict : cli::verify_all(o)) {
    stages.insert(verdict.stage);
    EXPECT_EQ(verdict.cases + verdict.unserved, 8) << verdict.kernel;
    EXPECT_GT(verdict.cases, 0) << verdict.kernel;
    EXPECT_TRUE(verdict.failures.empty()) << verdict.failures.front();
    EXPECT_LE(verdict.worst, 1) << verdict.kernel;
  }
  EXPECT_EQ(stages, (std::set<std::string>{"write", "indexer", "topk", "attention", "combine"}));
  int functions = 0;
  api::for_each_kernel_list([&](auto&&...) { ++functions; });
  EXPECT_EQ(steps, functions * 8);
}

const AttentionKernel& reference() {
  for (const AttentionKernel& kernel : stage::attention::attention_kernels())
    if (kernel.backend == BackendKind::reference) return kernel;
  throw std::logic_error("no reference");
}

// Known mistakes, as kernels.
void scale_off(const AttentionArgs& args, const base::Exec& exec) {
  AttentionArgs wrong = args;
  wrong.scale *= 1.01f;
  reference().run(wrong, exec);
}
void leaves_lse(const AttentionArgs& args, const base::Exec& exec) {
  AttentionArgs wrong = args;
  wrong.lse = {};
  reference().run(wrong, exec);
}
void lse_in_base_2(const AttentionArgs& args, const base::Exec& exec) {
  reference().run(args, exec);
  for (std::int64_t i = 0; i < args.lse.elements(); ++i) *(base::at<float>(args.lse, 0) + i) *= 1.442695f;
}
void forgets_the_sink(const AttentionArgs& args, const base::Exec& exec) {
  AttentionArgs wrong = args;
  wrong.sink = {};
  reference().run(wrong, exec);
}
void reads_past_topk_length(const AttentionArgs& args, const base::Exec& exec) {
  AttentionArgs wrong = args;
  if (auto* slots = std::get_if<Slots>(&wrong.rows)) slots->topk_length = {};
  reference().run(wrong, exec);
}

AttentionKernel broken(const char* name, void (*run)(const AttentionArgs&, const base::Exec&)) {
  return {name, BackendKind::cpu, "", nullptr, nullptr, run, reference().workspace_bytes};
}

TEST(Verify, CatchesBrokenKernels) {
  const std::pair<const char*, void (*)(const AttentionArgs&, const base::Exec&)> mistakes[] = {
      {"scale_off", scale_off},
      {"leaves_lse", leaves_lse},
      {"lse_in_base_2", lse_in_base_2},
      {"forgets_the_sink", forgets_the_sink},
      {"reads_past_topk_length", reads_past_topk_length},
  };
  for (const auto& [name, run] : mistakes) {
    const AttentionKernel kernels[] = {broken(name, run), reference()};
    const std::vector<Verdict> verdicts = cli::verify_attention(kernels, options(24));
    ASSERT_EQ(verdicts.size(), 1u);
    EXPECT_EQ(verdicts[0].kernel, name);
    EXPECT_FALSE(verdicts[0].failures.empty()) << name;
    EXPECT_GT(verdicts[0].worst, 1) << name;
    EXPECT_TRUE(verdicts[0].traces.empty());  // nobody asked for one
  }
}

// Right, but another result every time: within the bound, so the second run alone tells.
void drifts(const AttentionArgs& args, const base::Exec& exec) {
  static int calls = 0;
  reference().run(args, exec);
  const float nudge = 1 + static_cast<float>(++calls % 2) * 1e-6f;
  for (std::int64_t i = 0; i < args.lse.elements(); ++i) *(base::at<float>(args.lse, 0) + i) *= nudge;
}

TEST(Verify, ASecondCallHasTheSameBits) {
  const AttentionKernel kernels[] = {broken("drifts", drifts), reference()};
  const Verdict verdict = cli::verify_attention(kernels, options(24)).front();
  ASSERT_FALSE(verdict.failures.empty());
  EXPECT_NE(verdict.failures[0].find("same bits"), std::string::npos) << verdict.failures[0];
  EXPECT_LE(verdict.worst, 1);
}

TEST(Verify, BisectIsGoodOnTheHost) {
  const std::vector<Verdict> verdicts = cli::verify_bisect(options(6));
  ASSERT_EQ(verdicts.size(), 6u);
  for (const Verdict& verdict : verdicts) {
    EXPECT_EQ(verdict.cases, 6) << verdict.kernel;
    EXPECT_TRUE(verdict.failures.empty()) << verdict.failures.front();
    EXPECT_EQ(verdict.shares.size(), 6u);
  }
}

TEST(Verify, AKernelThatServesNothingIsNotJudged) {
  AttentionKernel none = broken("serves_nothing", scale_off);
  none.lacks = [](const AttentionArgs&) { return base::Lack("everything"); };
  AttentionKernel elsewhere = broken("not_here", scale_off);
  elsewhere.runs_here = [] { return false; };
  const AttentionKernel kernels[] = {none, elsewhere, reference()};
  const std::vector<Verdict> verdicts = cli::verify_attention(kernels, options(3));
  ASSERT_EQ(verdicts.size(), 1u);
  EXPECT_EQ(verdicts[0].unserved, 3);
  EXPECT_TRUE(verdicts[0].failures.empty());
}

// The failing case is written with what should have come out: a sound kernel passes it. Over some seeds the first
// failure is sparse and dense, in every row type.
TEST(Verify, AFailingCaseIsATrace) {
  std::set<KvFormat> formats;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const TempDir dir;
    VerifyOptions o = options(1);
    o.seed = seed;
    o.trace_dir = dir.path();
    const AttentionKernel kernels[] = {broken("lse_in_base_2", lse_in_base_2), reference()};
    const Verdict verdict = cli::verify_attention(kernels, o).front();
    if (verdict.failures.empty()) continue;  // a case in which nothing is selected
    EXPECT_NE(verdict.failures[0].find("--seed " + std::to_string(seed)), std::string::npos);
    ASSERT_EQ(verdict.traces.size(), 1u);
    const model::Trace trace = model::load_trace(verdict.traces[0]);
    const auto& call = std::get<model::SparseMlaTrace>(trace.call);
    ASSERT_EQ(call.caches.size(), 1u);
    formats.insert(call.caches[0].kv.format);

    const Outputs made = reference_outputs(call, call.caches[0]);
    const auto floats = [](const TensorView& v) {
      return std::span(base::at<float>(v, 0), static_cast<std::size_t>(v.elements()));
    };
    EXPECT_LE(base::relative_error(made.lse, floats(call.caches[0].lse)), 1e-6) << "seed " << seed;
    // A bf16 output is written as it was rounded.
    EXPECT_LE(base::relative_error(made.out, floats(call.caches[0].out)), 0x1p-8) << "seed " << seed;
  }
  EXPECT_GE(formats.size(), 3u);
}

// The same of index scores: paged and contiguous keys of every type come back as pages of one.
TEST(Verify, AFailingScoreIsATrace) {
  using stage::indexer::IndexScoresKernel;
  const auto all = stage::indexer::index_scores_kernels();
  const auto& reference = *std::find_if(
      all.begin(), all.end(), [](const IndexScoresKernel& kernel) { return kernel.backend == BackendKind::reference; });
  IndexScoresKernel wrong = reference;
  wrong.name = "no_weights", wrong.backend = BackendKind::cpu;
  wrong.run = [](const IndexScoreArgs& args, const base::Exec&) {
    for (std::int64_t i = 0; i < args.logits.elements(); ++i) *(base::at<float>(args.logits, 0) + i) = 1;
  };
  const IndexScoresKernel kernels[] = {wrong, reference};
  std::set<IndexFormat> formats;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const TempDir dir;
    VerifyOptions o = options(1);
    o.seed = seed;
    o.trace_dir = dir.path();
    const Verdict verdict = cli::verify_index_scores(kernels, o).front();
    ASSERT_EQ(verdict.traces.size(), 1u) << "seed " << seed;
    const model::Trace trace = model::load_trace(verdict.traces[0]);
    const auto& call = std::get<model::IndexerTrace>(trace.call);
    formats.insert(call.keys.format);

    std::vector<float> logits(static_cast<std::size_t>(call.logits.elements()));
    IndexScoreArgs args;
    args.q = call.q;
    args.weights = call.weights;
    args.paged = {call.keys, call.block_table, call.row_request};
    args.lengths = call.row_lens;
    args.logits = tensor(logits.data(), {call.logits.dim(0), call.logits.dim(1)});
    const Backend backend = Backend::reference();
    index_scores(
        backend, args,
        PoisonedWorkspace(index_scores_workspace_bytes(backend, {call.q.dim(0), call.q.dim(1), call.logits.dim(1)})));
    const std::span want(base::at<float>(call.logits, 0), logits.size());
    EXPECT_LE(base::relative_error(logits, want), 0) << "seed " << seed;
  }
  EXPECT_EQ(formats.size(), 3u);
}

}  // namespace
}  // namespace sievemla::test
