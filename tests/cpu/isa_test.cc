// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cpu/isa_test.cc -- which tier is used, and what is said when it cannot be.
#include "cpu/isa/isa.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "sievemla/backend.h"
#include "sievemla/error.h"

namespace sievemla::test {
namespace {

using cpu::Isa;

template <class Error>
std::string message_of(const char* name, Isa machine) {
  try {
    cpu::choose_isa(name, machine);
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

TEST(Isa, TheHighestUnlessOneIsNamed) {
  for (const cpu::IsaInfo& machine : cpu::kIsas) {
    EXPECT_EQ(cpu::choose_isa(nullptr, machine.isa), machine.isa);
    EXPECT_EQ(cpu::choose_isa("", machine.isa), machine.isa);
    for (const cpu::IsaInfo& named : cpu::kIsas)
      if (named.isa <= machine.isa) EXPECT_EQ(cpu::choose_isa(named.name, machine.isa), named.isa);
      else EXPECT_NE(message_of<Unsupported>(named.name, machine.isa).find(named.needs), std::string::npos);
  }
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
    const Isa want = cpu::choose_isa(forced, cpu::machine_isa());
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
