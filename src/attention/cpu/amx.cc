// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/amx.cc -- both products in tiles of 16 x 16 sums: a row of a left tile holds 32 bf16, a row of a
// right tile 16 pairs. Two by two tiles of sums are under way at a time.
#include <immintrin.h>

#include "attention/cpu/tier.h"

namespace sievemla::stage::attention {
namespace {

#include "cpu/simd/avx512-inl.h"
#include "cpu/simd/avx512bf16-inl.h"
#include "cpu/simd/tiles-inl.h"

#include "attention/cpu/avx512-inl.h"
#include "attention/cpu/avx512bf16-inl.h"

constexpr Index kSide = 16, kDepth = 32;  // of a tile: rows and columns; operands a row of the left one

// The sums that are under way: c[2 tiles, 2 tiles], or one in a direction.
template <bool kTwoRows, bool kTwoColumns>
struct Sums {
  static void zero() {
    _tile_zero(0);
    if (kTwoColumns) _tile_zero(1);
    if (kTwoRows) _tile_zero(2);
    if (kTwoRows && kTwoColumns) _tile_zero(3);
  }
  static void load(const float* c, Index stride) {  // strides in bytes
    const char* x = reinterpret_cast<const char*>(c);
    _tile_loadd(0, x, stride);
    if (kTwoColumns) _tile_loadd(1, x + 64, stride);
    if (kTwoRows) _tile_loadd(2, x + kSide * stride, stride);
    if (kTwoRows && kTwoColumns) _tile_loadd(3, x + kSide * stride + 64, stride);
  }
  static void store(float* c, Index stride) {
    char* x = reinterpret_cast<char*>(c);
    _tile_stored(0, x, stride);
    if (kTwoColumns) _tile_stored(1, x + 64, stride);
    if (kTwoRows) _tile_stored(2, x + kSide * stride, stride);
    if (kTwoRows && kTwoColumns) _tile_stored(3, x + kSide * stride + 64, stride);
  }
  // sums += a x b over `steps` of kDepth operands; b_step in bytes.
  static void add(const void* left, Index a_stride, const void* right, Index b_stride, Index b_step, Index steps) {
    const char *a = static_cast<const char*>(left), *b = static_cast<const char*>(right);
    for (Index i = 0; i < steps; ++i, a += 64, b += b_step) {
      _tile_loadd(4, a, a_stride);
      _tile_loadd(6, b, b_stride);
      _tile_dpbf16ps(0, 4, 6);
      if (kTwoColumns) {
        _tile_loadd(7, b + 64, b_stride);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (kTwoRows) {
        _tile_loadd(5, a + kSide * a_stride, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        if (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
};

struct Ops : Avx512Bf16 {
  static constexpr Index kBlock = 256, kRowPad = 32;  // values pass through tiles once a block
  static constexpr Index kVecs = 2;                   // of heads: their queries lie side by side and stay in L1
  static constexpr Index kAhead = 8;                  // rows that are on their way while one is loaded
  static constexpr bool kTiles = true, kHasNarrow = false;
  static constexpr int rows(int) { return 4; }

  static void begin() { configure_tiles(); }
  static void end() { _tile_release(); }

  template <bool kTwoColumns, class Scratch>
  static void score_heads(const TierShape& shape, const Scratch& s, Index head, Index row) {
    using S = Sums<true, kTwoColumns>;
    constexpr Index kHeads = kTwoColumns ? 2 * kSide : kSide;
    const Index a_stride = s.k_stride * 2, b_stride = kHeads * 4, c_stride = s.heads * 4;
    const Operand *k = s.k + row * s.k_stride, *q = s.q + head * s.width;
    float* score = s.score + row * s.heads + head;
    if (shape.row != Element::e4m3) {
      S::zero();
      S::add(k, a_stride, q, b_stride, kSide * b_stride, s.width / kDepth);
      S::store(score, c_stride);
      return;
    }
    alignas(64) float part[2 * kSide][kHeads];
    for (Index column = 0; column < s.width; column += kScaleColumns) {
      const Index columns = s.width - column < kScaleColumns ? s.width - column : kScaleColumns;
      S::zero();
      S::add(k + column, a_stride, q + column * kHeads, b_stride, kSide * b_stride, columns / kDepth);
      S::store(part[0], sizeof part[0]);
      const bool scaled = column < s.latent;
      for (Index r = 0; r < 2 * kSide; ++r) {
        const Vec factor = set1(scaled ? s.scale[(row + r) * 4 + column / kScaleColumns] : 1.f);
        for (Index c = 0; c < kHeads; c += kSide) {
          float* to = score + r * s.heads + c;
          const Vec x = load(part[r] + c);
          store(to, column > 0 ? fma(x, factor, load(to)) : mul(x, factor));
        }
      }
    }
  }

  template <class Scratch>
  static void scores(const TierShape& shape, const Scratch& s, Index rows) {
    for (Index h = 0; h < s.heads; h += 2 * kSide)
      for (Index r = 0; r < rows; r += 2 * kSide)
        if (s.heads - h >= 2 * kSide) score_heads<true>(shape, s, h, r);
        else score_heads<false>(shape, s, h, r);
  }

  template <bool kTwoRows, class Scratch>
  static void add_columns(const TierShape& shape, const Scratch& s, const Operand* p, Index column, Index rows,
                          float* value, bool empty) {
    using S = Sums<kTwoRows, true>;
    const Index stride = shape.value_stride * 4;
    if (empty) S::zero();
    else S::load(value, stride);
    S::add(p, kBlock * 2, s.v + column * kPair, s.v_stride * 2, kSide * s.v_stride * 2, rows / kDepth);
    S::store(value, stride);
  }

  // Weights lie [row pairs, heads]; the left factor needs [heads, rows].
  template <class Scratch>
  static void add_values(const TierShape& shape, const Scratch& s, Index padded, Index rows, const TierState& state) {
    const bool scaled = shape.row == Element::e4m3;
    const Index slices = scaled ? 4 : 1, slice = scaled ? kScaleColumns : s.latent;
    for (Index g = 0; g < slices; ++g)
      for (Index h = 0; h < s.heads; h += kSide)
        for (Index r = 0; r < padded; r += kDepth) {
          __m512i x[kSide];
          for (Index i = 0; i < kSide; ++i)
            x[i] = r + 2 * i < rows ? _mm512_loadu_si512(s.p + g * kBlock * s.heads + (r + 2 * i) * s.heads + h * kPair)
                                    : _mm512_setzero_si512();
          transpose(x);
          for (Index i = 0; i < kSide; ++i) _mm512_storeu_si512(s.p_rows + (g * s.heads + h + i) * kBlock + r, x[i]);
        }
    for (Index column = 0; column < s.latent; column += 2 * kSide)
      for (Index h = 0; h < s.heads; h += 2 * kSide) {
        const Operand* p = s.p_rows + (column / slice * s.heads + h) * kBlock;
        float* value = state.value + h * shape.value_stride + column;
        if (s.heads - h >= 2 * kSide) add_columns<true>(shape, s, p, column, padded, value, state.empty);
        else add_columns<false>(shape, s, p, column, padded, value, state.empty);
      }
  }

 private:
  static constexpr Index kScaleColumns = 128;
};

#include "attention/cpu/attention-inl.h"

}  // namespace

const Tier kAmx = kTier;

}  // namespace sievemla::stage::attention
