// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/random.h -- the same numbers on every machine: splitmix64, uniform in (-1, 1), rounded to bf16 so that
// every backend sees the same bits.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "base/number.h"

namespace sievemla::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-52 - 1.0; }
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n)); }
  bf16 uniform_bf16(float scale = 1.f) {
    return base::to_bf16(base::to_f32(base::to_bf16(static_cast<float>(uniform()))) * scale);
  }
  float uniform_f32(float scale = 1.f) { return base::to_f32(uniform_bf16(scale)); }  // a bf16 value

  std::vector<bf16> bf16s(std::int64_t n, float scale = 1.f) {
    std::vector<bf16> v(static_cast<std::size_t>(n));
    for (bf16& x : v) x = uniform_bf16(scale);
    return v;
  }
  std::vector<float> f32s(std::int64_t n, float scale = 1.f) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& x : v) x = uniform_f32(scale);
    return v;
  }
  // n different numbers below `limit`, in random order.
  std::vector<std::int64_t> distinct(std::int64_t n, std::int64_t limit) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(limit));
    for (std::int64_t i = 0; i < limit; ++i) all[static_cast<std::size_t>(i)] = i;
    for (std::int64_t i = 0; i < n; ++i)
      std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(i + below(limit - i))]);
    all.resize(static_cast<std::size_t>(n));
    return all;
  }

 private:
  std::uint64_t state_;
};

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace sievemla::test
