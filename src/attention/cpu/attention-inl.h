// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/attention-inl.h -- stage 3 on the CPU: the algorithm, written once for all instruction sets.
//
// A tier's file defines `Ops`, its vectors, and includes this inside its own unnamed namespace. Lanes are heads when
// scores are made and columns when values are: so a row is the left factor of the one product and the right factor of
// the other as it lies in the cache, and nothing is transposed.
//
//   score[rows, heads]    = k[rows, width]     x q[width, heads]     q: packed once a token
//   value[heads, latent] += p[rows, heads]^T   x v[rows, latent]     v: k itself; where operands are pairs (bf16), two
//                                                                    rows interleaved
//
// A block of rows is gathered and converted once for all heads. The f32 scales of packed rows multiply partial scores,
// one per 128 columns, and p, which then comes in a slice per 128 columns; k and v hold e4m3 values exactly.
#pragma once

// ---- sizes ------------------------------------------------------------------------------------------

using Index = std::int64_t;

constexpr Index round_up(Index n, Index to) { return (n + to - 1) / to * to; }
constexpr Index least(Index a, Index b) { return a < b ? a : b; }

constexpr Index kScaleGroup = 128, kScaleGroups = kSlices;  // of a packed row
constexpr Index kPackedScales = 512, kPackedRope = 528;

using Operand = Ops::Operand;
using Vec = Ops::Vec;
constexpr Index kLanes = Ops::kLanes;
constexpr Index kPair = Ops::kPair;            // operands that a lane multiplies and adds at a time
constexpr Index kNarrow = kLanes / 2;          // so many heads, where there are no more, take two steps at a time
constexpr Index kTile = 64 * kPair;            // columns of q that stay in L1 while a block's rows pass: 16 KiB
constexpr Index kLine = 64 / sizeof(Operand);  // strides are an odd number of cache lines, so that rows share no set
static_assert(kHeadPad % kLanes == 0 && kWidthPad % kLanes == 0 && Ops::kBlock % Ops::kRowPad == 0);

// Arrays of a worker.
struct Scratch {
  Index heads, latent, rope, width;  // padded
  Index k_stride, v_stride;          // in elements; of v: from one pair of rows to the next
  Operand* q;                        // [groups of heads][width / kPair][heads of the group][kPair]
  Operand* k;                        // [kBlock, k_stride]
  Operand* v;                        // [kBlock / 2, v_stride]
  float* score;                      // [kBlock, heads]
  Operand* p;                        // [slices][kBlock / kPair][heads][kPair]
  Operand* p_rows;                   // [slices][heads][kBlock], for tiles
  float* scale;                      // [kBlock, kScaleGroups], then their reciprocals, or 0
  float* excess;                     // [kScaleGroups, heads] see `weigh`
  float* rescale;                    // [heads]
  Index bytes;

  Scratch(const TierShape& shape, std::byte* memory)
      : heads(round_up(shape.heads, kLanes)),
        latent(round_up(shape.latent, kWidthPad)),
        rope(round_up(shape.rope, kWidthPad)),
        width(latent + rope),
        k_stride(width + kLine),
        v_stride(kPair == 1 ? 0 : kPair * (latent + 16)),
        bytes(0) {
    constexpr Index kBlock = Ops::kBlock;
    q = take<Operand>(memory, heads * width);
    k = take<Operand>(memory, kBlock * k_stride);
    v = take<Operand>(memory, kBlock / kPair * v_stride);
    score = take<float>(memory, kBlock * heads);
    p = take<Operand>(memory, kScaleGroups * kBlock * heads);
    p_rows = take<Operand>(memory, Ops::kTiles ? kScaleGroups * kBlock * heads : 0);
    scale = take<float>(memory, 2 * kBlock * kScaleGroups);
    excess = take<float>(memory, kScaleGroups * heads);
    rescale = take<float>(memory, heads);
  }

 private:
  template <class T>
  T* take(std::byte* memory, Index n) {
    T* array = memory ? reinterpret_cast<T*>(memory + bytes) : nullptr;
    bytes += round_up(n * static_cast<Index>(sizeof(T)), 64);
    return array;
  }
};

// How many vectors the next of `rest` vectors are taken together: the most, but not such that one is left alone.
constexpr Index vectors(Index rest) {
  return Ops::kTiles || rest >= Ops::kVecs + 2 || rest <= Ops::kVecs ? least(rest, Ops::kVecs) : rest / 2;
}

// ---- rows in, operands out --------------------------------------------------------------------------

template <class T>
T element(const void* from, Index i) {
  T x;
  __builtin_memcpy(&x, static_cast<const char*>(from) + i * static_cast<Index>(sizeof(T)), sizeof x);
  return x;
}
inline float f32_of(std::uint32_t bits) { return element<float>(&bits, 0); }

// Plain values as operands, and zeros up to a multiple of kWidthPad.
inline void load_plain(const void* from, Element type, Index n, Operand* to) {
  if (type == Element::f32) Ops::load_f32(from, n, to);
  else Ops::load_bf16(from, n, to);
  for (Index i = n; i < round_up(n, kWidthPad); ++i) to[i] = 0;
}

// A row, and its scales where it has any. A NaN code makes them NaN: Ops may read it as a number.
inline void load_row(const TierShape& shape, const Scratch& s, const std::byte* row, Operand* to, float* scale) {
  if (shape.row != Element::e4m3) {
    const Index size = shape.row == Element::f32 ? 4 : 2;
    load_plain(row, shape.row, shape.latent, to);
    load_plain(row + shape.latent * size, shape.row, shape.rope, to + s.latent);
    return;
  }
  const bool nan = Ops::load_e4m3(row, shape.latent, to);
  load_plain(row + kPackedRope, Element::bf16, shape.rope, to + s.latent);
  for (Index g = 0; g < kScaleGroups; ++g) scale[g] = nan ? __builtin_nanf("") : element<float>(row + kPackedScales, g);
}

inline bool narrow(const TierShape& shape) { return Ops::kHasNarrow && shape.heads <= kNarrow; }

template <class T = Ops>
void load_queries(const TierShape& shape, std::byte* scratch, const void* const* latent, const void* const* rope) {
  const Scratch s(shape, scratch);
  constexpr Index kBytes = kPair * static_cast<Index>(sizeof(Operand));
  for (Index h = 0, first = 0, n = 0; h < s.heads; h += kLanes) {
    if (h == first + n) first = h, n = vectors((s.heads - h) / kLanes) * kLanes;  // the group of heads
    for (Index lane = 0; lane < kLanes; ++lane) {                                 // side by side; k is free
      Operand* x = s.k + lane * s.k_stride;
      if (h + lane < shape.heads) {
        load_plain(latent[h + lane], shape.query, shape.latent, x);
        load_plain(rope[h + lane], shape.query, shape.rope, x + s.latent);
      } else {
        __builtin_memset(x, 0, static_cast<std::size_t>(s.width) * sizeof(Operand));
      }
    }
    if (narrow(shape)) {  // [width / (2 kPair)][kNarrow][2 kPair]
      Operand* to = s.q;
      for (Index i = 0; i < s.width; i += 2 * kPair)
        for (Index lane = 0; lane < kNarrow; ++lane, to += 2 * kPair)
          __builtin_memcpy(to, s.k + lane * s.k_stride + i, 2 * kBytes);
      continue;
    }
    Operand* to = s.q + first * s.width + (h - first) * kPair;
    if constexpr (T::kLanes == 16)
      for (Index i = 0; i < s.width; i += 16 * kPair) T::transpose(s.k + i, s.k_stride, to + i * n, n * kPair);
    else
      for (Index i = 0; i < s.width; i += kPair, to += n * kPair)
        for (Index lane = 0; lane < kLanes; ++lane)
          __builtin_memcpy(to + lane * kPair, s.k + lane * s.k_stride + i, kBytes);
  }
}

// ---- products ---------------------------------------------------------------------------------------

// f(0), ... f(kTimes - 1), as straight code: arrays that are indexed so become registers.
template <int kTimes, class F>
[[gnu::always_inline]] inline void unrolled(F&& f) {
  if constexpr (kTimes > 0) {
    unrolled<kTimes - 1>(f);
    f(kTimes - 1);
  }
}

// c[kRows, kVectors] (+)= a x b over `steps`, in order: the bits of an element do not depend on its place. With scales
// the product is multiplied by its row's before it is added. kTwoSteps: lanes 2 i and 2 i + 1 are column i, at an even
// and at an odd step.
struct Strides {
  Index a_row, a_step, b_step, c_row, scale_row;
};
template <int kRows, int kVectors, bool kTwoSteps = false, class T = Ops>
[[gnu::noinline]] void product(const Operand* a, const Operand* b, Index steps, float* c, const Strides& strides,
                               bool add, const float* scale) {  // a function of its own: it needs all registers
  const Strides stride = strides;
  const auto for_each_sum = [](auto&& f) __attribute__((always_inline)) {
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      unrolled<kVectors>([&](int v) __attribute__((always_inline)) { f(r, v); });
    });
  };
  Vec sum[kRows][kVectors];
  if (add && !scale && !kTwoSteps)
    for_each_sum([&](int r, int v)
                     __attribute__((always_inline)) { sum[r][v] = Ops::load(c + r * stride.c_row + v * kLanes); });
  else for_each_sum([&](int r, int v) __attribute__((always_inline)) { sum[r][v] = Ops::set1(0.f); });
  for (Index i = 0; i < steps; ++i, a += stride.a_step, b += stride.b_step) {
    typename Ops::Right right[kVectors];
    unrolled<kVectors>([&](int v) __attribute__((always_inline)) { right[v] = Ops::right(b + v * kLanes * kPair); });
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      typename Ops::Right left;
      if constexpr (kTwoSteps) left = T::left_two(a + r * stride.a_row);
      else left = Ops::left(a + r * stride.a_row);
      unrolled<kVectors>([&](int v)
                             __attribute__((always_inline)) { sum[r][v] = Ops::dot(sum[r][v], left, right[v]); });
    });
  }
  for_each_sum([&](int r, int v) __attribute__((always_inline)) {
    float* to = c + r * stride.c_row + v * kLanes;
    Vec total = sum[r][v];
    if constexpr (kTwoSteps) total = T::add_pairs(total);
    if (scale) {
      const Vec factor = Ops::set1(scale[r * stride.scale_row]);
      total = add ? Ops::fma(total, factor, Ops::load(to)) : Ops::mul(total, factor);
    } else if (kTwoSteps && add) {
      total = Ops::add(total, Ops::load(to));
    }
    Ops::store(to, total);
  });
}

inline Index row_bytes(const TierShape& shape) {
  if (shape.row == Element::e4m3) return kPackedRope + 2 * shape.rope;
  return (shape.row == Element::f32 ? 4 : 2) * (shape.latent + shape.rope);
}

// Rows that are fetched while others are computed, a few lines at a time.
struct Ahead {
  const std::byte* const* rows;
  Index count, lines;  // rows; lines of a row
  Index row = 0, line = 0;

  Ahead(const TierShape& shape, const std::byte* const* from, Index n)
      : rows(from), count(least(n, Ops::kBlock)), lines((row_bytes(shape) + 63) / 64) {}
  Index left() const { return (count - row) * lines - line; }
  void fetch(Index n = 64) {
    for (; n > 0 && row < count; --n) {
      __builtin_prefetch(rows[row] + line * 64, 0, 2);
      __asm__ volatile("");  // g++ leaves out the calls of a function that does nothing but prefetch
      if (++line == lines) line = 0, ++row;
    }
  }
};

template <int kVectors, bool kTwoSteps = false>
void score_heads(const TierShape& shape, const Scratch& s, Index head, Index rows, Ahead& ahead) {
  constexpr int kRows = Ops::rows(kVectors), kSteps = kTwoSteps ? 2 : 1;
  constexpr Index n = kVectors * kLanes / kSteps;
  const Index tiles = (s.width + kTile - 1) / kTile;
  const Index lines = head == 0 ? (ahead.left() * kRows + rows * tiles - 1) / (rows * tiles) : 0;
  for (Index t = 0; t < tiles; ++t) {
    const Index column = t * kTile, end = least(s.width, column + kTile);
    const bool scaled = shape.row == Element::e4m3 && column < s.latent;
    const float* scale = scaled ? s.scale + column / kScaleGroup : nullptr;
    const Operand* q = s.q + head * s.width + column * n;
    for (Index r = 0; r < rows; r += kRows) {
      ahead.fetch(lines);
      product<kRows, kVectors, kTwoSteps>(s.k + r * s.k_stride + column, q, (end - column) / kPair / kSteps,
                                          s.score + r * s.heads + head,
                                          {s.k_stride, kPair * kSteps, n * kPair * kSteps, s.heads, kScaleGroups},
                                          t > 0, scaled ? scale + r * kScaleGroups : nullptr);
    }
  }
}

template <int kVectors>
void add_columns(const TierShape& shape, const Scratch& s, const Operand* p, Index column, Index steps,
                 const TierState& state) {
  constexpr int kRows = 4;
  const Operand* v = kPair == 1 ? s.k + column : s.v + column * kPair;
  const Index step = kPair == 1 ? s.k_stride : s.v_stride;
  for (Index h = 0; h < shape.heads; h += kRows)
    product<kRows, kVectors>(p + h * kPair, v, steps, state.value + h * shape.value_stride + column,
                             {kPair, s.heads * kPair, step, shape.value_stride, 0}, !state.empty, nullptr);
}

template <class T = Ops>
void scores(const TierShape& shape, const Scratch& s, Index rows, Ahead& ahead) {
  if constexpr (T::kHasNarrow)
    if (narrow(shape)) return score_heads<1, true>(shape, s, 0, rows, ahead);
  for (Index head = 0; head < s.heads;) {
    const Index n = vectors((s.heads - head) / kLanes);
    if (n == 1) score_heads<1>(shape, s, head, rows, ahead);
    else if (n == 2) score_heads<2>(shape, s, head, rows, ahead);
    else if (n == 3) score_heads<3>(shape, s, head, rows, ahead);
    else score_heads<4>(shape, s, head, rows, ahead);
    head += n * kLanes;
  }
}

inline void add_values(const TierShape& shape, const Scratch& s, Index rows, const TierState& state) {
  const Index slice = shape.row == Element::e4m3 ? kScaleGroup : s.latent, steps = (rows + kPair - 1) / kPair;
  for (Index first = 0; first < s.latent; first += slice) {
    const Operand* p = s.p + first / slice * Ops::kBlock * s.heads;
    for (Index column = first; column < first + slice;) {
      const Index n = vectors((first + slice - column) / kLanes);
      if (n == 1) add_columns<1>(shape, s, p, column, steps, state);
      else if (n == 2) add_columns<2>(shape, s, p, column, steps, state);
      else if (n == 3) add_columns<3>(shape, s, p, column, steps, state);
      else add_columns<4>(shape, s, p, column, steps, state);
      column += n * kLanes;
    }
  }
}

// ---- softmax ----------------------------------------------------------------------------------------

// e^x for x <= 0, relative error below 2e-7; exactly 1 at 0, 0 below -87; a NaN stays one. With n = round(x / ln 2) and
// r = x - n ln 2 it is 2^n (1 + r + r^2 poly(r)); the polynomial interpolates at Chebyshev nodes of |r| <= ln 2 / 2.
inline Vec exp(Vec x) {
  const Vec n = Ops::round(Ops::mul(x, Ops::set1(0x1.715476p+0f)));
  Vec r = Ops::fma(n, Ops::set1(-0x1.63p-1f), x);  // ln 2 in two parts; the first has 9 bits, n times it is exact
  r = Ops::fma(n, Ops::set1(0x1.bd0106p-13f), r);
  Vec poly = Ops::set1(0x1.6d138p-10f);
  poly = Ops::fma(poly, r, Ops::set1(0x1.120de4p-7f));
  poly = Ops::fma(poly, r, Ops::set1(0x1.555518p-5f));
  poly = Ops::fma(poly, r, Ops::set1(0x1.5554dap-3f));
  poly = Ops::fma(poly, r, Ops::set1(0.5f));
  poly = Ops::fma(Ops::mul(r, r), poly, r);
  return Ops::zero_below(x, -87.f, Ops::times_power(Ops::add(poly, Ops::set1(1.f)), n));
}

// Scores to weights, for the lanes of heads [head, head + kLanes).
//
// A weight that becomes a bf16 operand is off by up to 2^-8. `sum` is of exact weights; `excess` is by how much the sum
// of a slice's rounded weights is larger. Values divided by the latter are a mean of rows again: where one row has most
// of the weight, its rounding cancels (set_gain).
inline void weigh(const TierShape& shape, const Scratch& s, Index head, Index rows, const TierState& state) {
  const Vec factor = Ops::set1(shape.scale), nothing = Ops::set1(-__builtin_inff());
  const bool scaled = shape.row == Element::e4m3;
  float* score = s.score + head;
  const Vec before = state.empty ? nothing : Ops::load(state.peak + head);
  Vec peak = before;
  for (Index r = 0; r < rows; ++r) peak = Ops::max(Ops::mul(Ops::load(score + r * s.heads), factor), peak);
  const Vec shift = Ops::zero_where_equal(peak, nothing, peak);  // not (-inf) - (-inf)
  const Vec rescale = exp(Ops::sub(before, shift));
  Vec sum = state.empty ? Ops::set1(0.f) : Ops::mul(Ops::load(state.sum + head), rescale);
  Vec excess[kScaleGroups];
  for (Index g = 0; g < kScaleGroups; ++g)
    excess[g] = state.empty ? Ops::set1(0.f) : Ops::mul(Ops::load(s.excess + g * s.heads + head), rescale);

  for (Index r = 0; r < rows; r += kPair) {
    Vec p[kPair], more[kPair];
    for (Index j = 0; j < kPair; ++j) {
      p[j] = Ops::set1(0.f);
      if (r + j >= rows) continue;
      p[j] = exp(Ops::sub(Ops::mul(Ops::load(score + (r + j) * s.heads), factor), shift));
      sum = Ops::add(sum, p[j]);
    }
    Operand* to = s.p + r * s.heads + head * kPair;
    if (!scaled) {
      Ops::store_operands(to, p, more);
      for (Index j = 0; kPair > 1 && j < kPair; ++j) excess[0] = Ops::add(excess[0], more[j]);
      continue;
    }
    const float *scale = s.scale + r * kScaleGroups, *inverse = scale + Ops::kBlock * kScaleGroups;
    for (Index g = 0; g < kScaleGroups; ++g) {
      Vec weight[kPair];  // a row of zeros has scales of 0
      for (Index j = 0; j < kPair; ++j) weight[j] = Ops::mul(p[j], Ops::set1(scale[j * kScaleGroups + g]));
      Ops::store_operands(to + g * Ops::kBlock * s.heads, weight, more);
      for (Index j = 0; kPair > 1 && j < kPair; ++j)
        excess[g] = Ops::fma(more[j], Ops::set1(inverse[j * kScaleGroups + g]), excess[g]);
    }
  }
  Ops::store(state.peak + head, peak);
  Ops::store(state.sum + head, sum);
  Ops::store(s.rescale + head, rescale);
  for (Index g = 0; g < kScaleGroups; ++g) Ops::store(s.excess + g * s.heads + head, excess[g]);
}

inline void multiply(float* x, Index n, float by) {
  const Vec factor = Ops::set1(by);
  for (Index i = 0; i < n; i += kLanes) Ops::store(x + i, Ops::mul(Ops::load(x + i), factor));
}

// The values are sums of rounded weights and rows; what makes them as if the rounded weights added up to state.sum.
inline void set_gain(const TierShape& shape, const Scratch& s, const TierState& state) {
  for (Index g = 0; g < kSlices; ++g)
    for (Index h = 0; h < shape.heads; ++h) {
      const float excess = s.excess[g * s.heads + h];
      state.gain[g * round_up(shape.heads, kHeadPad) + h] = excess != 0 ? state.sum[h] / (state.sum[h] + excess) : 1.f;
    }
}

// ---- a block ----------------------------------------------------------------------------------------

template <class T = Ops>  // a template, so that what a tier does not have is not looked for
void attend_block(const TierShape& shape, const Scratch& s, const std::byte* const* from, Index rows, Ahead ahead,
                  TierState& state) {
  const Index padded = round_up(rows, Ops::kRowPad);
  for (Index r = 0; r < padded; ++r) {
    Operand* k = s.k + r * s.k_stride;
    if constexpr (T::kTiles) {
      const Index next = r + T::kAhead, after = next - rows;
      if (next < rows) Ahead(shape, from + next, 1).fetch();
      else if (after < ahead.count) Ahead(shape, ahead.rows + after, 1).fetch();
    }
    if (r < rows) {
      load_row(shape, s, from[r], k, s.scale + r * kScaleGroups);
    } else {  // rows of zeros: they fill a step of the products, and weigh nothing
      for (Index i = 0; i < s.width; ++i) k[i] = 0;
      for (Index g = 0; g < kScaleGroups; ++g) s.scale[r * kScaleGroups + g] = 0;
    }
    if constexpr (T::kPair == 2)
      if (r % 2 == 1) T::interleave(k - s.k_stride, k, s.latent, s.v + r / 2 * s.v_stride);
  }
  if (T::kPair == 2 && shape.row == Element::e4m3)
    for (Index i = 0; i < padded * kScaleGroups; ++i)
      s.scale[Ops::kBlock * kScaleGroups + i] = s.scale[i] != 0.f ? 1.f / s.scale[i] : 0.f;

  if constexpr (T::kTiles) T::scores(shape, s, padded);
  else scores(shape, s, padded, ahead);
  for (Index h = 0; h < shape.heads; h += kLanes) weigh(shape, s, h, rows, state);
  for (Index h = 0; !state.empty && h < shape.heads; ++h)
    if (s.rescale[h] != 1.f) multiply(state.value + h * shape.value_stride, s.latent, s.rescale[h]);
  if constexpr (T::kTiles) T::add_values(shape, s, padded, rows, state);
  else add_values(shape, s, rows, state);
  state.empty = false;
}

inline void attend(const TierShape& shape, std::byte* scratch, const std::byte* const* rows, Index n,
                   const std::byte* const* ahead, Index n_ahead, TierState* state) {
  const Scratch s(shape, scratch);
  Ops::begin();
  for (Index r = 0; r < n; r += Ops::kBlock) {
    const Index next = least(n, r + Ops::kBlock);
    const bool last = next == n;
    attend_block(shape, s, rows + r, next - r, Ahead(shape, last ? ahead : rows + next, last ? n_ahead : n - next),
                 *state);
  }
  Ops::end();
  set_gain(shape, s, *state);
}

inline void fold(float* sum, float keep, const float* value, float weight, Index columns) {
  const Vec before = Ops::set1(keep), by = Ops::set1(weight);
  for (Index i = 0; i < columns; i += kLanes)
    Ops::store(sum + i, Ops::fma(Ops::load(sum + i), before, Ops::mul(Ops::load(value + i), by)));
}

inline Index scratch_bytes(const TierShape& shape) { return Scratch(shape, nullptr).bytes; }

constexpr Tier kTier = {scratch_bytes, load_queries<>, attend, fold};
