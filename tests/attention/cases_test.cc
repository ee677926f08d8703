// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/cases_test.cc -- shapes and maskings that have broken other kernels, case by case.
#include <gtest/gtest.h>

#include <numeric>

#include "support/attention_problem.h"
#include "support/backends.h"
#include "support/lazy_memory.h"

namespace sievemla::test {
namespace {

std::vector<std::int64_t> range(std::int64_t first, std::int64_t n) {
  std::vector<std::int64_t> list(static_cast<std::size_t>(n));
  std::iota(list.begin(), list.end(), first);
  return list;
}

TEST(Case01, LeadingMinusOne) {
  for (const Backend& backend : host_backends()) {
    std::optional<Result> first;
    for (std::int64_t leading : {0, 1, 15, 16, 17, 31, 32, 33, 63, 64}) {
      SCOPED_TRACE(leading);
      Problem p;
      std::vector<std::int64_t> lanes(96, -1);
      std::iota(lanes.begin() + leading, lanes.begin() + leading + 32, 10);
      p.list({lanes});
      EXPECT_TRUE(solved(p, backend));
      const Result result = p.run(backend);
      if (!first) first = result;
      EXPECT_TRUE(same_bits(result, *first));  // dead lanes take no place in a block
    }
  }
}

TEST(Case02, SprinkledMinusOne) {
  for (const Backend& backend : host_backends()) {
    Problem p{.pages = 4};
    std::vector<std::int64_t> thirds(200, -1), middle(200, -1);
    for (std::size_t i = 0; i < 200; i += 3) thirds[i] = static_cast<std::int64_t>(i);
    std::iota(middle.begin() + 64, middle.begin() + 128, 30);
    p.list({thirds, middle});
    EXPECT_TRUE(solved(p, backend));
  }
}

TEST(Case03, EmptyRowAmongFull) {
  for (const Backend& backend : host_backends())
    for (const bool by_length : {false, true})
      for (const bool sinks : {false, true}) {
        Problem all{.pages = 8, .sinks = sinks}, full = all;
        const std::vector<std::int64_t> list0 = range(0, 300), list2 = range(100, 300);
        all.list({list0, by_length ? range(0, 300) : std::vector<std::int64_t>(300, -1), list2});
        if (by_length) all.topk_length = {300, 0, 300};
        EXPECT_TRUE(solved(all, backend));
        const Result result = all.run(backend);
        const auto cells = static_cast<std::size_t>(all.heads);
        for (std::size_t h = cells; h < 2 * cells; ++h) {
          EXPECT_EQ(result.lse[h], -kInf);
          for (float x : result.row(static_cast<std::int64_t>(h), 512)) ASSERT_TRUE(x == 0 && !std::signbit(x));
        }
        // Rows 0 and 2 are the same without row 1, and with a row 1 that attends.
        const auto same_rows = [&](const Result& other, std::int64_t token) {
          const auto part = [&](const std::vector<float>& x, std::int64_t width) {
            return std::span(x).subspan(Problem::at(token * all.heads * width), Problem::at(all.heads * width));
          };
          EXPECT_TRUE(same_bits(part(result.out, 512), part(other.out, 512)));
          EXPECT_TRUE(same_bits(part(result.lse, 1), part(other.lse, 1)));
        };
        same_rows(full.list({list0}).run(backend), 0);
        full.list({list0, list0, list2});
        same_rows(full.run(backend), 0);
        same_rows(full.run(backend), 2);
      }
}

TEST(Case04, BothEndsChecked) {
  constexpr std::int64_t kBig = std::int64_t{1} << 31, kHuge = std::numeric_limits<std::int64_t>::max();
  for (const Backend& backend : host_backends()) {
    Problem p{.pages = 10, .page_size = 10};
    p.list({{99, 100, kBig - 1, -1, -kBig}});
    EXPECT_TRUE(solved(p, backend));
    p.list({{kBig, 99, -kHuge - 1, kHuge, -kBig - 1, (std::int64_t{1} << 32) + 5, -2, 100}});  // 2^32 + 5 is not 5
    p.wide = true;
    ASSERT_EQ(p.live(0), std::vector<std::int64_t>{99});
    EXPECT_TRUE(solved(p, backend));
  }
  for (const Backend& backend : host_backends()) {  // the same of a block table's pages
    Problem p{.tokens = 1, .pages = 10, .page_size = 10};
    p.table = {-1, 9, 10, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min(), 3};
    p.table_width = 6;
    p.lengths = {58};
    ASSERT_EQ(p.live(0).size(), 18u);
    EXPECT_TRUE(solved(p, backend));
  }
}

TEST(Case05, DenseEquality) {
  constexpr std::int64_t kLength = 300;
  for (const Backend& backend : host_backends()) {
    Problem dense{.tokens = kLength, .heads = 2, .pages = 5};
    dense.table = {0, 1, 2, 3, 4};
    dense.table_width = 5;
    dense.lengths = {kLength};
    const Result want = dense.run(backend);
    EXPECT_TRUE(solved(dense, backend, /*step=*/37));

    Problem sparse{.heads = 2, .pages = 5};
    std::vector<std::vector<std::int64_t>> lists, permuted;
    Random random(5);
    for (std::int64_t t = 0; t < kLength; ++t) {
      lists.push_back(range(0, t + 1));
      permuted.push_back(random.distinct(t + 1, t + 1));
    }
    EXPECT_TRUE(same_bits(sparse.list(lists).run(backend), want));  // the same loop over the same rows
    EXPECT_TRUE(solved(sparse.list(permuted), backend, /*step=*/37));
  }
}

TEST(Case06, Heads) {
  for (const Backend& backend : host_backends()) {
    Problem widest{.tokens = 2, .heads = 128, .pages = 4};
    widest.random_list(64, 60);
    const Result all = widest.run(backend);
    EXPECT_TRUE(solved(widest, backend, /*step=*/17));
    Problem narrow = widest;  // AVX-512 adds in another order for up to 8 heads
    narrow.heads = 8;
    const Result eight = narrow.run(backend);
    EXPECT_TRUE(solved(narrow, backend));
    const bool apart =
        backend.kind() == BackendKind::cpu && (cpu::isa() == cpu::Isa::avx512 || cpu::isa() == cpu::Isa::avx512bf16);
    for (std::int64_t heads : {1, 2, 4, 5, 8, 12, 16, 20, 32, 40, 64, 72, 80, 96, 112}) {
      Problem p = widest;
      p.heads = heads;
      const Result got = p.run(backend);  // with guards right after row heads - 1
      const bool few = apart && heads <= 8;
      const Result& want = few ? eight : all;
      const std::int64_t of = few ? 8 : 128;
      for (std::int64_t t = 0; t < 2; ++t)
        for (std::int64_t h = 0; h < heads; ++h)
          ASSERT_TRUE(same_bits(got.row(t * heads + h, 512), want.row(t * of + h, 512))) << heads << " heads, " << h;
      for (std::int64_t t = 0; t < 2; ++t)
        EXPECT_TRUE(same_bits(std::span(got.lse).subspan(Problem::at(t * heads), Problem::at(heads)),
                              std::span(want.lse).subspan(Problem::at(t * of), Problem::at(heads))));
    }
  }
}

// Every width; tokens and heads go round, many tokens with the narrow ones.
TEST(Case07, AnyTopkWidth) {
  constexpr std::int64_t kWidths[] = {1,   2,    63,   64,   65,   127,  128,  192, 256,
                                      512, 1000, 1024, 1152, 2044, 2048, 2051, 2176};
  constexpr std::int64_t kTokens[] = {129, 16, 65, 64, 63}, kFewTokens[] = {1, 2, 3}, kHeads[] = {8, 16, 64, 8};
  std::size_t i = 0;
  for (std::int64_t k : kWidths) {
    ++i;
    Problem p{.tokens = k <= 192 ? kTokens[i % 5] : kFewTokens[i % 3], .heads = kHeads[i % 4], .pages = 40};
    SCOPED_TRACE(testing::Message() << "topk " << k << ", tokens " << p.tokens << ", heads " << p.heads);
    p.random_list(k, k - k / 10);
    EXPECT_TRUE(solved(p, Backend::cpu({.threads = 2}), /*step=*/p.tokens * p.heads / 3));
    if (p.tokens * p.heads * k > 150'000) continue;
    EXPECT_TRUE(solved(p, Backend::reference(), p.tokens * p.heads / 3));
  }
}

// Wide rows of as many tokens as make whole tiles and a rest. Every 16th token fills nine tenths of its lanes; the
// others have a sixteenth of them, which keeps this to a second.
TEST(Case07, WideRowsOfManyTokens) {
  for (std::int64_t k : {2048, 2051, 2176})
    for (std::int64_t tokens : {63, 64, 65}) {
      SCOPED_TRACE(testing::Message() << "topk " << k << ", tokens " << tokens);
      Problem p{.tokens = tokens, .heads = 8, .pages = 40};
      p.random_list(k, k - k / 10);
      for (std::int64_t t = 0; t < tokens; ++t)
        p.topk_length.push_back(static_cast<std::int32_t>(t % 16 == 0 ? k : k / 16));
      EXPECT_TRUE(solved(p, Backend::cpu({.threads = 2}), /*step=*/43));  // (0, 0), (5, 3), (10, 6), (16, 1) ...
    }
}

// No rope: rows of 512 in memory of 576 (or 528 bytes in 656), what follows each row is NaN.
TEST(Case08, Nope) {
  for (const Backend& backend : host_backends())
    for (const KvFormat format : {KvFormat::bf16, KvFormat::f32, KvFormat::fp8_nope}) {
      Problem p{.tokens = 3, .heads = 16, .format = format, .rope = 0, .pages = 4};
      p.random_list(130, 120);
      EXPECT_TRUE(solved(p, backend, /*step=*/5));
      const Result contiguous = p.run(backend);
      p.row_padding = format == KvFormat::fp8_nope ? 128 : 64;
      EXPECT_TRUE(same_bits(p.run(backend), contiguous));
      p.split_q = true;  // with a q_rope of width 0
      EXPECT_TRUE(same_bits(p.run(backend), contiguous));

      Problem dense{.tokens = 8, .heads = 4, .format = format, .rope = 0, .pages = 4};
      dense.table = {3, 1};
      dense.table_width = 1;
      dense.lengths = {60, 40};
      EXPECT_TRUE(solved(dense, backend));
    }
}

// The value is the whole latent, whatever the model's own value width; columns 256..511 are as good as the first.
TEST(Case09, ValueWidth) {
  for (const Backend& backend : host_backends()) {
    Problem prefill{.tokens = 9, .heads = 8, .pages = 3}, decode = prefill;
    prefill.random_list(100, 90);
    decode.tokens = 1;
    decode.table = {2, 0, 1};
    decode.table_width = 3;
    decode.lengths = {150};
    for (const Problem& p : {prefill, decode}) {
      const Result result = p.run(backend);
      EXPECT_EQ(result.out.size(), static_cast<std::size_t>(p.tokens * p.heads * 512));
      EXPECT_TRUE(std::any_of(result.out.begin() + 256, result.out.begin() + 512, [](float x) { return x != 0; }));
      EXPECT_TRUE(solved(p, backend));
    }
  }
}

// Pages of any size, permuted, one shared by two requests, padding between rows and pages; the table is five columns
// of a wider one, whose other columns name pages of poison; rows past the five columns are skipped.
TEST(Case10, PageSizesAndStrides) {
  for (const Backend& backend : host_backends())
    for (std::int64_t page_size : {1, 16, 32, 64, 128, 256, 544, 1152, 2176}) {
      SCOPED_TRACE(page_size);
      Problem p{.tokens = 4, .heads = 2, .pages = 12, .page_size = page_size, .row_padding = 6, .page_padding = 10};
      p.table_width = 5;
      p.table_stride = 37;
      p.table.assign(2 * 37, 11);
      const std::int32_t first[] = {7, 2, 9, 0, 4}, second[] = {3, 2, 10, -1, 1};
      std::copy(std::begin(first), std::end(first), p.table.begin());
      std::copy(std::begin(second), std::end(second), p.table.begin() + 37);
      const auto n = static_cast<std::int32_t>(page_size);
      p.lengths = {std::min(2 * n + n / 2 + 2, 700), page_size <= 64 ? 6 * n : std::min(n + 5, 700)};
      EXPECT_TRUE(solved(p, backend, /*step=*/3));
    }
}

// Rows whose byte offset does not fit 32 bits give what the same rows give in a small cache; where the offset would lie
// modulo 2^32 is poison.
TEST(Case15, SlotBeyond32Bits) {
  struct Place {
    KvFormat format;
    std::int64_t pages, page_size, first_slot, second_slot;
  };
  for (const Place& place : {Place{KvFormat::bf16, 58257, 64, 3'728'271, 3'728'399},      // 1152 bytes: beyond 2^32
                             Place{KvFormat::bf16, 7769, 480, 3'728'640 + 3, 3'729'119},  // page 7768
                             Place{KvFormat::fp8_ds_mla, 51151, 64, 3'273'604, 3'273'663}}) {  // 656: beyond 2^31
    Problem small{.heads = 4, .format = place.format, .pages = 1, .page_size = 2};
    small.list({{0, 1}});
    Problem::Cache rows(small);
    rows.fill(small, 0);
    rows.fill(small, 1);
    const std::int64_t row_bytes = info(place.format).row_bytes(512, 64);
    const LazyMemory memory(place.pages * place.page_size * row_bytes);
    if (!memory) GTEST_SKIP() << "no address space for the cache";
    for (const auto& [slot, row] : {std::pair{place.first_slot, 0}, {place.second_slot, 1}}) {
      ASSERT_GT(slot * row_bytes, std::int64_t{1} << 31);
      ASSERT_LT(slot, place.pages * place.page_size);
      for (int bits : {31, 32}) {
        const std::int64_t wrapped = slot * row_bytes % (std::int64_t{1} << bits);
        if (wrapped != slot * row_bytes)
          std::memset(memory.data() + wrapped, 0xFF, static_cast<std::size_t>(row_bytes));
      }
    }
    for (const auto& [slot, row] : {std::pair{place.first_slot, 0}, {place.second_slot, 1}})
      std::memcpy(memory.data() + slot * row_bytes, rows.bytes.data() + row * row_bytes,
                  static_cast<std::size_t>(row_bytes));

    TensorView pages = rows.view.pages;
    pages.data = memory.data();
    pages.shape = {place.pages, place.page_size, pages.dim(2)};
    pages.stride = {place.page_size * pages.dim(2), pages.dim(2), 1};
    for (const Backend& backend : host_backends()) {
      const Result want = small.run(backend, rows);
      const std::int32_t narrow[] = {static_cast<std::int32_t>(place.first_slot),
                                     static_cast<std::int32_t>(place.second_slot)};
      const std::int64_t wide[] = {place.first_slot, place.second_slot};
      for (const TensorView& indices : {tensor(narrow, {1, 2}), tensor(wide, {1, 2})})
        EXPECT_TRUE(same_bits(small.run(backend, rows,
                                        [&](AttentionArgs& args) {
                                          args.kv.pages = pages;
                                          args.rows = Slots{indices, {}};
                                        }),
                              want));
    }
  }
}

}  // namespace
}  // namespace sievemla::test
