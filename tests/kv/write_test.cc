// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/write_test.cc -- write_latent: where rows go, what is left alone, and what is refused.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "kv/cache.h"
#include "sievemla/error.h"
#include "support/near.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

// Rows of `stride` elements, NaN after the first `width` of each.
template <class T>
std::vector<T> poisoned_rows(Random& random, std::int64_t rows, std::int64_t width, std::int64_t stride) {
  std::vector<T> x(static_cast<std::size_t>(rows * stride), base::round_to<T>(kNan));
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t i = 0; i < width; ++i)
      x[static_cast<std::size_t>(r * stride + i)] = base::round_to<T>(random.uniform_f32(0.25f));
  return x;
}

// Every tensor has NaN in the 64 elements behind each row of 512: input rows, cache rows, output rows.
TEST(Case08, WriteAndGatherWithoutRope) {
  constexpr std::int64_t kTokens = 20;
  constexpr std::size_t kWidth = 512, kStride = 576;
  for (const Layout& layout : {Layout{"bf16", KvFormat::bf16, 512, 0, 64}, Layout{"f32", KvFormat::f32, 512, 0, 64},
                               Layout{"fp8_nope", KvFormat::fp8_nope, 512, 0, 128}})
    for (const Backend& backend : host_backends()) {
      SCOPED_TRACE(std::string(layout.name) + ", " + describe(backend));
      Random random(8);
      const auto x = poisoned_rows<bf16>(random, kTokens, kWidth, kStride);
      const std::vector<std::int64_t> slots = random.distinct(kTokens, 32);
      LatentCache strided(layout, 2, 16);
      std::fill(strided.bytes.begin(), strided.bytes.end(), std::byte{0xFF});  // NaN as f32, bf16 and e4m3
      const WriteLatentArgs args = write_args(x, kStride, tensor(slots.data(), {kTokens}), strided.view);
      ASSERT_EQ(args.rope.data, nullptr);
      write_latent(backend, args);

      std::vector<float> out(kTokens * kStride, kNan);
      gather_latent(backend, {strided.view, args.slots, rows_view(out.data(), kTokens, kWidth, kStride)});

      Layout tight = layout;
      tight.row_padding = 0;
      LatentCache contiguous(tight, 2, 16);
      write_latent(backend, write_args(x, kStride, args.slots, contiguous.view));
      const std::vector<float> want = gather(backend, contiguous.view, slots);
      for (std::size_t t = 0; t < kTokens; ++t)
        for (std::size_t i = 0; i < kStride; ++i) {
          const float got = out[t * kStride + i];
          if (i >= kWidth) ASSERT_TRUE(std::isnan(got)) << "written past the row: " << t << ", " << i;
          else ASSERT_EQ(got, want[t * kWidth + i]) << t << ", " << i;
        }
    }
}

// Rows land at page * page stride + offset * row stride, and not a byte elsewhere changes: other layers' pages lie
// between the pages, padding between the rows. Each row is compared with the same token written alone.
TEST(Case10, CachePageSizes) {
  constexpr std::int64_t kPages = 3, kPagePadding = 48;
  for (std::int64_t page_size : {1, 16, 32, 64, 128, 256, 544, 1152, 2176})
    for (const Layout& layout : kLayouts) {
      SCOPED_TRACE(std::string(layout.name) + ", page " + std::to_string(page_size));
      Random random(static_cast<std::uint64_t>(page_size));
      // Logical pages 0, 1, 2 lie in permuted physical pages; their first and last rows and some between are written.
      const std::vector<std::int64_t> physical = random.distinct(kPages, kPages);
      std::vector<std::int64_t> slots;
      for (std::int64_t page : physical)
        for (std::int64_t i : {std::int64_t{0}, page_size / 3, page_size / 2, page_size - 1})
          if (const std::int64_t slot = page * page_size + i; slots.empty() || slot != slots.back())
            slots.push_back(slot);
      slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
      const auto tokens = static_cast<std::int64_t>(slots.size());
      const std::int64_t width = layout.latent + layout.rope, stride = width + 3;
      const auto x = poisoned_rows<float>(random, tokens, width, stride);

      LatentCache want(layout, kPages, page_size, kPagePadding);
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::vector<float> one(x.begin() + t * stride, x.begin() + (t + 1) * stride);
        LatentCache alone(layout, 1, 1);
        const std::int64_t slot = 0;
        write_latent(Backend::reference(), write_args(one, stride, tensor(&slot, {1}), alone.view));
        std::memcpy(want.row(slots[static_cast<std::size_t>(t)]), alone.row(0),
                    static_cast<std::size_t>(alone.row_bytes));
      }
      for (const Backend& backend : {Backend::reference(), Backend::cpu({.threads = 2})}) {
        LatentCache got(layout, kPages, page_size, kPagePadding);
        write_latent(backend, write_args(x, stride, tensor(slots.data(), {tokens}), got.view));
        ASSERT_TRUE(got.same_bytes(want)) << describe(backend);
        const std::vector<float> rows = gather(backend, got.view, slots);
        for (float value : rows) ASSERT_LE(std::abs(value), 0.25f * (1 + 0x1p-4f));  // NaN would fail too
      }
    }
}

TEST(WriteLatent, EveryBackendThreadCountAndSlotTypeWritesTheSameBytes) {
  constexpr std::int64_t kTokens = 150, kSlots = 192;
  for (const Layout& layout : kLayouts)
    for (ScaleRule rule : {ScaleRule::arbitrary, ScaleRule::power_of_two}) {
      SCOPED_TRACE(layout.name);
      Random random(3);
      const std::int64_t width = layout.latent + layout.rope;
      std::vector<float> x = random.f32s(kTokens * width);
      for (float& v : x) v *= static_cast<float>(std::exp2(40 * random.uniform()));
      for (int i = 0; i < 30; ++i) {  // and what arithmetic stumbles over
        constexpr float kOdd[] = {0.f, -0.f, kNan, kInf, -kInf, 1e-45f, -1e-38f, 3.4e38f};
        x[static_cast<std::size_t>(random.below(kTokens * width))] = kOdd[i % 8];
      }
      std::vector<std::int64_t> slots = random.distinct(kTokens, kSlots);
      for (std::size_t i = 5; i < slots.size(); i += 17) slots[i] = -1 - static_cast<std::int64_t>(i);
      const std::vector<std::int32_t> narrow(slots.begin(), slots.end());

      LatentCache want(layout, 4, 48);
      write_latent(Backend::reference(), write_args(x, width, tensor(slots.data(), {kTokens}), want.view, rule));
      for (const Backend& backend : host_backends())
        for (const TensorView& view : {tensor(slots.data(), {kTokens}), tensor(narrow.data(), {kTokens})}) {
          LatentCache got(layout, 4, 48);
          write_latent(backend, write_args(x, width, view, got.view, rule));
          EXPECT_TRUE(got.same_bytes(want)) << describe(backend) << ", slots " << name_of(view.dtype);
        }
    }
}

// bf16 tokens are the same numbers as their f32 selves.
TEST(WriteLatent, Bf16AndF32InputsGiveTheSameRow) {
  constexpr std::int64_t kTokens = 9;
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.name);
    Random random(4);
    const std::int64_t width = layout.latent + layout.rope;
    const std::vector<bf16> narrow = random.bf16s(kTokens * width);
    std::vector<float> wide;
    for (bf16 v : narrow) wide.push_back(base::to_f32(v));
    const std::vector<std::int64_t> slots = random.distinct(kTokens, 16);
    LatentCache from_bf16(layout, 1, 16), from_f32(layout, 1, 16);
    write_latent(Backend::reference(), write_args(narrow, width, tensor(slots.data(), {kTokens}), from_bf16.view));
    write_latent(Backend::reference(), write_args(wide, width, tensor(slots.data(), {kTokens}), from_f32.view));
    EXPECT_TRUE(from_bf16.same_bytes(from_f32));
    if (info(layout.format).scale_group == 0) {
      EXPECT_TRUE(near(gather(Backend::reference(), from_bf16.view, slots), wide, 0, 0));
    }
  }
}

TEST(WriteLatent, F32InputsAreRoundedToNearestEvenInBf16Rows) {
  constexpr Layout kNarrow{"bf16", KvFormat::bf16, 4, 0};
  const std::vector<float> x = {0x1.01p0f, 0x1.03p0f, 0x1.010002p0f, -0x1.01p0f};  // a tie down, a tie up, above a tie
  const std::int32_t slot = 0;
  LatentCache cache(kNarrow, 1, 1);
  write_latent(Backend::reference(), write_args(x, 4, tensor(&slot, {1}), cache.view));
  EXPECT_EQ(gather(Backend::reference(), cache.view, {0}), (std::vector<float>{0x1p0f, 0x1.04p0f, 0x1.02p0f, -0x1p0f}));
}

TEST(WriteLatent, NegativeSlotsAreSkippedAndTheirTokensNeverRead) {
  constexpr std::int64_t kTokens = 40;
  for (const Layout& layout : kLayouts)
    for (const Backend& backend : host_backends()) {
      SCOPED_TRACE(std::string(layout.name) + ", " + describe(backend));
      const std::vector<float> x(static_cast<std::size_t>(layout.latent + layout.rope), 1.f);
      const std::vector<std::int64_t> slots(kTokens, -1);
      LatentCache cache(layout, 2, 16);
      WriteLatentArgs args = write_args(x, 0, tensor(slots.data(), {kTokens}), cache.view);
      for (TensorView* input : {&args.latent, &args.rope})  // far beyond any memory: a read would crash
        if (*input) input->data = static_cast<std::byte*>(input->data) + (std::int64_t{1} << 46);
      write_latent(backend, args);
      for (std::byte b : cache.bytes) ASSERT_EQ(b, kUntouched);
    }
}

TEST(WriteLatent, NoTokensIsANoOp) {
  for (const Backend& backend : host_backends()) {
    LatentCache cache(kLayouts[3], 1, 16);
    write_latent(backend, write_args(std::vector<float>{}, 576, tensor<std::int64_t>(nullptr, {0}), cache.view));
    KvCache empty = cache.view;
    empty.pages.shape[0] = 0;
    empty.pages.data = nullptr;
    const std::int64_t slot = -1;
    write_latent(backend, write_args(std::vector<float>(576), 576, tensor(&slot, {1}), empty));
    for (std::byte b : cache.bytes) ASSERT_EQ(b, kUntouched);
  }
}

struct CountingPool {
  std::atomic<int> runs{0}, bodies{0};
  ParallelFor handle() {
    return {[](void* self, std::int64_t n, ParallelFor::Body body, void* body_context) {
              auto& pool = *static_cast<CountingPool*>(self);
              ++pool.runs;
              for (std::int64_t i = n; i-- > 0; ++pool.bodies) body(body_context, i, 0);  // any order is legal
            },
            this};
  }
};

TEST(WriteLatent, AHostsOwnThreadPoolIsUsed) {
  CountingPool pool;
  const Backend backend = Backend::cpu({.threads = 3, .host = pool.handle()});
  constexpr std::int64_t kTokens = 100;
  Random random(5);
  const std::vector<float> x = random.f32s(kTokens * 576);
  const std::vector<std::int64_t> slots = random.distinct(kTokens, 128);
  LatentCache got(kLayouts[6], 2, 64), want(kLayouts[6], 2, 64);
  write_latent(backend, write_args(x, 576, tensor(slots.data(), {kTokens}), got.view));
  EXPECT_EQ(pool.runs, 1);
  EXPECT_GT(pool.bodies, 1) << "100 rows are worth sharing";
  write_latent(Backend::reference(), write_args(x, 576, tensor(slots.data(), {kTokens}), want.view));
  EXPECT_TRUE(got.same_bytes(want));
  gather(backend, got.view, slots);
  EXPECT_EQ(pool.runs, 2);
}

// ---- bad calls: InvalidArgument, and not a byte written ---------------------------------------------

class BadWrite : public testing::Test {
 protected:
  template <class E = InvalidArgument>
  void refuses(const char* part_of_message, const WriteLatentArgs& bad) {
    for (const Backend& backend : host_backends()) {
      try {
        write_latent(backend, bad);
        ADD_FAILURE() << "accepted, want: " << part_of_message;
      } catch (const E& e) {
        EXPECT_NE(std::string(e.what()).find(part_of_message), std::string::npos) << e.what();
      }
      for (std::byte b : cache.bytes) ASSERT_EQ(b, kUntouched) << part_of_message;
    }
  }

  std::vector<float> x = std::vector<float>(3 * 576, 1.f);
  std::vector<std::int64_t> slots = {4, 0, 9};
  LatentCache cache{kLayouts[6], 2, 8};
  WriteLatentArgs good = write_args(x, 576, tensor(slots.data(), {3}), cache.view);
};

TEST_F(BadWrite, SlotBeyondTheCache) {
  for (std::int64_t slot : {std::int64_t{16}, std::int64_t{1} << 32, INT64_MAX}) {
    slots[2] = slot;  // the tokens before it are good, and still nothing is written
    refuses(("a slot must be below 16, the cache's slots: got " + std::to_string(slot) + " for token 2").c_str(), good);
  }
}

TEST_F(BadWrite, Shapes) {
  WriteLatentArgs bad = good;
  bad.latent.shape[1] = 511;
  refuses("write_latent: latent", bad);
  bad = good;
  bad.rope = {};
  refuses("write_latent: rope", bad);
  bad = good;
  bad.rope.shape[0] = 2;
  refuses("write_latent: rope", bad);
  bad = good;
  bad.slots.shape[0] = 2;
  refuses("write_latent: slots", bad);
  bad = good;
  bad.latent.stride[1] = 2;
  refuses("the last dimension must be contiguous", bad);
  bad = good;
  bad.latent = {};
  refuses("write_latent: latent", bad);
}

TEST_F(BadWrite, Dtypes) {
  WriteLatentArgs bad = good;
  bad.rope.dtype = DType::bf16;
  refuses("write_latent: rope", bad);  // the two halves of a row have one dtype
  bad = good;
  bad.slots.dtype = DType::f32;
  refuses("the dtype must be i32 or i64", bad);
  bad = good;
  bad.latent.dtype = DType::f16;
  refuses<Unsupported>("--dtype bfloat16", bad);
}

TEST_F(BadWrite, CacheGeometry) {
  WriteLatentArgs bad = good;
  bad.cache.rope = 0;
  refuses("a row of fp8_ds_mla has a rope of 64", bad);
  bad = good;
  bad.cache.format = KvFormat::fp8_nope;
  bad.cache.rope = 0;
  refuses("rope must be absent where a row has none", bad);
  bad = good;
  bad.cache.format = KvFormat::bf16;
  refuses("write_latent: cache", bad);
}

}  // namespace
}  // namespace sievemla::test
