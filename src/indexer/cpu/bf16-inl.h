// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/bf16-inl.h -- operands in bf16 pairs, sums in f32: what the bf16 tiers share. Included inside a
// tier's unnamed namespace, after cpu/simd/avx512bf16-inl.h and avx512-inl.h.
#pragma once

struct Bf16 : Simd, SimdBf16, Avx512Words {
  template <Element kKey, int kPart>
  static Right part(Words x) {
    if constexpr (kKey != Element::e4m3) return (Right)x;
    // Part 0 is bytes 0 and 2, part 1 bytes 1 and 3. Exponent and mantissa fall into place, 120 added to the exponent.
    // Subnormals, 0 to 7 times 2^-9, come from a table: the products take subnormal bf16 for 0.
    const Words magnitude = (kPart == 0 ? x : x >> 8) & 0x007F007Fu;
    const Words sign = (kPart == 0 ? x << 8 : x) & 0x80008000u;
    const __m512i subnormal = _mm512_set4_epi64(0, 0, 0x3C60'3C40'3C20'3C00, 0x3BC0'3B80'3B00'0000);
    const __mmask32 small = _mm512_cmplt_epu16_mask((__m512i)magnitude, _mm512_set1_epi16(8));
    const __m512i value =
        _mm512_mask_permutexvar_epi16((__m512i)((magnitude << 4) + 0x3C003C00u), small, (__m512i)magnitude, subnormal);
    return (Right)((Words)value | sign);
  }
};
