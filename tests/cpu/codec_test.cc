// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cpu/codec_test.cc -- the codec of every tier that this machine runs, bit for bit against kv/e4m3.h and
// base/number.h.
#include "cpu/codec/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/number.h"
#include "cpu/codec/quantise.h"
#include "cpu/isa/isa.h"
#include "kv/quantise.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

using cpu::Isa;
using cpu::codec::Codec;
using cpu::codec::kGroup;
using cpu::codec::Real;

struct Tier {
  const char* name;
  const Codec& codec;
};
std::vector<Tier> tiers() {
  std::vector<Tier> all = {{"portable", cpu::codec::kPortable}};
#if defined(__x86_64__)
  if (cpu::machine_tiers().highest >= Isa::avx2) all.push_back({"avx2", cpu::codec::kAvx2});
  if (cpu::machine_tiers().highest >= Isa::avx512) all.push_back({"avx512", cpu::codec::kAvx512});
#endif
  return all;
}

testing::AssertionResult encodes(const Codec& codec, const float* x, float scale) {
  for (bool exact : {true, false}) {
    std::uint8_t codes[kGroup];
    codec.encode(x, scale, exact, codes);
    for (int i = 0; i < kGroup; ++i) {
      const int want =
          exact ? kv::to_e4m3(static_cast<double>(x[i]) / static_cast<double>(scale)) : kv::to_e4m3(x[i] / scale);
      if (codes[i] != want)
        return testing::AssertionFailure() << x[i] << " / " << scale << ": code " << int{codes[i]} << ", want " << want;
    }
  }
  return testing::AssertionSuccess();
}

TEST(Codec, EveryBf16IsEncodedAsTheDefinitionSays) {
  for (const Tier& tier : tiers())
    for (float scale : {1.f, 0.01f, 3.f, 0x1.234568p-30f, std::numeric_limits<float>::min()})
      for (unsigned first = 0; first < 0x10000; first += kGroup) {
        float x[kGroup];
        for (unsigned i = 0; i < kGroup; ++i) x[i] = base::to_f32(bf16{static_cast<std::uint16_t>(first + i)});
        for (float& v : x) v = std::isfinite(v) ? v : 0.f;
        ASSERT_TRUE(encodes(tier.codec, x, scale)) << tier.name;
      }
}

// Any f32, and quotients on a tie of two codes or one ulp of the numerator beside it.
TEST(Codec, F32IsEncodedInOneRounding) {
  for (const Tier& tier : tiers()) {
    Random random(1);
    for (int round = 0; round < 4000; ++round) {
      float any[kGroup], ties[kGroup];
      const float scale = static_cast<float>((1.5 + random.uniform()) * std::exp2(120 * random.uniform()));
      for (int i = 0; i < kGroup; ++i) {
        any[i] = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
        if (!std::isfinite(any[i])) any[i] = 0;
        const auto code = static_cast<std::uint8_t>(random.below(0x7D));
        const double tie = (double{kv::from_e4m3(code)} + double{kv::from_e4m3(code + 1)}) / 2;
        ties[i] = static_cast<float>(tie * static_cast<double>(scale));
        if (random.below(3) == 0) ties[i] = std::nextafter(ties[i], random.below(2) ? 0.f : kInf);
        if (random.below(2)) ties[i] = -ties[i];
      }
      ASSERT_TRUE(encodes(tier.codec, any, scale)) << tier.name;
      ASSERT_TRUE(encodes(tier.codec, ties, scale)) << tier.name;
    }
  }
}

TEST(Codec, AGroupIsQuantisedAsTheDefinitionSays) {
  for (const Tier& tier : tiers())
    for (ScaleRule rule : {ScaleRule::arbitrary, ScaleRule::power_of_two, ScaleRule::engine})
      for (float odd : {0.f, 1.f, 1e-45f, 3e38f, kNan, -kNan, kInf, -kInf}) {
        Random random(2);
        std::vector<float> x = random.f32s(kGroup, odd == 0.f ? 0.f : 1.f);
        x[77] = odd;
        std::uint8_t got[kGroup], want[kGroup];
        const float scale = quantise(tier.codec, DType::f32, x.data(), rule, 0.f, got);
        const float reference = kv::quantise_group(x.data(), kGroup, rule, 0.f, want);
        EXPECT_TRUE(scale == reference || (std::isnan(scale) && std::isnan(reference))) << tier.name << odd;
        EXPECT_TRUE(std::equal(got, got + kGroup, want)) << tier.name << odd;
      }
}

TEST(Codec, EveryCodeIsDecodedInOneRounding) {
  for (const Tier& tier : tiers()) {
    Random random(3);
    for (int round = 0; round < 4000; ++round) {
      const float scale = round == 0   ? kNan
                          : round == 1 ? kInf
                                       : std::bit_cast<float>(static_cast<std::uint32_t>(random.bits() & 0x7FFFFFFF));
      std::uint8_t codes[kGroup];
      for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<std::uint8_t>(round % 2 * kGroup + i);
      float wide[kGroup];
      bf16 narrow[kGroup];
      tier.codec.decode(codes, scale, Real::f32, wide);
      tier.codec.decode(codes, scale, Real::bf16, narrow);
      for (int i = 0; i < kGroup; ++i) {
        const float value = kv::from_e4m3(codes[i]), want = value * scale;
        const bf16 want_narrow = base::to_bf16(static_cast<double>(value) * static_cast<double>(scale));
        const float got_narrow = base::to_f32(narrow[i]);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(wide[i]) && std::isnan(got_narrow)) << tier.name << " " << i << " " << scale;
        } else {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(want)) << tier.name;
          ASSERT_EQ(narrow[i].bits, want_narrow.bits) << tier.name << " " << i << " " << scale;
        }
      }
    }
  }
}

TEST(Codec, RowsAreConvertedFromAndToAnyAddress) {
  for (const Tier& tier : tiers()) {
    Random random(4);
    for (std::int64_t n : {0, 1, 7, 64, 577}) {
      std::vector<std::byte> from(static_cast<std::size_t>(4 * n + 1)), to(from.size(), std::byte{0xA5});
      for (std::byte& b : from) b = static_cast<std::byte>(random.bits());
      const auto at = [](std::vector<std::byte>& bytes, auto* out, std::int64_t i) {
        std::memcpy(out, bytes.data() + 1 + i * static_cast<std::int64_t>(sizeof *out), sizeof *out);
      };
      tier.codec.convert(Real::f32, from.data() + 1, n, Real::bf16, to.data() + 1);
      for (std::int64_t i = 0; i < n; ++i) {
        float x;
        bf16 y;
        at(from, &x, i), at(to, &y, i);
        ASSERT_TRUE(std::isnan(x) ? std::isnan(base::to_f32(y)) : base::to_bf16(x).bits == y.bits) << tier.name << x;
      }
      tier.codec.convert(Real::bf16, from.data() + 1, n, Real::f32, to.data() + 1);
      for (std::int64_t i = 0; i < n; ++i) {
        bf16 x;
        float y;
        at(from, &x, i), at(to, &y, i);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(base::to_f32(x)), std::bit_cast<std::uint32_t>(y)) << tier.name;
      }
      EXPECT_EQ(to[0], std::byte{0xA5});
    }
  }
}

}  // namespace
}  // namespace sievemla::test
