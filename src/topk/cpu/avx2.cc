// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/avx2.cc -- eight scores at a time, compressed by a table of the 256 masks.
#include <immintrin.h>

#include "topk/cpu/tier.h"

namespace sievemla::stage::topk {
namespace {

using Index = std::int64_t;

// The set bits of each mask, from the lowest.
struct Table {
  std::uint8_t lanes[256][8] = {};
  constexpr Table() {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 0, n = 0; lane < 8; ++lane)
        if (mask >> lane & 1) lanes[mask][n++] = static_cast<std::uint8_t>(lane);
  }
};
constexpr Table kSetBits;

struct Ops {
  using Vec = __m256i;
  static constexpr Index kLanes = 8;

  static Vec load(const std::int32_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static void store(std::int32_t* x, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), v); }
  static Vec set1(std::int32_t x) { return _mm256_set1_epi32(x); }
  static Vec min(Vec a, Vec b) { return _mm256_min_epi32(a, b); }
  static Vec max(Vec a, Vec b) { return _mm256_max_epi32(a, b); }
  static std::uint32_t bits(Vec mask) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
  }
  static std::uint32_t above(Vec a, Vec b) { return bits(_mm256_cmpgt_epi32(a, b)); }
  static std::uint32_t equal(Vec a, Vec b) { return bits(_mm256_cmpeq_epi32(a, b)); }
  static Vec count(Vec sum, Vec x, Vec bound) {  // one more where x >= bound
    return _mm256_sub_epi32(sum, _mm256_cmpgt_epi32(x, _mm256_add_epi32(bound, set1(-1))));
  }

  static Vec keys(const float* row, const std::int32_t* ids) {
    const Vec bits = _mm256_i32gather_epi32(reinterpret_cast<const int*>(row), load(ids), 4);
    const Vec sign = _mm256_srai_epi32(bits, 31), magnitude = _mm256_and_si256(bits, set1(0x7FFFFFFF));
    const Vec key = _mm256_sub_epi32(_mm256_xor_si256(magnitude, sign), sign);
    return _mm256_blendv_epi8(key, set1(-0x7F800000), _mm256_cmpgt_epi32(magnitude, set1(0x7F800000)));
  }

  static Vec set_bits(std::uint32_t mask) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetBits.lanes[mask])));
  }
  static Index compress(const std::int32_t* x, std::uint32_t mask, std::int32_t* to) {
    store(to, _mm256_permutevar8x32_epi32(load(x), set_bits(mask)));
    return __builtin_popcount(mask);
  }
  // The positions, from `id` on, of scores that are at least `low`.
  static Index find(const float* x, float low, std::int32_t id, std::int32_t* to) {
    const __m256 reach = _mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_set1_ps(low), _CMP_GE_OQ);
    const std::uint32_t mask = static_cast<std::uint32_t>(_mm256_movemask_ps(reach));
    store(to, _mm256_add_epi32(set1(id), set_bits(mask)));
    return __builtin_popcount(mask);
  }
};

#include "topk/cpu/select-inl.h"

}  // namespace

const Tier kAvx2 = kTier;

}  // namespace sievemla::stage::topk
