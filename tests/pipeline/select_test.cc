// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/pipeline/select_test.cc -- scoring and selecting in chunks: the result depends neither on the byte budget nor on
// how rows are dealt to requests.
#include <gtest/gtest.h>

#include "pipeline/layer_problem.h"
#include "sievemla/error.h"
#include "support/property.h"

namespace sievemla::test {
namespace {

// Rows of f32 keys, paged or side by side.
struct SelectProblem {
  static constexpr std::int64_t kHeads = 2, kPage = 16, kPages = 7, kWidth = kPage * kPages;

  SelectProblem(std::int64_t requests_, std::int64_t per, std::int64_t k_, std::uint64_t seed)
      : requests(requests_), rows(requests_ * per), k(k_) {
    Random random(seed);
    q = random.f32s(rows * kHeads * kIndexDim);
    weights = random.f32s(rows * kHeads);
    keys = random.f32s((requests * kPages + 2) * kPage * kIndexDim);
    for (std::int64_t page : random.distinct(requests * kPages, requests * kPages + 2))
      table.push_back(static_cast<std::int32_t>(page));
    for (std::int64_t t = 0; t < rows; ++t) {
      lengths.push_back(static_cast<std::int32_t>(random.below(kWidth + 3) - 2));
      starts.push_back(static_cast<std::int32_t>(random.below(kPage)));
      request.push_back(static_cast<std::int32_t>(t / per));
    }
    positions.assign(static_cast<std::size_t>(rows * k), kUnwritten);
    slots.assign(static_cast<std::size_t>(rows * k), kUnwritten);
  }
  SelectProblem(const SelectProblem&) = delete;

  enum class Keys { paged, contiguous };
  SelectArgs args(Keys source, bool named_requests) {
    SelectArgs a;
    a.score.q = tensor(q.data(), {rows, kHeads, kIndexDim});
    a.score.weights = tensor(weights.data(), {rows, kHeads});
    const TensorView named = named_requests ? tensor(request.data(), {rows}) : TensorView{};
    if (source == Keys::paged) {
      a.score.paged.cache = {IndexFormat::f32, tensor(keys.data(), {requests * kPages + 2, kPage, kIndexDim})};
      a.score.paged.block_table = tensor(table.data(), {requests, kPages});
      a.score.paged.row_request = named;
    } else {
      a.score.contiguous.keys = tensor(keys.data(), {(requests * kPages + 2) * kPage, kIndexDim});
      a.score.contiguous.starts = tensor(starts.data(), {rows});
    }
    a.score.lengths = tensor(lengths.data(), {rows});
    a.width = kWidth;
    a.positions = tensor(positions.data(), {rows, k});
    a.slots = tensor(slots.data(), {rows, k});
    a.map = {tensor(table.data(), {requests, kPages}), named, kPage, {}};
    return a;
  }
  void run(const Backend& backend, const SelectArgs& a) {
    std::fill(positions.begin(), positions.end(), kUnwritten);
    std::fill(slots.begin(), slots.end(), kUnwritten);
    select(backend, a,
           PoisonedWorkspace(select_workspace_bytes(backend, {rows, kHeads, kWidth, k, a.score_budget_bytes})));
  }
  // index_scores, then topk, over all rows.
  void run_by_hand(const Backend& backend, const SelectArgs& a) {
    std::vector<float> logits(static_cast<std::size_t>(rows * kWidth), kNan);
    IndexScoreArgs score = a.score;
    score.logits = tensor(logits.data(), {rows, kWidth});
    index_scores(backend, score, PoisonedWorkspace(index_scores_workspace_bytes(backend, {rows, kHeads, kWidth})));
    topk(backend, {score.logits, {}, score.lengths, a.positions, a.slots, a.map},
         PoisonedWorkspace(topk_workspace_bytes(backend, {rows, kWidth, k})));
  }

  std::int64_t requests, rows, k;
  std::vector<float> q, weights, keys;
  Ids table, lengths, starts, request, positions, slots;
};
using Keys = SelectProblem::Keys;

TEST(Select, DoesNotDependOnTheBudget) {
  constexpr std::int64_t kRow = SelectProblem::kWidth * 4;
  SelectProblem p(3, 4, 10, 1);
  for (const Backend& backend : host_backends())
    for (Keys keys : {Keys::paged, Keys::contiguous})
      for (bool named : {false, true}) {
        SelectArgs args = p.args(keys, named);
        p.run_by_hand(backend, args);
        const Ids positions = p.positions, slots = p.slots;
        // One row at a time; part of a request; a request; one and a half; two; all.
        for (std::int64_t budget :
             {std::int64_t{0}, kRow - 1, 3 * kRow, 4 * kRow, 6 * kRow + 3, 8 * kRow, 100 * kRow}) {
          args.score_budget_bytes = budget;
          p.run(backend, args);
          EXPECT_EQ(p.positions, positions) << backend.name() << ", budget " << budget << ", named " << named;
          EXPECT_EQ(p.slots, slots) << backend.name() << ", budget " << budget << ", named " << named;
        }
      }
}

TEST(Select, RowsDealtEvenlyAreRowsNamedInOrder) {
  SelectProblem p(4, 3, 12, 2);
  for (const Backend& backend : host_backends())
    for (std::int64_t budget : {std::int64_t{0}, 2 * SelectProblem::kWidth * 4, 5 * SelectProblem::kWidth * 4}) {
      SelectArgs args = p.args(Keys::paged, true);
      args.score_budget_bytes = budget;
      p.run(backend, args);
      const Ids slots = p.slots;
      args = p.args(Keys::paged, false);
      args.score_budget_bytes = budget;
      p.run(backend, args);
      EXPECT_EQ(p.slots, slots);
      args = p.args(Keys::paged, true);  // one of the two maps alone may name its requests
      args.map.row_request = {};
      args.score_budget_bytes = budget;
      p.run(backend, args);
      EXPECT_EQ(p.slots, slots);
    }
}

RC_GTEST_PROP(SelectProperty, AnyBudgetAndAnyShape, ()) {
  const auto requests = *rc::gen::inRange<std::int64_t>(0, 5), per = *rc::gen::inRange<std::int64_t>(1, 6);
  const auto k = *rc::gen::inRange<std::int64_t>(0, 130), rows_kept = *rc::gen::inRange<std::int64_t>(0, 30);
  const bool named = *rc::gen::arbitrary<bool>(), paged = *rc::gen::arbitrary<bool>();
  SelectProblem p(requests, per, k, *rc::gen::arbitrary<std::uint64_t>());
  SelectArgs args = p.args(paged ? Keys::paged : Keys::contiguous, named);
  args.score_budget_bytes = rows_kept * SelectProblem::kWidth * 4 + 1;
  const Backend backend = Backend::cpu({2, {}});
  p.run_by_hand(backend, args);
  const Ids positions = p.positions, slots = p.slots;
  p.run(backend, args);
  RC_ASSERT(p.positions == positions);
  RC_ASSERT(p.slots == slots);
}

// A workspace asked for with larger bounds serves every smaller call.
TEST(Select, WorkspaceGrowsWithEveryBound) {
  for (const Backend& backend : host_backends())
    for (std::int64_t budget : {0, 1000, 100000}) {
      const SelectBounds most{13, 4, 200, 70, budget};
      const std::int64_t enough = select_workspace_bytes(backend, most);
      for (std::int64_t rows : {0, 1, 7, 13})
        for (std::int64_t width : {0, 1, 33, 100, 187, 200})
          for (std::int64_t k : {0, 1, 70})
            EXPECT_LE(select_workspace_bytes(backend, {rows, 4, width, k, budget}), enough);
    }
  // The budget bounds the scores: 64 MiB, whatever the context.
  const Backend cpu = Backend::cpu({1, {}});
  const std::int64_t stages = std::max(index_scores_workspace_bytes(cpu, {4096, 64, 1 << 20}),
                                       topk_workspace_bytes(cpu, {4096, 1 << 20, 2048}));
  EXPECT_LE(select_workspace_bytes(cpu, {4096, 64, 1 << 20, 2048}), stages + kWorkspaceAlign + kScoreBudgetBytes);
}

TEST(BadArgument, Select) {
  struct Bad {
    const char* words;
    void (*break_it)(SelectArgs&);
  };
  const Bad bads[] = {
      {"logits must be absent", [](SelectArgs& a) { a.score.logits = a.score.weights; }},
      {"budget must not be negative", [](SelectArgs& a) { a.score_budget_bytes = -1; }},
      {"positions or slots", [](SelectArgs& a) { a.positions = a.slots = {}; }},
      {"must not be negative", [](SelectArgs& a) { a.width = -1; }},
      {"length must not exceed the width", [](SelectArgs& a) { a.width = 4; }},
      {"index_scores: q", [](SelectArgs& a) { a.score.q = {}; }},
      {"exactly one of paged and contiguous", [](SelectArgs& a) { a.score.paged = {}; }},
      {"topk: positions", [](SelectArgs& a) { a.positions.dtype = DType::i64; }},
      {"same requests",
       [](SelectArgs& a) {
         a.map.block_table.shape = {1, 4};
       }},
  };
  for (const Backend& backend : host_backends())
    for (const Bad& bad : bads) {
      SelectProblem p(2, 3, 5, 3);
      p.lengths[5] = 9;
      SelectArgs args = p.args(Keys::paged, false);
      bad.break_it(args);
      const PoisonedWorkspace workspace(select_workspace_bytes(backend, {6, 2, SelectProblem::kWidth, 5}));
      try {
        select(backend, args, workspace);
        ADD_FAILURE() << bad.words << " was accepted";
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find(bad.words), std::string::npos) << error.what();
      }
      EXPECT_EQ(p.positions, Ids(p.positions.size(), kUnwritten));
      EXPECT_EQ(p.slots, Ids(p.slots.size(), kUnwritten));
    }
  SelectProblem p(2, 3, 5, 3);
  const Backend cpu = Backend::cpu({1, {}});
  const PoisonedWorkspace workspace(select_workspace_bytes(cpu, {6, 2, SelectProblem::kWidth, 5}));
  Workspace small = workspace;
  --small.bytes;
  EXPECT_THROW(select(cpu, p.args(Keys::paged, false), small), InvalidArgument);
  EXPECT_EQ(p.slots, Ids(p.slots.size(), kUnwritten));
}

}  // namespace
}  // namespace sievemla::test
