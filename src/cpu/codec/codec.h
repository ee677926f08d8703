// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/codec/codec.h -- f32, bf16 and e4m3 in bulk: what base/number.h and kv/e4m3.h say, value by value, for whole
// rows, once for each instruction set. The bits are theirs (of a NaN: that it is one).
//
// Plain data and pointers to functions: files of different instruction sets include this, so nothing here may become
// code (docs/kernels/attention-cpu.md).
#pragma once
#include <cstddef>
#include <cstdint>

namespace sievemla::cpu::codec {

enum class Real : std::uint8_t { f32, bf16 };

inline constexpr std::int64_t kGroup = 128;  // values that share a scale

struct Codec {
  // to[i] = from[i], rounded to nearest even.
  void (*convert)(Real type, const void* from, std::int64_t n, Real to_type, void* to);
  // A group as f32. Returns the largest magnitude as bits, above those of numbers where it holds an infinity or NaN.
  std::uint32_t (*load_group)(Real type, const void* from, float* to);
  // codes[i] = e4m3(x[i] / scale), the exact quotient or the f32 one rounded; x is finite, scale at least the least
  // normal f32.
  void (*encode)(const float* x, float scale, bool exact, std::uint8_t* codes);
  // to[i] = codes[i] * scale, the exact product rounded once.
  void (*decode)(const std::uint8_t* codes, float scale, Real to_type, void* to);
};

extern const Codec kPortable;
#if defined(__x86_64__)
extern const Codec kAvx2, kAvx512;
#endif

}  // namespace sievemla::cpu::codec
