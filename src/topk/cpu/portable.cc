// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/portable.cc -- four scores at a time, in the compiler's own vectors: SSE2 on x86-64, NEON on Arm.
#include "topk/cpu/tier.h"

namespace sievemla::stage::topk {
namespace {

using Index = std::int64_t;

struct Ops {
  using Vec = std::int32_t __attribute__((vector_size(16)));
  static constexpr Index kLanes = 4;

  static Vec load(const std::int32_t* x) {
    Vec v;
    __builtin_memcpy(&v, x, sizeof v);
    return v;
  }
  static void store(std::int32_t* x, Vec v) { __builtin_memcpy(x, &v, sizeof v); }
  static Vec set1(std::int32_t x) { return Vec{x, x, x, x}; }
  static Vec min(Vec a, Vec b) { return a < b ? a : b; }
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }
  static std::uint32_t bits(Vec mask) {
    return static_cast<std::uint32_t>((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
  }
  static std::uint32_t above(Vec a, Vec b) { return bits(a > b); }
  static std::uint32_t equal(Vec a, Vec b) { return bits(a == b); }
  static Vec count(Vec sum, Vec x, Vec bound) { return sum - (x >= bound); }  // one more where x >= bound

  static Vec keys(const float* row, const std::int32_t* ids) {
    Vec raw;
    for (int i = 0; i < 4; ++i) {
      std::int32_t score;
      __builtin_memcpy(&score, row + ids[i], sizeof score);
      raw[i] = score;
    }
    const Vec sign = raw >> 31, magnitude = raw & 0x7FFFFFFF;
    return magnitude > 0x7F800000 ? set1(-0x7F800000) : (magnitude ^ sign) - sign;
  }

  static Index compress(const std::int32_t* x, std::uint32_t mask, std::int32_t* to) {
    Index n = 0;
    for (int i = 0; i < 4; ++i) {
      to[n] = x[i];
      n += mask >> i & 1;
    }
    return n;
  }
  // The positions, from `id` on, of scores that are at least `low`.
  static Index find(const float* x, float low, std::int32_t id, std::int32_t* to) {
    Index n = 0;
    for (int i = 0; i < 4; ++i) {
      to[n] = id + i;
      n += x[i] >= low;
    }
    return n;
  }
};

#include "topk/cpu/select-inl.h"

}  // namespace

const Tier kPortable = kTier;

}  // namespace sievemla::stage::topk
