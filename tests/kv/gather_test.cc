// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/gather_test.cc -- gather_latent: one rounding, zeros for what is no slot, and nothing beyond its output.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kv/cache.h"
#include "kv/e4m3.h"
#include "sievemla/error.h"
#include "support/guard.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

// The nearest of x's bf16 neighbours, a tie to the even one. x is finite and not near overflow.
std::uint16_t nearest_bf16(double x) {
  const auto near_bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> 16);
  std::uint16_t best = near_bits;
  double least = HUGE_VAL;
  for (int step : {-1, 0, 1}) {
    const auto bits = static_cast<std::uint16_t>(near_bits + step);
    const double distance = std::abs(static_cast<double>(base::to_f32(bf16{bits})) - x);
    if (distance < least || (distance == least && bits % 2 == 0)) {
      best = bits;
      least = distance;
    }
  }
  return best;
}

TEST(GatherLatent, RoundsOnceWhateverTheOutput) {
  constexpr std::int64_t kRows = 400;
  Random random(21);
  LatentCache cache({"fp8_nope", KvFormat::fp8_nope, 512, 0}, 1, kRows);
  std::vector<double> exact;
  std::vector<std::int64_t> slots;
  for (std::int64_t r = 0; r < kRows; ++r) {
    slots.push_back(r);
    float scales[4];
    for (int i = 0; i < 512; ++i) {
      const auto code = static_cast<std::uint8_t>(8 + random.below(0x77) + 128 * random.below(2));  // normal numbers
      const float value = kv::from_e4m3(code);
      cache.row(r)[i] = std::byte{code};
      if (i % 128 == 0) {  // the group's first value lies within an f32 rounding of a tie between two bf16
        const float tie = 1.f + static_cast<float>(2 * random.below(128) + 1) * 0x1p-8f;
        scales[i / 128] = tie / std::abs(value);
      }
      exact.push_back(static_cast<double>(value) * static_cast<double>(scales[i / 128]));
    }
    std::memcpy(cache.row(r) + 512, scales, sizeof scales);
  }
  int would_differ = 0;  // where an f32 on the way falls on a tie
  for (const Backend& backend : host_backends()) {
    const auto wide = gather<float>(backend, cache.view, slots);
    const auto narrow = gather<bf16>(backend, cache.view, slots);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      ASSERT_EQ(wide[i], static_cast<float>(exact[i])) << i;
      ASSERT_EQ(narrow[i].bits, nearest_bf16(exact[i])) << exact[i];
      would_differ += base::to_bf16(wide[i]).bits != narrow[i].bits;
    }
  }
  EXPECT_GT(would_differ, 0) << "the inputs no longer tell one rounding from two";
}

TEST(GatherLatent, DoubleToBf16InOneRounding) {
  constexpr double kTie = 0x1.01p0, kBeside = 0x1p-40;  // a bf16 step at 1 is 2^-7
  EXPECT_EQ(base::to_f32(base::to_bf16(kTie)), 0x1p0f);
  EXPECT_EQ(base::to_f32(base::to_bf16(kTie + kBeside)), 0x1.02p0f);
  EXPECT_EQ(base::to_f32(base::to_bf16(-kTie - kBeside)), -0x1.02p0f);
  EXPECT_EQ(base::to_f32(base::to_bf16(0x1.03p0 - kBeside)), 0x1.02p0f);
  EXPECT_EQ(base::to_f32(base::to_bf16(1e300)), kInf);
  EXPECT_EQ(base::to_f32(base::to_bf16(-double{kInf})), -kInf);
  EXPECT_TRUE(std::isnan(base::to_f32(base::to_bf16(double{kNan}))));
  EXPECT_EQ(base::to_bf16(-0.0).bits, 0x8000);
  EXPECT_EQ(base::to_bf16(-1e-300).bits, 0x8000);
  static_assert(base::to_bf16(1.0).bits == 0x3F80);
}

TEST(GatherLatent, WhatIsNoSlotReadsAsZerosAndNothingElseIsWritten) {
  constexpr std::int64_t kPad = 7;
  const std::vector<std::int64_t> slots = {3, -1, 31, 32, INT64_MIN, INT64_MAX, 0, 3, std::int64_t{1} << 32};
  const std::vector<bool> valid = {true, false, true, false, false, false, true, true, false};
  const auto n = static_cast<std::int64_t>(slots.size());
  for (const Layout& layout : kLayouts)
    for (const Backend& backend : host_backends()) {
      SCOPED_TRACE(std::string(layout.name) + ", " + describe(backend));
      Random random(22);
      const std::int64_t width = layout.latent + layout.rope, stride = width + kPad;
      const std::vector<std::int64_t> all = random.distinct(32, 32);
      LatentCache cache(layout, 2, 16);
      const std::vector<float> x = random.f32s(32 * width);
      write_latent(backend, write_args(x, width, tensor(all.data(), {32}), cache.view));
      const auto before = cache.bytes;

      Guarded<float> out(n * stride, kNan);
      gather_latent(backend, {cache.view, tensor(slots.data(), {n}), rows_view(out.data(), n, width, stride)});
      EXPECT_TRUE(out.intact());
      EXPECT_TRUE(cache.bytes == before);
      for (std::int64_t r = 0; r < n; ++r) {
        const std::int64_t slot = slots[static_cast<std::size_t>(r)];
        const bool is_slot = valid[static_cast<std::size_t>(r)];
        const std::vector<float> want = is_slot ? gather(Backend::reference(), cache.view, {slot})
                                                : std::vector<float>(static_cast<std::size_t>(width));
        for (std::int64_t i = 0; i < stride; ++i) {
          const float got = out[static_cast<std::size_t>(r * stride + i)];
          if (i >= width) ASSERT_TRUE(std::isnan(got)) << "padding of row " << r << " was written";
          else
            ASSERT_EQ(std::bit_cast<std::uint32_t>(got),
                      std::bit_cast<std::uint32_t>(want[static_cast<std::size_t>(i)]));
        }
      }
    }
}

TEST(GatherLatent, NoSlotsAndNoPages) {
  LatentCache cache(kLayouts[6], 1, 16);
  KvCache empty = cache.view;
  empty.pages.shape[0] = 0;
  empty.pages.data = nullptr;
  for (const Backend& backend : host_backends()) {
    gather_latent(backend, {cache.view, tensor<std::int32_t>(nullptr, {0}), tensor<float>(nullptr, {0, 576})});
    EXPECT_EQ(gather(backend, empty, {0}), std::vector<float>(576, 0.f));
  }
}

TEST(GatherLatent, RefusesWhatDoesNotFit) {
  LatentCache cache(kLayouts[6], 1, 16);
  const std::vector<std::int64_t> slots = {0, 1};
  std::vector<float> out(2 * 576, kNan);
  const GatherLatentArgs good{cache.view, tensor(slots.data(), {2}), tensor(out.data(), {2, 576})};
  for (const Backend& backend : host_backends()) {
    GatherLatentArgs bad = good;
    bad.out.shape[1] = 512;
    EXPECT_THROW(gather_latent(backend, bad), InvalidArgument);
    bad = good;
    bad.out.shape[0] = 1;
    EXPECT_THROW(gather_latent(backend, bad), InvalidArgument);
    bad = good;
    bad.out.dtype = DType::i32;
    EXPECT_THROW(gather_latent(backend, bad), InvalidArgument);
    bad = good;
    bad.out.dtype = DType::f16;
    EXPECT_THROW(gather_latent(backend, bad), Unsupported);
    bad = good;
    bad.slots.dtype = DType::u8;
    EXPECT_THROW(gather_latent(backend, bad), InvalidArgument);
    bad = good;
    bad.cache.pages.shape[2] = 655;
    EXPECT_THROW(gather_latent(backend, bad), InvalidArgument);
  }
  for (float x : out) EXPECT_TRUE(std::isnan(x));
}

}  // namespace
}  // namespace sievemla::test
