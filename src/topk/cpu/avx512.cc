// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/avx512.cc -- sixteen scores at a time, compressed by the instruction made for it.
#include <immintrin.h>

#include "topk/cpu/tier.h"

namespace sievemla::stage::topk {
namespace {

using Index = std::int64_t;

struct Ops {
  using Vec = __m512i;
  static constexpr Index kLanes = 16;

  static Vec load(const std::int32_t* x) { return _mm512_loadu_si512(x); }
  static void store(std::int32_t* x, Vec v) { _mm512_storeu_si512(x, v); }
  static Vec set1(std::int32_t x) { return _mm512_set1_epi32(x); }
  static Vec min(Vec a, Vec b) { return _mm512_min_epi32(a, b); }
  static Vec max(Vec a, Vec b) { return _mm512_max_epi32(a, b); }
  static std::uint32_t above(Vec a, Vec b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static std::uint32_t equal(Vec a, Vec b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Vec count(Vec sum, Vec x, Vec bound) {  // one more where x >= bound
    return _mm512_mask_sub_epi32(sum, _mm512_cmpge_epi32_mask(x, bound), sum, set1(-1));
  }

  static Vec keys(const float* row, const std::int32_t* ids) {
    const Vec bits = _mm512_i32gather_epi32(load(ids), row, 4), infinity = set1(0x7F800000);
    const Vec sign = _mm512_srai_epi32(bits, 31), magnitude = _mm512_and_si512(bits, set1(0x7FFFFFFF));
    const Vec key = _mm512_sub_epi32(_mm512_xor_si512(magnitude, sign), sign);
    return _mm512_mask_mov_epi32(key, _mm512_cmpgt_epi32_mask(magnitude, infinity), set1(-0x7F800000));
  }

  static Index compress(const std::int32_t* x, std::uint32_t mask, std::int32_t* to) {
    store(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), load(x)));
    return __builtin_popcount(mask);
  }
  // The positions, from `id` on, of scores that are at least `low`.
  static Index find(const float* x, float low, std::int32_t id, std::int32_t* to) {
    const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_set1_ps(low), _CMP_GE_OQ);
    const Vec ids = _mm512_add_epi32(set1(id), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    store(to, _mm512_maskz_compress_epi32(mask, ids));
    return __builtin_popcount(mask);
  }
};

#include "topk/cpu/select-inl.h"

}  // namespace

const Tier kAvx512 = kTier;

}  // namespace sievemla::stage::topk
