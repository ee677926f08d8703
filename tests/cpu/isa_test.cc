// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cpu/isa_test.cc -- which tier is used, and what is said when it cannot be.
#include "cpu/isa/isa.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>

#include "sievemla/backend.h"
#include "sievemla/error.h"

namespace sievemla::test {
namespace {

using cpu::Isa;

template <class Error>
std::string message_of(const char* name, Isa highest) {
  try {
    cpu::choose_isa(name, {highest, highest});
  } catch (const Error& error) {
    return error.what();
  }
  return "not refused";
}

TEST(Isa, TheTableIsInOrder) {
  int i = 0;
  for (const cpu::IsaInfo& row : cpu::kIsas) {
    EXPECT_EQ(static_cast<int>(row.isa), i++);
    EXPECT_EQ(&cpu::info(row.isa), &row);
  }
}

TEST(Isa, TheBestUnlessOneIsNamed) {
  for (const cpu::IsaInfo& machine : cpu::kIsas) {
    const cpu::Tiers tiers = {machine.isa, Isa::portable};  // so that a named tier above the best is seen to be taken
    EXPECT_EQ(cpu::choose_isa(nullptr, tiers), Isa::portable);
    EXPECT_EQ(cpu::choose_isa("", tiers), Isa::portable);
    for (const cpu::IsaInfo& named : cpu::kIsas)
      if (named.isa <= machine.isa) EXPECT_EQ(cpu::choose_isa(named.name, tiers), named.isa);
      else EXPECT_NE(message_of<Unsupported>(named.name, machine.isa).find(named.needs), std::string::npos);
  }
}

// Words of cpuid and XCR0 as these processors have them, cut down to the bits that count (Intel SDM volume 2A, CPUID;
// AMD APM volume 3, appendix E).
constexpr std::uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
constexpr std::uint32_t kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, kBf16 = 1u << 5;
constexpr std::uint32_t kAmx = 1u << 22 | 1u << 24, kFp16 = 1u << 23;
constexpr std::uint64_t kSse = 0x3, kYmm = 0x7, kZmm = 0xE7, kTiles = 0x600E7;
constexpr std::uint32_t kHaswell = kFma | kOsxsave | kAvx | kF16c;
constexpr std::string_view kIntel = "GenuineIntel", kAmd = "AuthenticAMD";
bool yes() { return true; }
bool no() { return false; }
bool never() {
  ADD_FAILURE() << "AMX asked for where it cannot be";
  return true;
}

struct Processor {
  const char* what;
  cpu::CpuFacts facts;
  Isa highest, best;
};
const Processor kProcessors[] = {
    {"Sandy Bridge", {kIntel, kOsxsave | kAvx, 0, 0, 0, kYmm, never}, Isa::portable, Isa::portable},
    {"Haswell", {kIntel, kHaswell, kAvx2, 0, 0, kYmm, never}, Isa::avx2, Isa::avx2},
    {"Haswell, system without AVX", {kIntel, kHaswell, kAvx2, 0, 0, kSse, never}, Isa::portable, Isa::portable},
    {"Ice Lake", {kIntel, kHaswell, kAvx2 | kAvx512, 0, 0, kZmm, never}, Isa::avx512, Isa::avx512},
    {"Ice Lake, system without AVX-512", {kIntel, kHaswell, kAvx2 | kAvx512, 0, 0, kYmm, never}, Isa::avx2, Isa::avx2},
    {"Cooper Lake", {kIntel, kHaswell, kAvx2 | kAvx512, 0, kBf16, kZmm, never}, Isa::avx512bf16, Isa::avx512bf16},
    {"Zen 4", {kAmd, kHaswell, kAvx2 | kAvx512, 0, kBf16, kZmm, never}, Isa::avx512bf16, Isa::avx512bf16},
    {"AMD with FP16", {kAmd, kHaswell, kAvx2 | kAvx512, kFp16, kBf16, kZmm, never}, Isa::avx512bf16, Isa::avx512bf16},
    {"Sapphire Rapids", {kIntel, kHaswell, kAvx2 | kAvx512, kAmx | kFp16, kBf16, kTiles, yes}, Isa::amx, Isa::amx},
    {"Sapphire Rapids, AMX refused",
     {kIntel, kHaswell, kAvx2 | kAvx512, kAmx | kFp16, kBf16, kTiles, no},
     Isa::avx512bf16,
     Isa::avx512},
    {"Sapphire Rapids, system without AMX",
     {kIntel, kHaswell, kAvx2 | kAvx512, kAmx | kFp16, kBf16, kZmm, never},
     Isa::avx512bf16,
     Isa::avx512},
    {"Sapphire Rapids, AMX hidden",
     {kIntel, kHaswell, kAvx2 | kAvx512, kFp16, kBf16, kZmm, never},
     Isa::avx512bf16,
     Isa::avx512},
    {"Sapphire Rapids, bf16 hidden",
     {kIntel, kHaswell, kAvx2 | kAvx512, kFp16, 0, kZmm, never},
     Isa::avx512,
     Isa::avx512},
    {"no x86", {}, Isa::portable, Isa::portable},
};

TEST(Isa, OfProcessorsKnown) {
  for (const Processor& p : kProcessors) {
    const cpu::Tiers tiers = cpu::tiers_of(p.facts);
    EXPECT_EQ(cpu::info(tiers.highest).name, std::string_view(cpu::info(p.highest).name)) << p.what;
    EXPECT_EQ(cpu::info(tiers.best).name, std::string_view(cpu::info(p.best).name)) << p.what;
  }
}

// Each feature that a tier needs is asked for: without it the tier is not there.
TEST(Isa, NoFeatureIsTakenForGranted) {
  const cpu::CpuFacts all = {kIntel, kHaswell, kAvx2 | kAvx512, kAmx, kBf16, kTiles, yes};
  ASSERT_EQ(cpu::tiers_of(all).highest, Isa::amx);
  const auto without = [&](auto cpu::CpuFacts::* word, int bit) {
    cpu::CpuFacts facts = all;
    facts.*word &= ~(static_cast<std::remove_reference_t<decltype(facts.*word)>>(1) << bit);
    return cpu::tiers_of(facts).highest;
  };
  for (const int bit : {12, 27, 28, 29}) EXPECT_EQ(without(&cpu::CpuFacts::one_c, bit), Isa::portable) << bit;
  EXPECT_EQ(without(&cpu::CpuFacts::seven_b, 5), Isa::portable);
  for (const int bit : {16, 17, 30, 31}) EXPECT_EQ(without(&cpu::CpuFacts::seven_b, bit), Isa::avx2) << bit;
  EXPECT_EQ(without(&cpu::CpuFacts::seven1_a, 5), Isa::avx512);
  for (const int bit : {22, 24}) EXPECT_EQ(without(&cpu::CpuFacts::seven_d, bit), Isa::avx512bf16) << bit;
  for (const int bit : {1, 2}) EXPECT_EQ(without(&cpu::CpuFacts::saved, bit), Isa::portable) << bit;
  for (const int bit : {5, 6, 7}) EXPECT_EQ(without(&cpu::CpuFacts::saved, bit), Isa::avx2) << bit;
  for (const int bit : {17, 18}) EXPECT_EQ(without(&cpu::CpuFacts::saved, bit), Isa::avx512bf16) << bit;
}

TEST(Isa, ATierThatTheMachineLacks) {
  EXPECT_EQ(
      message_of<Unsupported>("avx512bf16", Isa::avx512),
      "this machine must run the tier it is forced to: avx512bf16 takes AVX-512 BF16: got avx512bf16 on a machine "
      "that runs portable, avx2, avx512 (backend cpu: SIEVEMLA_CPU_ISA)");
}

TEST(Isa, AnUnknownName) {
  for (const char* name : {"avx", "AVX2", "avx512 ", "sse2"})
    EXPECT_EQ(message_of<InvalidArgument>(name, Isa::amx),
              "a tier of the cpu is one of portable, avx2, avx512, avx512bf16, amx: got '" + std::string(name) +
                  "' (backend cpu: SIEVEMLA_CPU_ISA)");
}

// In a process whose environment is good the backend takes the tier; in one where it is not it refuses, by every name.
TEST(Isa, TheBackendObeysTheEnvironment) {
  const char* forced = std::getenv("SIEVEMLA_CPU_ISA");
  try {
    const Isa want = cpu::choose_isa(forced, cpu::machine_tiers());
    EXPECT_EQ(Backend::cpu().kind(), BackendKind::cpu);
    EXPECT_EQ(cpu::isa(), want);
    EXPECT_EQ(cpu::may_use<Isa::avx2>(), want >= Isa::avx2);
  } catch (const Error& error) {
    for (const char* name : {"cpu", "cpu", "auto"}) try {
        Backend::by_name(name);
        ADD_FAILURE() << "not refused";
      } catch (const Error& again) {
        EXPECT_STREQ(again.what(), error.what());
      }
  }
}

}  // namespace
}  // namespace sievemla::test
