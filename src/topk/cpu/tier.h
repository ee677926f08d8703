// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/tier.h -- what an instruction set does for the selection (select.cc).
//
// Plain data and pointers to functions: files of different instruction sets include this, so nothing here may become
// code (docs/kernels/attention-cpu.md).
#pragma once
#include <cstdint>

namespace sievemla::stage::topk {

// Positions of a row that may be among its k largest, ascending.
struct Candidates {
  std::int32_t* id;   // room for capacity + kListPad
  std::int32_t* key;  // as much, for the tier's use
  std::int64_t capacity, count;
};
inline constexpr std::int64_t kListPad = 64;
inline constexpr std::int64_t kListSlack = 8192;  // capacity, for a row that is longer: 2 k + kListSlack

struct Tier {
  // Replaces the list by positions of [begin, end), among them all that are among the k largest of row[0, size). With
  // `guess` it may find fewer: the parts of a row hold all of them if they hold k or more together.
  void (*collect)(const float* row, std::int64_t size, std::int64_t begin, std::int64_t end, std::int64_t k, bool guess,
                  Candidates* list);
  // Keeps the k largest, of equal ones the first.
  void (*keep)(const float* row, std::int64_t k, Candidates* list);
};

extern const Tier kPortable;
#if defined(__x86_64__)
extern const Tier kAvx2, kAvx512;
#endif

}  // namespace sievemla::stage::topk
