// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/isa/isa.cc -- asks cpuid what the processor has, XCR0 what the operating system saves, Linux for AMX.
#include "cpu/isa/isa.h"

#include <cstdlib>
#include <string>
#include <string_view>

#include "sievemla/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sievemla::cpu {
namespace {

constexpr bool all(std::uint64_t word, std::uint64_t bits) { return (word & bits) == bits; }
constexpr std::uint64_t bit(int i) { return std::uint64_t{1} << i; }

// Processors on which a tier is slower than the one below it, in every kernel that has both. Model numbers tell less
// than features: virtual machines make them up.
struct SlowTier {
  Isa tier, instead;
  std::string_view vendor;
  std::uint64_t seven_d;  // features of the processors meant
};
constexpr SlowTier kSlowTiers[] = {
    // Intel with AVX512-FP16, so Sapphire Rapids and later (Cooper Lake lacks it): dpbf16 at half the rate of fma.
    // Where AMX may be used, this tier is not the highest. Measured: docs/kernels/attention-cpu.md, indexer-cpu.md.
    {Isa::avx512bf16, Isa::avx512, "GenuineIntel", bit(23)},
};

Isa highest_of(const CpuFacts& f) {
  constexpr auto kFma = bit(12), kOsxsave = bit(27), kAvx = bit(28), kF16c = bit(29);
  constexpr auto kAvx2 = bit(5), kAvx512f = bit(16), kAvx512dq = bit(17), kAvx512bw = bit(30), kAvx512vl = bit(31);
  constexpr auto kAvx512bf16 = bit(5), kAmxBf16 = bit(22), kAmxTile = bit(24);
  constexpr auto kYmm = bit(1) | bit(2), kZmm = bit(5) | bit(6) | bit(7), kTiles = bit(17) | bit(18);

  if (!all(f.one_c, kFma | kOsxsave | kAvx | kF16c)) return Isa::portable;
  if (!all(f.saved, kYmm) || !all(f.seven_b, kAvx2)) return Isa::portable;
  if (!all(f.saved, kZmm) || !all(f.seven_b, kAvx512f | kAvx512dq | kAvx512bw | kAvx512vl)) return Isa::avx2;
  if (!all(f.seven1_a, kAvx512bf16)) return Isa::avx512;
  if (!all(f.saved, kTiles) || !all(f.seven_d, kAmxBf16 | kAmxTile) || !f.permit_tiles()) return Isa::avx512bf16;
  return Isa::amx;
}

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // zeros where there is no such leaf
  return r;
}

// The register state that the operating system saves.
std::uint64_t saved_state() {
  std::uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

// Linux hands out the 8 KiB of tile registers on request, to the whole process.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Tiers detect() {
  const Registers zero = cpuid(0, 0), one = cpuid(1, 0), seven = cpuid(7, 0), seven1 = cpuid(7, 1);
  const unsigned vendor[] = {zero.b, zero.d, zero.c};  // four letters each
  const bool osxsave = all(one.c, bit(27));
  return tiers_of({.vendor = {reinterpret_cast<const char*>(vendor), sizeof vendor},
                   .one_c = one.c,
                   .seven_b = seven.b,
                   .seven_d = seven.d,
                   .seven1_a = seven1.a,
                   .saved = osxsave ? saved_state() : 0,
                   .permit_tiles = tiles_permitted});
}

#else

Tiers detect() { return tiers_of({}); }

#endif

std::string names(Isa highest) {
  std::string text;
  for (const IsaInfo& row : kIsas)
    if (row.isa <= highest) text += (text.empty() ? "" : ", ") + std::string(row.name);
  return text;
}

}  // namespace

Tiers tiers_of(const CpuFacts& facts) {
  const Isa highest = highest_of(facts);
  for (const SlowTier& row : kSlowTiers)
    if (row.tier == highest && row.vendor == facts.vendor && all(facts.seven_d, row.seven_d))
      return {highest, row.instead};
  return {highest, highest};
}

const Tiers& machine_tiers() {
  static const Tiers tiers = detect();
  return tiers;
}

Isa choose_isa(const char* name, const Tiers& machine) {
  constexpr const char* kWhere = "backend cpu: SIEVEMLA_CPU_ISA";
  if (!name || !*name) return machine.best;
  for (const IsaInfo& row : kIsas) {
    if (row.name != std::string_view(name)) continue;
    if (row.isa > machine.highest)
      throw Unsupported(
          error_message("this machine must run the tier it is forced to: " + std::string(name) + " takes " + row.needs,
                        kWhere, name, " on a machine that runs ", names(machine.highest)));
    return row.isa;
  }
  throw InvalidArgument(error_message("a tier of the cpu is one of " + names(Isa::amx), kWhere, "'", name, "'"));
}

Isa isa() {
  static const Isa chosen = choose_isa(std::getenv("SIEVEMLA_CPU_ISA"), machine_tiers());
  return chosen;
}

}  // namespace sievemla::cpu
