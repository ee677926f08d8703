// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/quantise_test.cc -- scales of fp8 rows: where they lie, how they are picked, and how far a value may move.
#include "kv/quantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kv/cache.h"
#include "support/near.h"
#include "support/property.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

constexpr Layout kPacked{"fp8_ds_mla", KvFormat::fp8_ds_mla, 512, 64};
constexpr ScaleRule kRules[] = {ScaleRule::arbitrary, ScaleRule::power_of_two};

LatentCache written(const Backend& backend, const std::vector<float>& row, ScaleRule rule) {
  LatentCache cache(kPacked, 1, 1);
  const std::int64_t slot = 0;
  write_latent(backend, write_args(row, 576, tensor(&slot, {1}), cache.view, rule));
  return cache;
}
template <class T>
T read(const LatentCache& cache, std::size_t byte) {
  T value;
  std::memcpy(&value, cache.bytes.data() + byte, sizeof value);
  return value;
}

// ---- Case 12: scales are f32, one per 128, at byte 512 ----------------------------------------------

TEST(Case12, ScalesAreF32) {
  LatentCache cache(kPacked, 1, 1);
  constexpr float kScales[] = {0.75f, 0.3f, 3.0f, 1e-6f};  // as e8m0 they would be 0.5 or 1, 0.25 ...
  std::memset(cache.bytes.data(), 0x38, 512);              // e4m3 1.0
  std::memcpy(cache.bytes.data() + 512, kScales, sizeof kScales);
  for (std::size_t i = 0; i < 64; ++i) {
    const bf16 rope = base::to_bf16(static_cast<float>(i) - 32);
    std::memcpy(cache.bytes.data() + 528 + 2 * i, &rope, sizeof rope);
  }
  for (const Backend& backend : host_backends()) {
    const auto as_f32 = gather<float>(backend, cache.view, {0});
    const auto as_bf16 = gather<bf16>(backend, cache.view, {0});
    for (std::size_t i = 0; i < 576; ++i) {
      const float want = i < 512 ? kScales[i / 128] : static_cast<float>(i) - 544;
      ASSERT_EQ(as_f32[i], want) << i;
      ASSERT_EQ(as_bf16[i].bits, base::to_bf16(want).bits) << i;
    }
  }
}

TEST(Case12, GoldenOffsetsUnderBothRules) {
  // Group g holds amax once, at element 3 g, and amax / 448 * 2 at the next; the rope counts.
  constexpr float kAmax[] = {448.f * 0.75f, 448.f * 3, 448.f * 4, 448.f};
  constexpr float kArbitrary[] = {0.75f, 3.f, 4.f, 1.f}, kPowers[] = {1.f, 4.f, 4.f, 1.f};
  constexpr int kCodesOfPowers[][2] = {{0x7A, 0x3C}, {0x7A, 0x3C}, {0x7E, 0x40}, {0x7E, 0x40}};  // 336, 1.5; 448, 2
  std::vector<float> row(576, 0.f);
  for (std::size_t g = 0; g < 4; ++g) {
    row[g * 128 + 3 * g] = -kAmax[g];
    row[g * 128 + 3 * g + 1] = kAmax[g] / 448 * 2;
  }
  for (std::size_t i = 0; i < 64; ++i) row[512 + i] = static_cast<float>(i) / 4;

  for (const Backend& backend : host_backends())
    for (ScaleRule rule : kRules) {
      const LatentCache cache = written(backend, row, rule);
      ASSERT_EQ(cache.bytes.size(), 656u);
      const bool arbitrary = rule == ScaleRule::arbitrary;
      for (std::size_t g = 0; g < 4; ++g) {
        EXPECT_EQ(read<float>(cache, 512 + 4 * g), arbitrary ? kArbitrary[g] : kPowers[g]);
        for (std::size_t i = 0; i < 128; ++i) {
          const int first = arbitrary ? 0x7E : kCodesOfPowers[g][0], second = arbitrary ? 0x40 : kCodesOfPowers[g][1];
          const int want = i == 3 * g ? 0x80 | first : i == 3 * g + 1 ? second : 0;
          EXPECT_EQ(read<std::uint8_t>(cache, g * 128 + i), want) << g << ", " << i;
        }
      }
      for (std::size_t i = 0; i < 64; ++i)
        EXPECT_EQ(read<bf16>(cache, 528 + 2 * i).bits, base::to_bf16(static_cast<float>(i) / 4).bits);
    }
}

TEST(Case12, PowerOfTwoScalesAreTheNextAtOrAbove) {
  using kv::group_scale;
  EXPECT_EQ(group_scale(448.f, ScaleRule::power_of_two), 1.f);
  EXPECT_EQ(group_scale(std::nextafter(448.f, 500.f), ScaleRule::power_of_two), 2.f);
  EXPECT_EQ(group_scale(std::nextafter(448.f, 0.f), ScaleRule::power_of_two), 1.f);
  EXPECT_EQ(group_scale(225.f, ScaleRule::power_of_two), 1.f);
  EXPECT_EQ(group_scale(224.f, ScaleRule::power_of_two), 0.5f);
  EXPECT_EQ(group_scale(1.f, ScaleRule::arbitrary), 1.f / 448.f);
  EXPECT_EQ(group_scale(1e-45f, ScaleRule::arbitrary), 0x1p-126f);  // the least normal f32
  EXPECT_EQ(group_scale(1e-45f, ScaleRule::power_of_two), 0x1p-126f);
}

// ---- Case 13 ----------------------------------------------------------------------------------------

TEST(Case13, ZeroAndTinyRows) {
  for (const Backend& backend : host_backends())
    for (ScaleRule rule : kRules)
      for (float amax : {0.f, 1e-45f, 1e-38f, 1e-30f, 1.f, 6e4f, 1e38f}) {
        SCOPED_TRACE(amax);
        Random random(13);
        std::vector<float> row(576, 0.f);
        for (std::size_t i = 0; i < 512; ++i) row[i] = static_cast<float>(random.uniform()) * amax;
        for (std::size_t g = 0; g < 4; ++g) row[g * 128 + 17] = g % 2 ? amax : -amax;
        const LatentCache cache = written(backend, row, rule);
        for (std::size_t g = 0; g < 4; ++g) {
          const float scale = read<float>(cache, 512 + 4 * g);
          EXPECT_TRUE(std::isnormal(scale) && scale > 0) << scale;
          if (amax == 0) {
            EXPECT_EQ(scale, 1.f);
          }
        }
        const std::vector<float> got = gather(backend, cache.view, {0});
        // 2^-4 of the block's amax, see the property below; and no finer than half the least code of the least scale.
        for (std::size_t i = 0; i < 512; ++i) {
          ASSERT_LE(std::abs(got[i] - row[i]), std::max(amax * 0x1p-4f, 0x1p-136f)) << i;
          if (amax == 0) {
            ASSERT_EQ(got[i], 0.f);
          }
        }
      }
}

// ---- NaN and infinity -------------------------------------------------------------------------------

TEST(NanRows, AGroupThatHoldsANanOrAnInfinityIsNanWhereverItIsRead) {
  for (const Backend& backend : host_backends())
    for (ScaleRule rule : kRules)
      for (float bad : {kNan, -kNan, kInf, -kInf})
        for (std::size_t at : {std::size_t{128}, std::size_t{200}, std::size_t{255}}) {
          std::vector<float> row(576, 1.f);
          row[at] = bad;
          const LatentCache cache = written(backend, row, rule);
          EXPECT_TRUE(std::isnan(read<float>(cache, 512 + 4)));
          const std::vector<float> got = gather(backend, cache.view, {0});
          for (std::size_t i = 0; i < 576; ++i) {
            ASSERT_EQ(std::isnan(got[i]), i / 128 == 1) << i;
            // The codes are ordinary numbers: matrix units that read 0x7F as 480 must not matter.
            if (i / 128 == 1) {
              ASSERT_EQ(read<std::uint8_t>(cache, i), 0) << i;
            }
          }
        }
}

TEST(NanRows, RopeAndPlainRowsKeepNansAndInfinities) {
  for (const Layout& layout : kLayouts) {
    if (layout.rope == 0) continue;
    const auto width = static_cast<std::size_t>(layout.latent + layout.rope);
    std::vector<float> row(width, 1.f);
    row[width - 1] = kNan;
    row[width - 2] = -kInf;
    const std::int64_t slot = 0;
    LatentCache cache(layout, 1, 1);
    write_latent(Backend::reference(), write_args(row, layout.latent + layout.rope, tensor(&slot, {1}), cache.view));
    const std::vector<float> got = gather(Backend::reference(), cache.view, {0});
    EXPECT_TRUE(std::isnan(got[width - 1])) << layout.name;
    EXPECT_EQ(got[width - 2], -kInf) << layout.name;
    EXPECT_NEAR(got[width - 3], 1.f, 0) << layout.name;
  }
}

// ---- properties -------------------------------------------------------------------------------------

// A row whose four groups have magnitudes of their own, anywhere in the f32 range, some elements far below the rest.
std::vector<float> any_row() {
  Random random(*rc::gen::arbitrary<std::uint64_t>());
  std::vector<float> row(576);
  for (std::size_t g = 0; g < 5; ++g) {
    const int exponent = *rc::gen::inRange(-149, 128);
    for (std::size_t i = g * 128; i < std::min<std::size_t>(576, (g + 1) * 128); ++i)
      row[i] = static_cast<float>(std::ldexp(random.uniform(), exponent - (random.below(4) == 0 ? 9 : 0)));
  }
  return row;
}
float amax_of(const std::vector<float>& row, std::size_t group) {
  float amax = 0.f;
  for (std::size_t i = group * 128; i < (group + 1) * 128; ++i) amax = std::max(amax, std::abs(row[i]));
  return amax;
}

// The largest code step is 32 (values 256 to 448), so a value moves by at most 16 scales. Arbitrary: 16 / 448 amax.
// Power of two: where that step is reached amax is above 256 scales, hence 16 / 256 = 2^-4 amax; below, the step is
// half. The reading multiplies and rounds once more: 2^-24 of 448 scales. Under the least scale, 2^-126, half its
// least code counts.
RC_GTEST_PROP(Quantise, AValueMovesByAtMostASixteenthOfItsBlocksMaximum, ()) {
  const std::vector<float> row = any_row();
  for (ScaleRule rule : kRules) {
    const std::vector<float> got = gather(Backend::reference(), written(Backend::reference(), row, rule).view, {0});
    for (std::size_t i = 0; i < 512; ++i)
      RC_ASSERT(std::abs(double{got[i]} - double{row[i]}) <= std::max(amax_of(row, i / 128) * 0x1.00001p-4, 0x1p-136));
    for (std::size_t i = 512; i < 576; ++i) RC_ASSERT(got[i] == base::to_f32(base::to_bf16(row[i])));
  }
}

// What has been quantised once stays as it is: the values under powers of two (the scale may halve and the codes
// double), and the codes under arbitrary scales, where amax / 448 * 448 / 448 may differ from amax / 448 in the last
// bit.
RC_GTEST_PROP(Quantise, ASecondTimeChangesNothing, ()) {
  const std::vector<float> row = any_row();
  const Backend backend = Backend::reference();
  for (ScaleRule rule : kRules) {
    const LatentCache once = written(backend, row, rule);
    const std::vector<float> values = gather(backend, once.view, {0});
    const LatentCache twice = written(backend, values, rule);
    if (rule == ScaleRule::power_of_two) {
      RC_ASSERT(gather(backend, twice.view, {0}) == values);
      continue;
    }
    for (std::size_t g = 0; g < 4; ++g) {
      const float a = read<float>(once, 512 + 4 * g), b = read<float>(twice, 512 + 4 * g);
      if (amax_of(values, g) == 0) continue;  // all below half the least code: the second scale is that of a zero group
      RC_ASSERT(b == a || b == std::nextafter(a, 0.f) || b == std::nextafter(a, kInf));
      RC_ASSERT(std::memcmp(once.bytes.data() + g * 128, twice.bytes.data() + g * 128, 128) == 0);
    }
  }
}

// From bf16 tokens even the scales stay: checked for every significand.
TEST(Quantise, RequantisingRowsOfBf16TokensIsByteForByteTheSame) {
  for (std::uint16_t significand = 0; significand < 128; ++significand) {
    Random random(significand);
    std::vector<float> row = random.f32s(576, 0.5f);
    for (std::size_t g = 0; g < 4; ++g)
      row[g * 128] = base::to_f32(bf16{static_cast<std::uint16_t>(0x3F80 | significand)});
    const LatentCache once = written(Backend::reference(), row, ScaleRule::arbitrary);
    const LatentCache twice =
        written(Backend::reference(), gather(Backend::reference(), once.view, {0}), ScaleRule::arbitrary);
    ASSERT_TRUE(once.same_bytes(twice)) << significand;
  }
}

}  // namespace
}  // namespace sievemla::test
