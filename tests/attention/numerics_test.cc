// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/numerics_test.cc -- NaN, infinities and extreme scores: docs/numerics.md, line by line.
#include <gtest/gtest.h>

#include "support/attention_problem.h"
#include "support/backends.h"

namespace sievemla::test {
namespace {

// Rows are plain f32 whose first rope element is set by hand and is the score (`run`): it has no value, so that a row
// of any score still has finite values.
class Scores : public testing::Test {
 protected:
  Scores() {
    p_.format = KvFormat::f32;
    p_.heads = 4;
    p_.pages = 5;
  }
  void set_score(Problem::Cache& cache, std::int64_t slot, float score) {
    std::memcpy(cache.bytes.data() + (slot * 576 + 512) * 4, &score, sizeof score);
  }
  // All queries are 0 but for a 1 at the first rope element, and the scale is 1.
  Result run(const Backend& backend, const Problem::Cache& cache, const Problem::Tweak& tweak = {}) {
    std::vector<float> q(static_cast<std::size_t>(p_.heads * 576), 0.f);
    for (std::int64_t h = 0; h < p_.heads; ++h) q[static_cast<std::size_t>(h * 576 + 512)] = 1.f;
    return p_.run(backend, cache, [&](AttentionArgs& args) {
      args.q = tensor(q.data(), {1, p_.heads, 576});
      args.scale = 1.f;
      if (tweak) tweak(args);
    });
  }
  void fill(Problem::Cache& cache, std::int64_t n) {
    for (std::int64_t s = 0; s < n; ++s) {
      cache.fill(p_, s);
      set_score(cache, s, 0.f);
    }
  }
  static bool all_nan(std::span<const float> x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isnan(v); });
  }

  Problem p_;
};

// Longer than a chunk, so that what is empty or NaN may be a block, a chunk, or all.
constexpr std::int64_t kRows = 300;

TEST_F(Scores, MinusInfinityWeighsNothing) {
  std::vector<std::int64_t> all(kRows), kept;
  std::iota(all.begin(), all.end(), 0);
  Problem::Cache cache(p_);
  fill(cache, kRows);
  for (std::int64_t s = 0; s < kRows; ++s) {
    if (s % 3 == 0 || s < 70 || s > 260) set_score(cache, s, -kInf);  // also a whole block, and the whole last chunk
    else kept.push_back(s);
  }
  for (const Backend& backend : host_backends()) {
    p_.list({all});
    const Result with = run(backend, cache);
    p_.list({kept});
    const Result without = run(backend, cache);
    const double bound =
        bounds(p_, {{}, {}, std::log(static_cast<double>(kept.size())), 0, 0, kRows}, arithmetic_of(backend, p_))
                .out_relative_to_mass *
            0.25 +
        0x1p-24;
    for (std::size_t i = 0; i < with.out.size(); ++i) ASSERT_NEAR(with.out[i], without.out[i], bound) << backend.name();
    for (float lse : with.lse) EXPECT_NEAR(lse, std::log(static_cast<double>(kept.size())), 1e-6) << backend.name();
  }
}

TEST_F(Scores, NothingButMinusInfinityIsEmpty) {
  std::vector<std::int64_t> all(kRows);
  std::iota(all.begin(), all.end(), 0);
  Problem::Cache cache(p_);
  fill(cache, kRows);
  for (std::int64_t s : all) set_score(cache, s, -kInf);
  p_.list({all});
  for (const Backend& backend : host_backends())
    for (const bool sinks : {false, true}) {
      p_.sinks = sinks;
      const Result result = run(backend, cache);
      for (float lse : result.lse) EXPECT_EQ(lse, -kInf);
      for (float x : result.out) ASSERT_TRUE(x == 0 && !std::signbit(x));
    }
}

// One such score among finite ones, in the first block, in a later chunk, or all of them.
TEST_F(Scores, NanAndPlusInfinityGiveNan) {
  std::vector<std::int64_t> all(kRows);
  std::iota(all.begin(), all.end(), 0);
  p_.list({all});
  for (const float bad : {kNan, -kNan, kInf})
    for (const auto& [first, n] :
         {std::pair<std::int64_t, std::int64_t>{0, 1}, {63, 1}, {299, 1}, {0, kRows}, {256, 44}}) {
      Problem::Cache cache(p_);
      fill(cache, kRows);
      for (std::int64_t s = first; s < first + n; ++s) set_score(cache, s, bad);
      for (const Backend& backend : host_backends())
        for (const bool sinks : {false, true}) {
          p_.sinks = sinks;
          const Result result = run(backend, cache);
          EXPECT_TRUE(all_nan(result.out) && all_nan(result.lse)) << bad << " at " << first << ", " << backend.name();
        }
    }
}

// A NaN in one head's query, and a NaN row: nothing else is touched.
TEST_F(Scores, NanStaysInItsHeadAndToken) {
  p_.format = KvFormat::bf16;
  p_.tokens = 3;
  p_.list({{1, 2, 3}, {2, 9, 4}, {5, 6, 7}});
  for (const Backend& backend : host_backends()) {
    Problem::Cache cache(p_);
    for (std::int64_t s : {1, 2, 3, 4, 5, 6, 7}) cache.fill(p_, s);  // 9 is poison
    const Result result = p_.run(backend, cache);
    for (std::int64_t cell = 0; cell < 12; ++cell) {
      const bool bad = cell / 4 == 1;
      EXPECT_EQ(all_nan(result.row(cell, 512)), bad);
      EXPECT_EQ(std::isnan(result.lse[Problem::at(cell)]), bad);
    }
    p_.list({{1, 2, 3}, {2, 4, 4}, {5, 6, 7}});
    std::vector<float> q(3 * 4 * 576, 0.5f);
    q[5 * 576 + 575] = kNan;  // token 1, head 1, the last rope element
    const Result one = p_.run(backend, cache, [&](AttentionArgs& args) { args.q = tensor(q.data(), {3, 4, 576}); });
    for (std::int64_t cell = 0; cell < 12; ++cell) EXPECT_EQ(all_nan(one.row(cell, 512)), cell == 5);
    p_.list({{1, 2, 3}, {2, 9, 4}, {5, 6, 7}});
  }
}

// Of four tokens of a request, two see the row that is NaN: the others' rows are the same but for their last ones.
TEST_F(Scores, NanStaysInTheTokensThatSeeIt) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::fp8_ds_mla}) {
    p_.format = format, p_.tokens = 4;
    p_.table = {2, 0, 4, 1}, p_.table_width = 4, p_.lengths = {200};
    Problem::Cache cache(p_);
    for (const std::int64_t s : p_.live(3)) cache.fill(p_, s);
    const Result clean = [&] {
      Problem alone = p_;  // the two as a request of their own
      alone.tokens = 2, alone.lengths = {198};
      return alone.run(Backend::reference(), cache);
    }();
    const std::int64_t slot = p_.live(3)[198], bytes = static_cast<std::int64_t>(cache.bytes.size()) / p_.slots();
    std::memset(cache.bytes.data() + slot * bytes, 0xFF, static_cast<std::size_t>(bytes));
    for (const Backend& backend : host_backends()) {
      const Result result = p_.run(backend, cache);
      for (std::int64_t cell = 0; cell < 16; ++cell) {
        const bool bad = cell >= 8;
        EXPECT_EQ(all_nan(result.row(cell, 512)), bad) << backend.name() << ", cell " << cell;
        EXPECT_EQ(std::isnan(result.lse[Problem::at(cell)]), bad);
        for (std::int64_t d = 0; d < 512 && !bad; ++d)
          ASSERT_NEAR(result.row(cell, 512)[Problem::at(d)], clean.row(cell, 512)[Problem::at(d)], 0.02);
      }
    }
  }
}

// e4m3 NaN codes and NaN scales of selected rows, in any group.
TEST_F(Scores, NanInPackedRows) {
  p_.format = KvFormat::fp8_ds_mla;
  p_.list({{0, 1, 2}});
  for (const Backend& backend : host_backends())
    for (const std::size_t byte : {0u, 511u, 130u}) {
      Problem::Cache cache(p_);
      for (std::int64_t s : {0, 1, 2}) cache.fill(p_, s);
      cache.bytes[656 + byte] = std::byte{0x7F};
      const Result result = p_.run(backend, cache);
      EXPECT_TRUE(all_nan(result.out) && all_nan(result.lse));
    }
}

// Scores far from 0 and far from one another neither overflow nor vanish: only differences matter.
TEST_F(Scores, LargeScores) {
  std::vector<std::int64_t> all(kRows);
  std::iota(all.begin(), all.end(), 0);
  p_.list({all});
  for (const float offset : {0.f, 1e6f, -1e6f, 1e30f, -1e30f})
    for (const float step : {0.f, 200.f}) {  // exp(-200) is no f32
      Problem::Cache cache(p_);
      fill(cache, kRows);
      for (std::int64_t s = 0; s < kRows; ++s) set_score(cache, s, offset - (s == 170 ? 0.f : step));
      for (const Backend& backend : host_backends()) {
        const Result result = run(backend, cache);
        const bool peaked = step > 0 && std::abs(offset) < 1e20f;  // 200 is lost in 1e30
        const double rows = peaked ? 1 : kRows;
        for (float lse : result.lse)
          EXPECT_NEAR(lse, static_cast<double>(offset) + std::log(rows), std::abs(offset) * 0x1p-23 + 1e-5);
        if (!peaked) continue;
        const std::vector<float> value = p_.row(170);
        for (std::size_t d = 0; d < 512; ++d) ASSERT_NEAR(result.out[d], value[d], std::abs(value[d]) * 0x1p-22);
      }
    }
}

}  // namespace
}  // namespace sievemla::test
