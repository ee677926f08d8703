// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/e4m3_test.cc -- software e4m3 against its definition: all 256 codes, every bf16, and around every midpoint.
#include "kv/e4m3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/number.h"

namespace sievemla::kv {
namespace {

// sign | 4 bits of exponent (bias 7) | 3 bits of mantissa; exponent 0: mantissa * 2^-9; no infinity, 1111.111 is NaN.
double value_by_definition(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest of all finite codes; a tie goes to the even code. Beyond 448 the nearest is 448.
int nearest_by_search(double x) {
  if (std::isnan(x)) return 0x7F | (std::signbit(x) ? 0x80 : 0);
  int best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int code = 0; code < 0x7F; ++code) {
    const double distance = std::isinf(x) ? 0x7E - code : std::abs(std::abs(x) - value_by_definition(code));
    if (distance < least || (distance == least && code % 2 == 0)) {
      best = code;
      least = distance;
    }
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

TEST(Case11, AllE4m3Codes) {
  for (int code = 0; code < 256; ++code) {
    const float got = from_e4m3(static_cast<std::uint8_t>(code));
    const double want = value_by_definition(code);
    EXPECT_EQ(std::signbit(got), code >= 0x80) << code;
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
    } else {
      EXPECT_EQ(got, want) << code;
      EXPECT_EQ(to_e4m3(got), code);
    }
    EXPECT_EQ(std::isnan(kE4m3Value[static_cast<std::size_t>(code)]), std::isnan(want)) << code;
  }
  EXPECT_EQ(from_e4m3(0x7E), 448.f);
  EXPECT_EQ(from_e4m3(0x01), 0x1p-9f);
}

TEST(Case11, EveryBf16RoundsToTheNearestEvenCode) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float x = base::to_f32(bf16{static_cast<std::uint16_t>(bits)});
    ASSERT_EQ(to_e4m3(x), nearest_by_search(x)) << "bf16 bits " << bits << ", " << x;
    ASSERT_EQ(to_e4m3(double{x}), nearest_by_search(x)) << "bf16 bits " << bits << ", " << x;
  }
}

// A midpoint needs five bits, so every one is a bf16; its f32 neighbours are what bf16 cannot tell apart.
TEST(Case11, OneUlpBesideAMidpointDecides) {
  for (int code = 0; code < 0x7E; ++code)
    for (float sign : {1.f, -1.f}) {
      const auto midpoint = static_cast<float>((value_by_definition(code) + value_by_definition(code + 1)) / 2) * sign;
      const int bit = sign < 0 ? 0x80 : 0;
      EXPECT_EQ(to_e4m3(midpoint), (code + code % 2) | bit) << midpoint;
      EXPECT_EQ(to_e4m3(std::nextafter(midpoint, 0.f)), code | bit) << midpoint;
      EXPECT_EQ(to_e4m3(std::nextafter(midpoint, sign * 1000.f)), (code + 1) | bit) << midpoint;
      // Nearer than f32 can say.
      EXPECT_EQ(to_e4m3(std::nextafter(double{midpoint}, 0.)), code | bit) << midpoint;
      EXPECT_EQ(to_e4m3(std::nextafter(double{midpoint}, sign * 1000.)), (code + 1) | bit) << midpoint;
    }
}

TEST(Case11, ZerosNansAndInfinities) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kQuiet = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(to_e4m3(0.f), 0x00);
  EXPECT_EQ(to_e4m3(-0.f), 0x80);
  EXPECT_EQ(to_e4m3(kInfinity), 0x7E);
  EXPECT_EQ(to_e4m3(-kInfinity), 0xFE);
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::max()), 0x7E);
  EXPECT_EQ(to_e4m3(std::nextafter(464.f, 1000.f)), 0x7E);  // where it would round to 480, were that a number
  EXPECT_EQ(to_e4m3(kQuiet), 0x7F);
  EXPECT_EQ(to_e4m3(std::copysign(kQuiet, -1.f)), 0xFF);
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::denorm_min()), 0x00);
  EXPECT_EQ(to_e4m3(0x1p-10f), 0x00);  // half of the least code: a tie, to even
}

static_assert(to_e4m3(1.f) == 0x38 && from_e4m3(0x38) == 1.f, "usable at compile time");

}  // namespace
}  // namespace sievemla::kv
