// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <thread>
#include <utility>

#include "cpu/threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace sievemla::cli {
namespace {

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

#if defined(__x86_64__)

enum Register { eax, ebx, ecx, edx };

// Register state that the system has to save (bits of XCR0) before an instruction set may be used.
constexpr std::uint64_t kYmm = 0x6, kZmm = 0xE6, kTiles = 0x60000;

struct Feature {
  const char* name;
  unsigned leaf, subleaf;
  Register in;
  int bit;
  std::uint64_t xcr0;
};

// Intel SDM volume 2A, CPUID; AMD APM volume 3, appendix E.
constexpr Feature kFeatures[] = {
    {"sse4.2", 1, 0, ecx, 20, 0},        {"avx", 1, 0, ecx, 28, kYmm},        {"f16c", 1, 0, ecx, 29, kYmm},
    {"fma", 1, 0, ecx, 12, kYmm},        {"avx2", 7, 0, ebx, 5, kYmm},        {"avx512f", 7, 0, ebx, 16, kZmm},
    {"avx512bw", 7, 0, ebx, 30, kZmm},   {"avx512vl", 7, 0, ebx, 31, kZmm},   {"avx512vbmi", 7, 0, ecx, 1, kZmm},
    {"avx512vnni", 7, 0, ecx, 11, kZmm}, {"avx512bf16", 7, 1, eax, 5, kZmm},  {"avx512fp16", 7, 0, edx, 23, kZmm},
    {"amx-tile", 7, 0, edx, 24, kTiles}, {"amx-int8", 7, 0, edx, 25, kTiles}, {"amx-bf16", 7, 0, edx, 22, kTiles},
};

std::uint64_t enabled_state() {
  unsigned r[4];
  if (!__get_cpuid(1, &r[eax], &r[ebx], &r[ecx], &r[edx]) || !(r[ecx] >> 27 & 1)) return 0;  // no OSXSAVE, no xgetbv
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

std::vector<std::string> features() {
  const std::uint64_t state = enabled_state();
  std::vector<std::string> found;
  for (const Feature& f : kFeatures) {
    unsigned r[4];
    if (__get_cpuid_count(f.leaf, f.subleaf, &r[eax], &r[ebx], &r[ecx], &r[edx]) && (r[f.in] >> f.bit & 1) &&
        (state & f.xcr0) == f.xcr0)
      found.emplace_back(f.name);
  }
  return found;
}

#elif defined(__aarch64__)

struct Feature {
  const char* name;
  unsigned long capability;  // AT_HWCAP or AT_HWCAP2, linux/Documentation/arch/arm64/elf_hwcaps.rst
  unsigned long bit;
};
constexpr Feature kFeatures[] = {
    {"asimd", AT_HWCAP, 1},  {"asimddp", AT_HWCAP, 20}, {"sve", AT_HWCAP, 22},  {"sve2", AT_HWCAP2, 1},
    {"i8mm", AT_HWCAP2, 13}, {"bf16", AT_HWCAP2, 14},   {"sme", AT_HWCAP2, 23},
};

std::vector<std::string> features() {
  std::vector<std::string> found;
  for (const Feature& f : kFeatures)
    if (getauxval(f.capability) >> f.bit & 1) found.emplace_back(f.name);
  return found;
}

#else

std::vector<std::string> features() { return {}; }

#endif

// As /proc/cpuinfo has it: "model name" on x86, implementer and part number where the processor has no name of its own.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string name, implementer, part;
  const std::pair<const char*, std::string*> wanted[] = {
      {"model name", &name}, {"CPU implementer", &implementer}, {"CPU part", &part}};
  for (std::string line; name.empty() && part.empty() && std::getline(file, line);)
    for (const auto& [key, value] : wanted)
      if (const auto colon = line.find(": "); line.rfind(key, 0) == 0 && colon != std::string::npos)
        *value = line.substr(colon + 2);
  if (!name.empty()) return name;
  return part.empty() ? "unknown" : "implementer " + implementer + ", part " + part;
}

// In the order of cpu::kIsas.
constexpr const Peak* kPeaks[] = {
    &kPeakPortable,
#if defined(__x86_64__)
    &kPeakAvx2,     &kPeakAvx512, &kPeakAvx512Bf16, &kPeakAmx,
#endif
};

}  // namespace

const Peak& peak_of(cpu::Isa isa) { return *kPeaks[static_cast<int>(isa)]; }

double peak_gflops(const Peak& peak, const Backend& backend) {
  using Clock = std::chrono::steady_clock;
  constexpr double kLeast = 1e-3, kEnough = 0.05;                   // seconds: of a run that counts, and in all
  const std::int64_t pieces = std::int64_t{backend.threads()} * 8;  // so that a worker that comes late matters little
  const auto begin = Clock::now();
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  double best = 0;
  for (std::int64_t steps = 256; since(begin) < kEnough;) {
    const auto start = Clock::now();
    cpu::parallel_for(backend, pieces, [&](std::int64_t, int) { peak.run(steps); });
    const double seconds = since(start);
    if (seconds < kLeast) steps *= 2;
    else best = std::max(best, peak.flops * static_cast<double>(steps * pieces) / seconds * 1e-9);
  }
  return best;
}

std::int64_t host_memory_bytes() {
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0 ? std::int64_t{pages} * size : 0;
}

Machine this_machine() {
  Machine machine{cpu_name(), usable_cores(), features(), {}, cpu::info(cpu::machine_tiers().best).name};
  for (const cpu::IsaInfo& row : cpu::kIsas)
    if (row.isa <= cpu::machine_tiers().highest) machine.tiers.emplace_back(row.name);
  return machine;
}

}  // namespace sievemla::cli
