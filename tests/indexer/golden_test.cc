// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/golden_test.cc -- the scores of trace-indexer: fp8 pages, 32 heads, rows of 1 to 1024 keys, and one row
// where relu leaves hundreds of exact zeros.
#include <gtest/gtest.h>

#include "sievemla/indexer.h"
#include "sievemla/kv_cache.h"
#include "support/near.h"
#include "support/random.h"
#include "support/safetensors.h"
#include "support/workspace.h"

namespace sievemla::test {
namespace {

constexpr int kRows = 8, kHeads = 32, kPageSize = 64, kContext = 1024;

struct Trace {
  Safetensors file{"trace-indexer/trace.safetensors"};
  std::vector<std::uint8_t> q = file.values<std::uint8_t>("q"), pages = file.values<std::uint8_t>("k_pages");
  std::vector<float> weights = file.values<float>("weights"), logits = file.values<float>("logits");
  std::vector<std::int32_t> table = file.values<std::int32_t>("block_table"),
                            lengths = file.values<std::int32_t>("row_lens"),
                            row_request = file.values<std::int32_t>("row_request");

  IndexScoreArgs args() const {
    IndexScoreArgs a;
    a.q = tensor(q.data(), {kRows, kHeads, kIndexDim});
    a.weights = tensor(weights.data(), {kRows, kHeads});
    const std::int64_t page_bytes = kPageSize * kIndexKeyBytes;
    a.paged.cache.pages = tensor(pages.data(), {std::ssize(pages) / page_bytes, kPageSize, kIndexKeyBytes});
    a.paged.block_table = tensor(table.data(), {1, std::ssize(table)});
    a.paged.row_request = tensor(row_request.data(), {kRows});
    a.lengths = tensor(lengths.data(), {kRows});
    return a;
  }
};

std::vector<float> run(const Backend& backend, IndexScoreArgs a) {
  std::vector<float> logits(kRows * kContext, kNan);
  a.logits = tensor(logits.data(), {kRows, kContext});
  index_scores(backend, a, PoisonedWorkspace(index_scores_workspace_bytes(backend, {kRows, kHeads, kContext})));
  return logits;
}

// The trace is float64 rounded once. cpu: 128 + 32 roundings at most of terms that mostly do not cancel stay far below
// 1e-4 of the largest score.
struct Judge {
  Backend backend;
  double tolerance;
};
std::vector<Judge> judges() { return {{Backend::reference(), 1e-6}, {Backend::cpu(), 1e-4}}; }

TEST(Golden, TraceIndexerPaged) {
  const Trace trace;
  for (const Judge& judge : judges())
    EXPECT_LE(relative_error(run(judge.backend, trace.args()), trace.logits), judge.tolerance) << judge.backend.name();
}

TEST(Golden, TraceIndexerContiguous) {
  const Trace trace;
  IndexScoreArgs args = trace.args();
  std::vector<std::int64_t> slots;
  for (int j = 0; j < kContext; ++j) slots.push_back(trace.table[j / kPageSize] * kPageSize + j % kPageSize);
  std::vector<std::uint8_t> keys(kContext * kIndexDim);
  std::vector<float> scales(kContext);
  GatherIndexKeysArgs gather{args.paged.cache, tensor(slots.data(), {kContext}),
                             tensor(keys.data(), {kContext, kIndexDim}), tensor(scales.data(), {kContext})};
  gather_index_keys(Backend::reference(), gather);
  args.paged = {};
  args.contiguous.keys = gather.keys;
  args.contiguous.scales = gather.scales;
  for (const Judge& judge : judges())
    EXPECT_LE(relative_error(run(judge.backend, args), trace.logits), judge.tolerance) << judge.backend.name();
}

// The rows that see at most 577 keys, with every byte past those keys poisoned.
TEST(Golden, TraceIndexerPoisoned) {
  Trace trace;
  for (int& length : trace.lengths)
    if (length > 577) length = 0;
  for (int t = 0; t < kRows; ++t)
    std::fill(trace.logits.begin() + t * kContext + trace.lengths[t], trace.logits.begin() + (t + 1) * kContext, -kInf);
  for (int j = 577; j < kContext; ++j) {
    std::uint8_t* page = trace.pages.data() + std::int64_t{trace.table[j / kPageSize]} * kPageSize * kIndexKeyBytes;
    std::fill_n(page + j % kPageSize * kIndexDim, kIndexDim, std::uint8_t{0xFF});
    std::fill_n(page + kPageSize * kIndexDim + j % kPageSize * 4, 4, std::uint8_t{0xFF});
  }
  for (const Judge& judge : judges())
    EXPECT_LE(relative_error(run(judge.backend, trace.args()), trace.logits), judge.tolerance) << judge.backend.name();
}

}  // namespace
}  // namespace sievemla::test
