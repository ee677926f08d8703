// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/layouts_test.cc -- row types, dtypes, strides, lengths and sources of rows.
#include <gtest/gtest.h>

#include <array>

#include "support/attention_problem.h"
#include "support/backends.h"
#include "support/near.h"

namespace sievemla::test {
namespace {

TEST(Attention, EveryRowType) {
  for (const Backend& backend : host_backends())
    for (const KvFormatInfo& format : kv_formats()) {
      SCOPED_TRACE(format.name);
      Problem p{
          .tokens = 3, .heads = 5, .format = format.format, .rope = format.rope < 0 ? 64 : format.rope, .pages = 6};
      p.random_list(300, 280);
      EXPECT_TRUE(solved(p, backend, /*step=*/4));
      p.row_padding = 48, p.page_padding = 80;
      EXPECT_TRUE(solved(p, backend, /*step=*/4));
    }
}

TEST(Attention, EveryWidthOfPlainRows) {
  for (const Backend& backend : host_backends())
    for (const auto& [latent, rope] : {std::pair{1, 0}, {7, 1}, {96, 16}, {256, 32}, {640, 128}}) {
      SCOPED_TRACE(latent);
      Problem p{.tokens = 2, .heads = 3, .format = KvFormat::f32, .latent = latent, .rope = rope};
      p.q_dtype = DType::f32;
      p.random_list(100, 90);
      EXPECT_TRUE(solved(p, backend));
    }
}

// q as one tensor or as (nope, rope), the nope part a transposed view of [heads, tokens, 512]; bf16 or f32: same bits,
// since the values are the same.
TEST(Attention, QueriesInEveryLayout) {
  for (const Backend& backend : host_backends()) {
    Problem p{.tokens = 3, .heads = 6};
    p.random_list(70, 66);
    ASSERT_TRUE(solved(p, backend));
    const Result packed = p.run(backend);
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const bool split : {false, true}) {
        p.q_dtype = dtype, p.split_q = split;
        EXPECT_TRUE(same_bits(p.run(backend), packed)) << name_of(dtype) << ", split " << split;
      }
  }
}

// A bf16 output is the f32 output rounded (on the reference: the double, whose rounding the bound of `solved` covers).
TEST(Attention, OutputsInBf16) {
  for (const Backend& backend : host_backends()) {
    Problem p{.tokens = 3, .heads = 6, .sinks = true};
    p.random_list(70, 66);
    const Result f32 = p.run(backend);
    p.out_dtype = DType::bf16;
    EXPECT_TRUE(solved(p, backend));
    const Result rounded = p.run(backend);
    EXPECT_TRUE(same_bits(rounded.lse, f32.lse));
    for (std::size_t i = 0; i < f32.out.size(); ++i)
      ASSERT_NEAR(rounded.out[i], f32.out[i], std::abs(f32.out[i]) * (0x1p-8 + 0x1p-23)) << i;
    // What every backend has to meet, in bf16: 8e-3 of the value, and 2e-3 of max(1, sum p |v|).
    EXPECT_TRUE(near(rounded.out, p.run(Backend::reference()).out, 8e-3, 2e-3));
  }
}

TEST(Attention, OutputsInStridedMemory) {
  for (const Backend& backend : host_backends())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Problem p{.tokens = 3, .heads = 4, .out_dtype = dtype};
      p.random_list(70, 66);
      const Result want = p.run(backend);
      constexpr std::int64_t kColumns = 515, kRows = 6;  // rows and heads lie apart, heads before tokens
      std::vector<float> lse(static_cast<std::size_t>(4 * kRows), 7.f);
      std::vector<float> out32(static_cast<std::size_t>(4 * kRows * kColumns), 7.f);
      std::vector<bf16> out16(out32.size(), base::to_bf16(7.f));
      TensorView out = dtype == DType::f32 ? tensor(out32.data(), {3, 4, 512}) : tensor(out16.data(), {3, 4, 512});
      out.stride = {kColumns, kRows * kColumns, 1};
      TensorView lse_view = tensor(lse.data(), {3, 4});
      lse_view.stride = {1, kRows};
      p.run(backend, [&](AttentionArgs& args) { args.out = out, args.lse = lse_view; });
      EXPECT_TRUE(same_bits(values(out), want.out));
      EXPECT_TRUE(same_bits(values(lse_view), want.lse));
      const auto outside = [](const auto& v) {
        return std::count_if(v.begin(), v.end(), [](auto x) { return base::to_f32(x) == 7.f; });
      };
      EXPECT_EQ(outside(lse), 4 * kRows - 3 * 4);
      EXPECT_EQ(dtype == DType::f32 ? outside(out32) : outside(out16), 4 * kRows * kColumns - 3 * 4 * 512);
    }
}

TEST(Attention, LseIsOptional) {
  for (const Backend& backend : host_backends()) {
    Problem p{.tokens = 2};
    p.random_list(70, 66);
    const Result with = p.run(backend);
    EXPECT_TRUE(same_bits(p.run(backend, [](AttentionArgs& args) { args.lse = {}; }).out, with.out));
  }
}

// [tokens, topk] and [requests, q_len, topk], narrow views of wider tensors whose other columns name a poisoned row.
TEST(Attention, SlotListsOfEveryStride) {
  constexpr std::int64_t kPoisoned = 100;
  const auto run = [](const Problem& p, const Backend& backend, std::vector<std::int64_t> numbers, bool wide,
                      std::initializer_list<std::int64_t> shape, std::array<std::int64_t, 4> stride) {
    const std::vector<std::int32_t> narrow(numbers.begin(), numbers.end());
    TensorView indices = wide ? tensor(numbers.data(), shape) : tensor(narrow.data(), shape);
    indices.stride = stride;
    return p.run(backend, [&](AttentionArgs& args) { args.rows = Slots{indices, {}}; });
  };
  for (const Backend& backend : host_backends())
    for (const bool wide : {false, true}) {
      Problem p{.tokens = 6, .heads = 4, .pages = 4};
      std::vector<std::vector<std::int64_t>> lists;
      std::vector<std::int64_t> rows_of_9(6 * 9, kPoisoned), every_third(5 * 3, kPoisoned);
      for (std::size_t t = 0; t < 6; ++t) {
        const auto i = static_cast<std::int64_t>(t);
        lists.push_back({5 + i, 9, -1, 200 - i, 31});
        std::copy(lists[t].begin(), lists[t].end(), rows_of_9.begin() + i * 9);
      }
      for (std::size_t i = 0; i < 5; ++i) every_third[3 * i] = lists[0][i];
      const Result apart = p.list(lists).run(backend);
      ASSERT_TRUE(solved(p, backend));
      EXPECT_TRUE(same_bits(run(p, backend, rows_of_9, wide, {6, 5}, {9, 1}), apart));
      EXPECT_TRUE(same_bits(run(p, backend, rows_of_9, wide, {2, 3, 5}, {27, 9, 1}), apart));

      // The rows of a request share one list: a q_len stride of 0.
      const Result by_three = p.list({lists[0], lists[0], lists[0], lists[1], lists[1], lists[1]}).run(backend);
      EXPECT_TRUE(same_bits(run(p, backend, rows_of_9, wide, {2, 3, 5}, {9, 0, 1}), by_three));
      // All tokens share it, and its lanes lie apart.
      const Result by_all = p.list({lists[0], lists[0], lists[0], lists[0], lists[0], lists[0]}).run(backend);
      EXPECT_TRUE(same_bits(run(p, backend, every_third, wide, {6, 5}, {0, 3}), by_all));
    }
}

// Lanes at or past topk_length are not read, whatever they hold: here slots of poisoned rows. Lengths may be negative or
// beyond the list.
TEST(Attention, LanesPastTheLength) {
  for (const Backend& backend : host_backends()) {
    Problem p{.tokens = 5, .pages = 4};
    p.random_list(70, 70);
    p.topk_length = {70, 33, 1, -5, std::numeric_limits<std::int32_t>::max()};
    for (std::int64_t t : {1, 2, 3}) {
      const auto before = p.live(t);
      for (std::int64_t i = static_cast<std::int64_t>(before.size()); i < 70; ++i)
        p.indices[Problem::at(t * 70 + i)] = i % 2 ? 255 - i : std::numeric_limits<std::int32_t>::max();
      ASSERT_EQ(p.live(t), before);
    }
    EXPECT_TRUE(solved(p, backend));
  }
}

TEST(Attention, DuplicatesCountTwice) {
  for (const Backend& backend : host_backends()) {
    Problem p{.tokens = 2};
    p.list({{7, 7, 7, 7}, {3, 9, 3, 3}});
    EXPECT_TRUE(solved(p, backend));
    Problem once = p;
    once.list({{7}, {3, 9}});
    const Result four = p.run(backend), one = once.run(backend);
    for (std::size_t h = 0; h < 8; ++h)
      EXPECT_NEAR(four.lse[h], one.lse[h] + std::log(4.f), 1e-6f * (1 + std::abs(four.lse[h])));
    EXPECT_FALSE(same_bits(four.row(8, 512), one.row(8, 512)));
  }
}

// q_len 1..8 with a causal tail, requests shorter than q_len, empty, and as long as the table; permuted pages with holes.
TEST(Attention, DenseDecodeOfEveryQueryLength) {
  for (const Backend& backend : host_backends())
    for (std::int64_t q_len = 1; q_len <= 8; ++q_len) {
      SCOPED_TRACE(q_len);
      Problem p{.tokens = 5 * q_len, .heads = 3, .pages = 12, .page_size = 16};
      p.table_width = 3;
      p.table = {4, 11, 0, 7, -1, 3, 12, 5, 6, 1, 2, 10, 9, 8, 4};
      p.lengths = {48, 33, 40, 3, -7};
      EXPECT_TRUE(solved(p, backend));
      p.lengths = {std::numeric_limits<std::int32_t>::max(), 16, 17, 0, std::numeric_limits<std::int32_t>::min()};
      EXPECT_TRUE(solved(p, backend));
    }
}

TEST(Attention, DenseLongRow) {  // more lanes than 32 chunks of the smallest size
  for (const Backend& backend : host_backends()) {
    Problem p{.heads = 2, .pages = 150, .page_size = 64, .sinks = true};
    p.table_width = 150;
    for (std::int32_t i = 0; i < 150; ++i) p.table.push_back(i * 7 % 150);
    p.lengths = {150 * 64 - 5};
    EXPECT_TRUE(solved(p, backend));
  }
}

TEST(Attention, NothingToDo) {
  for (const Backend& backend : host_backends())
    for (const bool sinks : {false, true}) {
      Problem p{.tokens = 3, .sinks = sinks};
      EXPECT_TRUE(solved(p, backend));  // topk 0
      p.list({});
      EXPECT_TRUE(solved(p, backend));  // no tokens
      p.table_width = 2;
      for (std::int64_t requests : {0, 3}) {  // no tokens of no requests, or of three
        std::vector<std::int32_t> table(6, 0), lengths(3, 5);
        p.run(backend, [&](AttentionArgs& args) {
          args.rows = BlockTable{tensor(table.data(), {requests, 2}), tensor(lengths.data(), {requests})};
        });
      }
      p.tokens = 2;
      p.lengths = {0, 5};
      p.table_width = 0;  // a table without columns
      EXPECT_TRUE(solved(p, backend));
      Problem none{.tokens = 2, .pages = 0};  // a cache without pages
      none.list({{0, 1, 2}, {-1, 5, 9}});
      EXPECT_TRUE(solved(none, backend));
    }
}

TEST(Attention, Sinks) {
  for (const Backend& backend : host_backends()) {
    Problem p{.tokens = 3, .heads = 9, .pages = 8, .sinks = true};
    p.random_list(400, 390);
    EXPECT_TRUE(solved(p, backend, /*step=*/2));
    Problem without = p;
    without.sinks = false;
    EXPECT_TRUE(same_bits(p.run(backend).lse, without.run(backend).lse));
    // Sinks of no weight, of all the weight, and beyond what exp can hold.
    const float sinks[] = {-kInf, 3e38f, -3e38f, 100.f, kInf, -100.f, -kInf, -kInf, -kInf};
    const Result got = p.run(backend, [&](AttentionArgs& args) { args.sink = tensor(sinks, {9}); });
    const Result want = without.run(backend);
    for (std::int64_t h : {0, 2, 6, 7, 8}) EXPECT_TRUE(same_bits(got.row(h, 512), want.row(h, 512))) << h;
    for (std::int64_t h : {1, 4})
      for (float x : got.row(h, 512)) ASSERT_EQ(x, 0.f) << h;
    for (float x : got.row(3, 512)) ASSERT_LE(std::abs(x), 0.25f * std::exp(want.lse[3] - 100.f) * 1.01f);
    EXPECT_TRUE(same_bits(got.lse, want.lse));
  }
}

}  // namespace
}  // namespace sievemla::test
