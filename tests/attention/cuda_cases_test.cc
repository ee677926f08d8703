// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/cuda_cases_test.cc -- the cases of cases_test.cc on a CUDA device, and what else the contract says of
// rows, layouts and numbers.
#include <memory>
#include <numeric>

#include "attention/on_cuda.h"
#include "kv/e4m3.h"
#include "sievemla/error.h"

namespace sievemla::test {
namespace {

std::vector<std::int64_t> range(std::int64_t first, std::int64_t n) {
  std::vector<std::int64_t> list(static_cast<std::size_t>(n));
  std::iota(list.begin(), list.end(), first);
  return list;
}

TEST_F(OnCuda, Case01LeadingMinusOne) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (std::int64_t leading : {0, 1, 15, 16, 17, 31, 32, 33, 63, 64}) {
      SCOPED_TRACE(leading);
      Problem p{.format = format, .rope = rope};
      std::vector<std::int64_t> lanes(96, -1);
      std::iota(lanes.begin() + leading, lanes.begin() + leading + 32, 10);
      p.list({lanes});
      expect_solved(p, cuda);
    }
}

TEST_F(OnCuda, Case02SprinkledMinusOne) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t heads : {8, 64}) {
      Problem p{.heads = heads, .format = format, .rope = rope, .pages = 4};
      std::vector<std::int64_t> thirds(200, -1), middle(200, -1);
      for (std::size_t i = 0; i < 200; i += 3) thirds[i] = static_cast<std::int64_t>(i);
      std::iota(middle.begin() + 64, middle.begin() + 128, 30);
      p.list({thirds, middle});
      expect_solved(p, cuda);
    }
}

TEST_F(OnCuda, Case03EmptyRowAmongFull) {
  const Backend cuda = backend();
  const auto invariant = [](AttentionArgs& args) { args.batch_invariant = true; };
  for (const auto& [format, rope] : kRows)
    for (const bool by_length : {false, true})
      for (const bool sinks : {false, true}) {
        Problem all{.heads = 20, .format = format, .rope = rope, .pages = 8, .sinks = sinks}, full = all;
        all.list({range(0, 300), by_length ? range(0, 300) : std::vector<std::int64_t>(300, -1), range(100, 300)});
        if (by_length) all.topk_length = {300, 0, 300};
        expect_solved(all, cuda);  // the empty row: +0 and -inf
        const Result result = all.run(cuda, invariant);
        const auto same_row = [&](const Result& other, std::int64_t token) {
          for (std::int64_t h = token * all.heads; h < (token + 1) * all.heads; ++h) {
            EXPECT_TRUE(same_bits(result.row(h, 512), other.row(h, 512)));
            EXPECT_EQ(result.lse[Problem::at(h)], other.lse[Problem::at(h)]);
          }
        };
        same_row(full.list({range(0, 300)}).run(cuda, invariant), 0);
        full.list({range(0, 300), range(0, 300), range(100, 300)});
        same_row(full.run(cuda, invariant), 0);
        same_row(full.run(cuda, invariant), 2);
      }
}

TEST_F(OnCuda, Case04BothEndsChecked) {
  constexpr std::int64_t kBig = std::int64_t{1} << 31, kHuge = std::numeric_limits<std::int64_t>::max();
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows) {
    Problem p{.format = format, .rope = rope, .pages = 10, .page_size = 10};
    p.list({{99, 100, kBig - 1, -1, -kBig}});
    expect_solved(p, cuda);
    p.list({{kBig, 99, -kHuge - 1, kHuge, -kBig - 1, (std::int64_t{1} << 32) + 5, -2, 100}});  // 2^32 + 5 is not 5
    p.wide = true;
    ASSERT_EQ(p.live(0), std::vector<std::int64_t>{99});
    expect_solved(p, cuda);
    Problem dense{.tokens = 1, .format = format, .rope = rope, .pages = 10, .page_size = 16};
    dense.table = {-1, 9, 10, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min(), 3};
    dense.table_width = 6;
    dense.lengths = {90};
    ASSERT_EQ(dense.live(0).size(), 26u);
    expect_solved(dense, cuda);
  }
}

TEST_F(OnCuda, Case05DenseEquality) {
  constexpr std::int64_t kLength = 300;
  const Backend cuda = backend();
  Problem dense{.tokens = 8, .heads = 16, .pages = 5};
  dense.table = {0, 1, 2, 3, 4};
  dense.table_width = 5;
  dense.lengths = {kLength};
  expect_solved(dense, cuda);
  Problem sparse{.heads = 2, .pages = 5};
  std::vector<std::vector<std::int64_t>> lists, permuted;
  Random random(5);
  for (std::int64_t t = 0; t < kLength; ++t) {
    lists.push_back(range(0, t + 1));
    permuted.push_back(random.distinct(t + 1, t + 1));
  }
  expect_solved(sparse.list(lists), cuda);
  expect_solved(sparse.list(permuted), cuda);
}

// No rope: rows of 512 in memory of 576 (or 528 bytes in 656), what follows each row is NaN.
TEST_F(OnCuda, Case08Nope) {
  const Backend cuda = backend();
  for (const KvFormat format : {KvFormat::bf16, KvFormat::fp8_nope})
    for (const std::int64_t heads : {4, 16, 64}) {
      Problem p{.tokens = 3, .heads = heads, .format = format, .rope = 0, .pages = 4};
      p.random_list(130, 120);
      expect_solved(p, cuda);
      const Result contiguous = p.run(cuda);
      p.row_padding = format == KvFormat::fp8_nope ? 128 : 64;
      EXPECT_TRUE(same_bits(p.run(cuda), contiguous));
      p.split_q = true;  // with a q_rope of width 0
      EXPECT_TRUE(same_bits(p.run(cuda), contiguous));
      Problem dense{.tokens = 8, .heads = heads, .format = format, .rope = 0, .pages = 4};
      dense.table = {3, 1};
      dense.table_width = 1;
      dense.lengths = {60, 40};
      expect_solved(dense, cuda);
    }
}

// Pages permuted, one shared by two requests, padding between rows and pages; the table is five columns of a wider one.
TEST_F(OnCuda, Case10PageSizesAndStrides) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (std::int64_t page_size : {16, 32, 64, 128, 256, 544, 1152, 2176}) {
      SCOPED_TRACE(page_size);
      const std::int64_t unit = info(format).storage == DType::u8 ? 16 : 8;
      Problem p{.tokens = 4, .heads = 2, .format = format, .rope = rope, .pages = 12, .page_size = page_size};
      p.row_padding = unit, p.page_padding = 3 * unit;
      p.table_width = 5;
      p.table_stride = 37;
      p.table.assign(2 * 37, 11);
      const std::int32_t first[] = {7, 2, 9, 0, 4}, second[] = {3, 2, 10, -1, 1};
      std::copy(std::begin(first), std::end(first), p.table.begin());
      std::copy(std::begin(second), std::end(second), p.table.begin() + 37);
      const auto n = static_cast<std::int32_t>(page_size);
      p.lengths = {std::min(2 * n + n / 2 + 2, 700), page_size <= 64 ? 6 * n : std::min(n + 5, 700)};
      expect_solved(p, cuda);
    }
}

// One row selected: the output is the row. Its weight is a power of 2 worked out from the score, here up to a thousand,
// of which f32 keeps 2^-14: codes, of which the two NaNs are left out, lie an eighth apart. Scales come out to bf16's
// precision.
TEST_F(OnCuda, Case11And12CodesAndScalesOfARow) {
  const Backend cuda = backend();
  const auto code_at = [](int i) { return static_cast<std::byte>((i & 0x7F) == 0x7F ? 0 : i); };
  for (const KvFormat format : {KvFormat::fp8_ds_mla, KvFormat::fp8_nope})
    for (const std::int64_t heads : {8, 16, 32, 64}) {
      Problem p{.heads = heads, .format = format, .rope = format == KvFormat::fp8_nope ? 0 : 64, .pages = 1};
      p.list({{3}, {4}});
      Problem::Cache cache(p);
      const float scales[2][4] = {{1, 1, 1, 1}, {0.75f, 0.3f, 3.f, 1e-6f}};
      for (std::int64_t t = 0; t < 2; ++t) {
        cache.fill(p, 3 + t);
        std::byte* const row = cache.bytes.data() + (3 + t) * info(format).row_bytes(512, p.rope);
        for (int i = 0; i < 512; ++i) row[i] = t == 1 ? std::byte{0x38} : code_at(i);  // 0x38 = 1
        std::memcpy(row + 512, scales[t], 16);
      }
      const Result result = p.run(cuda, cache);
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::size_t d = 0; d < 512; ++d) {
          const float scale = scales[1][d / 128];
          const float value = kv::from_e4m3(std::to_integer<std::uint8_t>(code_at(static_cast<int>(d))));
          ASSERT_NEAR(result.row(h, 512)[d], value, std::abs(value) * 0x1p-12f) << "code " << d;
          ASSERT_NEAR(result.row(heads + h, 512)[d], scale, scale * 0x1p-8f) << "column " << d;
        }
    }
}

// Rows whose byte or element offset does not fit 32 bits give what the same rows give in a small cache; where the
// offset would lie modulo 2^31 or 2^32 is poison.
TEST_F(OnCuda, Case15SlotsBeyond32Bits) {
  const Backend cuda = backend();
  struct Place {
    KvFormat format;
    std::int64_t pages, page_size, first_slot, second_slot;
  };
  for (const Place& place : {Place{KvFormat::bf16, 58257, 64, 3'728'271, 3'728'399},      // 1152 bytes: beyond 2^32
                             Place{KvFormat::bf16, 7769, 480, 3'728'640 + 3, 3'729'119},  // page 7768
                             Place{KvFormat::fp8_ds_mla, 102302, 64, 3'273'604, 6'547'263}}) {  // 656: 2^31 and 2^32
    const std::int64_t row_bytes = info(place.format).row_bytes(512, 64);
    std::size_t free = 0, total = 0;
    cuda_good(cudaMemGetInfo(&free, &total));
    if (free < static_cast<std::size_t>(place.pages * place.page_size * row_bytes)) GTEST_SKIP() << "too little memory";
    const cuda::Memory memory = cuda::Memory::on(cuda.device(), place.pages * place.page_size * row_bytes);
    auto* const bytes = static_cast<std::byte*>(memory.data());
    cuda_good(cudaMemset(bytes, 0xFF, static_cast<std::size_t>(memory.bytes())));
    for (const std::int64_t heads : {4, 16, 64}) {
      Problem small{.heads = heads, .format = place.format, .pages = 1, .page_size = 2};
      small.list({{0, 1}});
      Problem::Cache rows(small);
      rows.fill(small, 0), rows.fill(small, 1);
      TensorView pages = rows.view.pages;
      pages.data = bytes;
      pages.device = cuda.device();
      pages.shape = {place.pages, place.page_size, pages.dim(2)};
      pages.stride = {place.page_size * pages.dim(2), pages.dim(2), 1};
      for (const auto& [slot, row] : {std::pair{place.first_slot, 0}, {place.second_slot, 1}})
        cuda_copy(bytes + slot * row_bytes, rows.bytes.data() + row * row_bytes, row_bytes);
      const Result want = small.run(cuda, rows);
      const std::int32_t narrow[] = {static_cast<std::int32_t>(place.first_slot),
                                     static_cast<std::int32_t>(place.second_slot)};
      const std::int64_t wide[] = {place.first_slot, place.second_slot};
      for (const TensorView& indices : {tensor(narrow, {1, 2}), tensor(wide, {1, 2})})
        EXPECT_TRUE(same_bits(small.run(cuda, rows,
                                        [&](AttentionArgs& args) {
                                          args.kv.pages = pages;
                                          args.rows = Slots{indices, {}};
                                        }),
                              want))
            << info(place.format).name << ", " << heads << " heads";
    }
  }
}

// Rows of a request that share one slot list: the list of every token, and a list repeated by a stride of 0.
TEST_F(OnCuda, SharedSlotLists) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t heads : {2, 16, 20}) {
      constexpr std::int64_t kRequests = 3, kQueries = 4, kTopk = 150;
      Problem p{.tokens = kRequests, .heads = heads, .format = format, .rope = rope, .pages = 6};
      p.random_list(kTopk, 120);
      std::vector<std::vector<std::int64_t>> repeated;
      for (std::int64_t t = 0; t < kRequests * kQueries; ++t)
        repeated.emplace_back(p.indices.begin() + t / kQueries * kTopk, p.indices.begin() + (t / kQueries + 1) * kTopk);
      const std::vector<std::int64_t> once = p.indices;
      p.list(repeated), p.wide = true;
      Problem::Cache cache(p);
      for (std::int64_t t = 0; t < p.tokens; ++t)
        for (std::int64_t s : p.live(t)) cache.fill(p, s);
      for (const std::int64_t stride : {std::int64_t{0}, kTopk})
        expect_near(p, cache, p.run(cuda, cache, [&](AttentionArgs& args) {
          TensorView lists = tensor((stride == 0 ? once : p.indices).data(), {kRequests, kQueries, kTopk});
          if (stride == 0) lists.stride = {kTopk, 0, 1};
          args.rows = Slots{lists, {}};
        }));
    }
}

TEST_F(OnCuda, DuplicatesCountTwice) {
  const Backend cuda = backend();
  Problem p{.heads = 16, .pages = 2};
  p.list({{5, 9, 5, 5, 100, 9}});
  expect_solved(p, cuda);
}

TEST_F(OnCuda, OutputsOfEveryLayout) {
  const Backend cuda = backend();
  for (const std::int64_t heads : {8, 64})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Problem p{.tokens = 3, .heads = heads, .pages = 4, .out_dtype = dtype};
      p.random_list(100, 90);
      const Result want = p.run(cuda);
      expect_solved(p, cuda);
      const std::int64_t size = size_of(dtype), row = 512 + 16, token = heads * row + 32;
      std::vector<std::byte> room(static_cast<std::size_t>(3 * token * size), std::byte{0x5A});
      std::vector<float> lse(static_cast<std::size_t>(3 * heads * 2), 7.f);
      TensorView out = tensor(reinterpret_cast<const std::uint8_t*>(room.data()), {3, heads, 512});
      out.dtype = dtype, out.stride = {token, row, 1};
      TensorView lses = tensor(lse.data(), {3, heads});
      lses.stride = {2, 6};
      OnDevice device(cuda.device());
      p.run(cuda, [&](AttentionArgs& args) { args.out = device.put(out), args.lse = device.put(lses); });
      device.take_back(out), device.take_back(lses);
      for (std::int64_t c = 0; c < 3 * heads; ++c) {
        const std::byte* got = room.data() + (c / heads * token + c % heads * row) * size;
        for (std::int64_t d = 0; d < row; ++d) {
          float x = 0;
          if (dtype == DType::f32) std::memcpy(&x, got + d * 4, 4);
          else x = base::to_f32(*reinterpret_cast<const bf16*>(got + d * 2));
          ASSERT_TRUE(d < 512 ? x == want.row(c, 512)[Problem::at(d)] : got[d * size] == std::byte{0x5A}) << d;
        }
        EXPECT_EQ(lse[Problem::at(c / heads * 2 + c % heads * 6)], want.lse[Problem::at(c)]);
      }
    }
}

// A row that holds NaN (in fp8: whose scale does) makes NaN of the tokens that select it, and of no other.
TEST_F(OnCuda, NanStaysInItsToken) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t heads : {8, 16, 64}) {
      Problem p{.tokens = 2, .heads = heads, .format = format, .rope = rope, .pages = 4};
      p.list({range(0, 100), range(100, 100)});
      Problem::Cache cache(p);
      for (std::int64_t s = 0; s < 200; ++s) cache.fill(p, s);
      std::vector<float> row = p.row(50);
      row[7] = kNan;
      kv::store_row(cache.view, 50, row.data(), row.data() + 512, ScaleRule::arbitrary);
      const Result result = p.run(cuda, cache);
      for (std::int64_t h = 0; h < heads; ++h) {
        EXPECT_TRUE(std::isnan(result.lse[Problem::at(h)])) << info(format).name << ", head " << h;
        for (float x : result.row(h, 512)) ASSERT_TRUE(std::isnan(x)) << info(format).name << ", head " << h;
        EXPECT_TRUE(near(p, result, answer(p, cache, p.live(1), 1, h), 1, h));
      }
    }
}

// Tokens of a request may share rows and yet see different ones: what is NaN past a token's own rows does not reach it,
// whatever tile they are computed in together.
TEST_F(OnCuda, NanStaysInTheTokensThatSeeIt) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t heads : {2, 4, 8, 16, 32})
      for (const bool dense : {true, false}) {
        SCOPED_TRACE(testing::Message() << info(format).name << ", " << heads << " heads, dense " << dense);
        Problem p{.tokens = 4, .heads = heads, .format = format, .rope = rope, .pages = 8};
        if (dense) {
          p.table = {2, 0, 4, 1}, p.table_width = 4, p.lengths = {200};
        } else {
          p.list({range(90, 150), range(90, 150), range(90, 150), range(90, 150)});
          p.topk_length = {130, 0, 150, 129}, p.wide = true;
        }
        const std::int64_t t = dense ? 3 : 2, row = dense ? 198 : 129, slot = p.live(t)[Problem::at(row)];
        Problem::Cache cache(p);
        for (const std::int64_t s : p.live(t))
          if (s != slot) cache.fill(p, s);  // that one is poison
        const Result result = p.run(cuda, cache, [&](AttentionArgs& args) {
          if (dense) return;
          TensorView lists = tensor(p.indices.data(), {1, 4, 150});
          lists.stride = {150, 0, 1};
          args.rows = Slots{lists, std::get<Slots>(args.rows).topk_length};
        });
        for (std::int64_t cell = 0; cell < 4 * heads; ++cell) {
          const std::vector<std::int64_t> live = p.live(cell / heads);
          if (std::find(live.begin(), live.end(), slot) == live.end()) {
            EXPECT_TRUE(
                near(p, result, answer(p, cache, live, cell / heads, cell % heads), cell / heads, cell % heads));
            continue;
          }
          EXPECT_TRUE(std::isnan(result.lse[Problem::at(cell)]));
          for (const float x : result.row(cell, 512)) ASSERT_TRUE(std::isnan(x));
        }
      }
}

TEST_F(OnCuda, ChecksIndicesWhereAsked) {
  const Backend cuda = backend();
  const auto checked = [](AttentionArgs& args) { args.check_indices = true; };
  Problem p{.heads = 16};
  p.list({{5, -1, 9}});
  EXPECT_NO_THROW(p.run(cuda, checked));
  p.list({{5, 128, 9}});
  EXPECT_THROW(p.run(cuda, checked), InvalidArgument);
  p.list({{5, -2, 9}});
  EXPECT_THROW(p.run(cuda, checked), InvalidArgument);
}

// Shapes of every kind alternate on one workspace that was garbage before workspace_init: each call leaves the tickets
// as it found them.
TEST_F(OnCuda, Tickets) {
  const Backend cuda = backend();
  std::vector<Problem> problems;
  for (const auto& [tokens, heads, topk] : {std::array{1, 64, 2048}, std::array{2, 8, 2048}, std::array{1, 128, 600},
                                            std::array{40, 16, 64}, std::array{3, 20, 1}, std::array{5, 64, 300}}) {
    problems.push_back({.tokens = tokens, .heads = heads, .format = KvFormat::fp8_ds_mla, .pages = 40});
    problems.back().random_list(topk, topk);
  }
  std::int64_t bytes = 0;
  for (const Problem& p : problems)
    bytes = std::max(bytes, attention_workspace_bytes(cuda, {p.tokens, p.heads, p.topk, 512, 64}));
  const CudaWorkspace workspace(cuda, bytes);
  std::vector<std::unique_ptr<Problem::Cache>> caches;
  std::vector<Result> want;
  for (const Problem& p : problems) {
    caches.push_back(std::make_unique<Problem::Cache>(p));
    for (std::int64_t t = 0; t < p.tokens; ++t)
      for (std::int64_t s : p.live(t)) caches.back()->fill(p, s);
    want.push_back(p.run(cuda, *caches.back()));
  }
  for (int round = 0; round < 5; ++round)
    for (std::size_t i = 0; i < problems.size(); ++i)
      EXPECT_TRUE(same_bits(problems[i].run(cuda, *caches[i], {}, workspace), want[i])) << i;
}

}  // namespace
}  // namespace sievemla::test
