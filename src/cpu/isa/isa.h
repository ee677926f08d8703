// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/isa/isa.h -- the instruction sets that kernels are written for, and which of them this process uses.
//
// A tier is a row of kIsas, lowest first; each needs all that the rows above it need. A kernel of a tier is a file of
// its own, compiled with the tier's flags (cmake/isa.cmake), and a row in its room's registry whose runs_here is
// may_use<Isa::...>. SIEVEMLA_CPU_ISA names the highest tier to use, in place of the machine's best; a room that has no
// kernel of that tier falls back to the next lower one that it has. Rules for its files: docs/kernels/attention-cpu.md.
#pragma once
#include <cstdint>
#include <string_view>

namespace sievemla::cpu {

enum class Isa : std::uint8_t { portable, avx2, avx512, avx512bf16, amx };

struct IsaInfo {
  Isa isa;
  const char* name;   // as SIEVEMLA_CPU_ISA takes it
  const char* needs;  // what the machine must have, in words; "" = nothing special
};
inline constexpr IsaInfo kIsas[] = {
    {Isa::portable, "portable", ""},
    {Isa::avx2, "avx2", "AVX2, FMA and F16C"},
    {Isa::avx512, "avx512", "AVX-512 F, BW, DQ and VL"},
    {Isa::avx512bf16, "avx512bf16", "AVX-512 BF16"},
    {Isa::amx, "amx", "AMX-TILE and AMX-BF16, and a kernel that permits their use"},
};
constexpr const IsaInfo& info(Isa isa) { return kIsas[static_cast<int>(isa)]; }

// What tiers are judged by, as processor and operating system say it.
struct CpuFacts {
  std::string_view vendor;                                          // cpuid leaf 0
  std::uint32_t one_c = 0, seven_b = 0, seven_d = 0, seven1_a = 0;  // leaves 1, (7, 0) and (7, 1): ecx, ebx, edx, eax
  std::uint64_t saved = 0;                                          // XCR0; read only where one_c has OSXSAVE
  bool (*permit_tiles)() = [] { return false; };                    // asked where all else of AMX is there
};

// `highest` runs here, and so does each tier below it. `best` is the fastest: the highest, but for processors on which
// it is slower than a lower one (kSlowTiers in isa.cc).
struct Tiers {
  Isa highest, best;
};
Tiers tiers_of(const CpuFacts& facts);

// Of this machine. Asks the operating system once for the use of AMX.
const Tiers& machine_tiers();

// The tier to use on a machine that has these: the one named, or the best if the name is null or empty.
// Throws InvalidArgument for a name there is not, Unsupported for a tier above the machine's.
Isa choose_isa(const char* name, const Tiers& machine);

// choose_isa of SIEVEMLA_CPU_ISA and machine_tiers, decided at the first call (that did not throw).
Isa isa();

// For base::Kernel::runs_here.
template <Isa kIsa>
bool may_use() {
  return kIsa <= isa();
}

}  // namespace sievemla::cpu
