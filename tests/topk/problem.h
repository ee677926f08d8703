// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/problem.h -- rows of scores laid out so that a read outside a row changes the answer, the answer by brute
// force, and every backend that has to give it.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "sievemla/topk.h"
#include "support/backends.h"
#include "support/guard.h"
#include "support/random.h"
#include "support/workspace.h"

namespace sievemla::test {

using Scores = std::vector<float>;
using Ids = std::vector<std::int32_t>;
inline constexpr std::int32_t kUnwritten = 0x5A5A5A5A;

inline constexpr std::initializer_list<int> kThreads = {1, 2, 7};

// The definition, another way than any kernel: a stable sort by value, in double.
inline Ids brute_force(const Scores& scores, std::int64_t k) {
  auto value = [&](std::int32_t p) {
    const double x = scores[static_cast<std::size_t>(p)];
    return std::isnan(x) ? -HUGE_VAL : x;
  };
  Ids ids(scores.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) { return value(a) > value(b); });
  ids.resize(std::min(ids.size(), static_cast<std::size_t>(k)));
  std::sort(ids.begin(), ids.end());
  ids.resize(static_cast<std::size_t>(k), -1);
  return ids;
}

// Rows of any lengths, each at a start of its own in a matrix that is +inf elsewhere: a column read in error would win.
// Without starts: each at a multiple of 16 bytes, in a matrix no wider than the longest.
enum class Starts { drawn, none };
class TopkProblem {
 public:
  explicit TopkProblem(std::vector<Scores> rows, std::uint64_t seed = 1, Starts starts = Starts::drawn)
      : rows_(std::move(rows)), drawn_(starts == Starts::drawn) {
    Random random(seed);
    std::size_t longest = 0;
    for (const Scores& row : rows_) longest = std::max(longest, row.size());
    width_ = static_cast<std::int64_t>(longest) + (drawn_ ? 9 : 0);
    stride_ = drawn_ ? width_ + 5 : (width_ + 7) / 4 * 4;
    matrix_.assign(rows_.size() * static_cast<std::size_t>(stride_), kInf);
    for (std::size_t t = 0; t < rows_.size(); ++t) {
      const std::int64_t start = drawn_ ? random.below(width_ - static_cast<std::int64_t>(rows_[t].size()) + 1) : 0;
      starts_.push_back(static_cast<std::int32_t>(start));
      lengths_.push_back(static_cast<std::int32_t>(rows_[t].size()));
      std::copy(rows_[t].begin(), rows_[t].end(),
                matrix_.begin() + static_cast<std::int64_t>(t) * stride_ + static_cast<std::int64_t>(start));
    }
  }

  std::int64_t rows() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t width() const { return width_; }

  TopkArgs args() const {
    TopkArgs args;
    args.scores = tensor(matrix_.data(), {rows(), width_});
    args.scores.stride[0] = stride_;
    if (drawn_) args.starts = tensor(starts_.data(), {rows()});
    args.lengths = tensor(lengths_.data(), {rows()});
    return args;
  }

  // [rows * k] positions.
  Ids select(const Backend& backend, std::int64_t k) const {
    Guarded<std::int32_t> positions(rows() * k, kUnwritten);
    TopkArgs call = args();
    call.positions = tensor(positions.data(), {rows(), k});
    topk(backend, call, PoisonedWorkspace(topk_workspace_bytes(backend, {rows(), width_, k})));
    EXPECT_TRUE(positions.intact());
    return {positions.begin(), positions.end()};
  }

  Ids expected(std::int64_t k) const {
    Ids all;
    for (const Scores& row : rows_) {
      const Ids ids = brute_force(row, k);
      all.insert(all.end(), ids.begin(), ids.end());
    }
    return all;
  }

  // Every backend gives the answer.
  void check(std::int64_t k) const {
    const Ids want = expected(k);
    for (const Backend& backend : host_backends(kThreads))
      EXPECT_EQ(select(backend, k), want) << backend.name() << ", " << backend.threads() << " threads, k = " << k;
  }

 private:
  std::vector<Scores> rows_;
  bool drawn_;
  std::int64_t width_ = 0, stride_ = 0;
  std::vector<float> matrix_;
  Ids starts_, lengths_;
};

}  // namespace sievemla::test
