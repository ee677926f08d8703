// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/scores-inl.h -- index scores on the CPU: the algorithm, written once for all instruction sets.
//
// A tier's file defines `Ops`, its vectors, and includes this inside its own unnamed namespace. Lanes are keys, so that
// heads are summed in the lane. A block of keys is transposed and converted once for all heads and rows:
//
//   32-bit words of kLanes keys -> transposed: lane i is key i -> `expand`: a word's parts, each an operand a lane
//
// A word holds 4 e4m3, 2 bf16 or 1 f32. It is transposed while it is packed, and its parts are cut out in the lane; so
// the order of dimensions in a tile is [part][word], and queries are packed in the same.
#pragma once

// ---- sizes ------------------------------------------------------------------------------------------

constexpr Index kDim = 128;

using Operand = Ops::Operand;
using Right = Ops::Right;
using Vec = Ops::Vec;
using Words = Ops::Words;
constexpr Index kLanes = Ops::kLanes;
constexpr Index kPair = Ops::kPair;            // operands that a lane multiplies and adds at a time
constexpr Index kBlock = Ops::kVecs * kLanes;  // keys of a tile
constexpr Index kSteps = kDim / kPair;
constexpr Index kHeadPad = Ops::kTiles ? 16 : 1;  // heads are packed in multiples of this
static_assert(kKeyPad % kBlock == 0);

constexpr Index round_up(Index n, Index to) { return (n + to - 1) / to * to; }
constexpr Index bytes(Element type) { return type == Element::f32 ? 4 : type == Element::bf16 ? 2 : 1; }
constexpr Index words(Element type) { return kDim * bytes(type) / 4; }
constexpr int parts(Element type) { return static_cast<int>(4 / bytes(type) / kPair); }  // of a word

// Arrays of a worker.
struct Scratch {
  Index heads;     // padded
  Operand* q;      // [kQueryRows, heads, kDim]
  float* weights;  // [kQueryRows, heads]
  Operand* tile;   // [kSteps][kBlock][kPair]
  Index bytes;

  Scratch(Index n, std::byte* memory) : heads(round_up(n, kHeadPad)), bytes(0) {
    q = take<Operand>(memory, kQueryRows * heads * kDim);
    weights = take<float>(memory, kQueryRows * heads);
    tile = take<Operand>(memory, kBlock * kDim);
  }

 private:
  template <class T>
  T* take(std::byte* memory, Index n) {
    T* array = memory ? reinterpret_cast<T*>(memory + bytes) : nullptr;
    bytes += round_up(n * static_cast<Index>(sizeof(T)), 64);
    return array;
  }
};

// f(0), .. f(kN - 1), unrolled whatever the compiler thinks of it.
template <int kN>
struct Unrolled {
  template <class F>
  [[gnu::always_inline]] static void each(F&& f) {
    Unrolled<kN - 1>::each(f);
    f.template operator()<kN - 1>();
  }
};
template <>
struct Unrolled<0> {
  template <class F>
  [[gnu::always_inline]] static void each(F&&) {}
};

template <class T>
T element(const void* from, Index i) {
  T x;
  __builtin_memcpy(&x, static_cast<const char*>(from) + i * static_cast<Index>(sizeof(T)), sizeof x);
  return x;
}
inline void store(Operand* to, Right x) { __builtin_memcpy(to, &x, sizeof x); }

// ---- keys and queries in, operands out --------------------------------------------------------------

// The parts of these words, each `stride` operands after the one before.
template <Element kKey>
[[gnu::always_inline]] inline void store_parts(Words x, Operand* to, Index stride) {
  Unrolled<parts(kKey)>::each([&]<int kPart>() __attribute__((always_inline)) {
    store(to + kPart * stride, Ops::template part<kKey, kPart>(x));
  });
}

// The top bit of a byte is set where that of x is an e4m3 NaN.
inline Words nan_codes(Words x) { return (x & 0x7F7F7F7Fu) + 0x01010101u; }
inline Vec nan_where(Words codes, Vec x) { return (Vec)((Words)((codes & 0x80808080u) != 0) | (Words)x); }

// kBlock keys become the tile. Scales of keys that hold a NaN code become NaN: `part` may read it as a number.
template <Element kKey>
void load_tile(const std::byte* const* keys, Operand* tile, float* scales) {
  constexpr Index kWords = words(kKey), kLines = kWords / 16;
  for (Index k = 0; k < kBlock; k += kLanes) {
    Words nan{};
    for (Index w = 0; w < kWords; w += 4) {
      for (Index line = w * kLanes / 16; line < (w + 4) * kLanes / 16; ++line)  // evenly, kLines of each key
        __builtin_prefetch(keys[kAhead + k + line / kLines] + line % kLines * 64, 0, 2);
      Words x[4];
      for (Index j = 0; j < 4; ++j) x[j] = Ops::load_quads(keys + k + j, 4 * w);
      const Words a = Ops::low_words(x[0], x[1]), b = Ops::high_words(x[0], x[1]);
      const Words c = Ops::low_words(x[2], x[3]), d = Ops::high_words(x[2], x[3]);
      x[0] = Ops::low_pairs(a, c), x[1] = Ops::high_pairs(a, c);
      x[2] = Ops::low_pairs(b, d), x[3] = Ops::high_pairs(b, d);
      for (Index j = 0; j < 4; ++j) {
        if constexpr (kKey == Element::e4m3) nan |= nan_codes(x[j]);
        store_parts<kKey>(x[j], tile + ((w + j) * kBlock + k) * kPair, kWords * kBlock * kPair);
      }
    }
    if constexpr (kKey == Element::e4m3) Ops::store(scales + k, nan_where(nan, Ops::load(scales + k)));
  }
}

// The same for a head of 128 elements of the keys' type.
template <Element kKey>
void load_head(const void* from, Operand* q, float* weight) {
  constexpr Index kWords = words(kKey);
  Words nan{};
  for (Index w = 0; w < kWords; w += kLanes) {
    const Words x = element<Words>(from, w / kLanes);
    if constexpr (kKey == Element::e4m3) nan |= nan_codes(x);
    store_parts<kKey>(x, q + w * kPair, kWords * kPair);
  }
  if constexpr (kKey == Element::e4m3)
    for (Index i = 0; i < kLanes; ++i)
      if (nan[i] & 0x80808080u) *weight = __builtin_nanf("");
}

inline void copy_element(Element type, const void* from, Index i, float* to) {
  if (type == Element::f32) *to = element<float>(from, i);
  else *to = element<float>(&(const std::uint32_t&)(std::uint32_t{element<std::uint16_t>(from, i)} << 16), 0);
}
inline void copy_element(Element, const void* from, Index i, std::uint16_t* to) {
  *to = element<std::uint16_t>(from, i);
}

// A head of f32 or bf16, for keys of another type.
inline void load_head(Element query, Element key, const void* from, Operand* q) {
  const Index n = words(key), n_parts = parts(key);
  for (Index p = 0; p < n_parts; ++p)
    for (Index w = 0; w < n; ++w)
      for (Index i = 0; i < kPair; ++i)
        copy_element(query, from, (w * kPair + i) * n_parts + p, q + (p * n + w) * kPair + i);
}

inline void load_query(const TierShape& shape, std::byte* scratch, Index row, const void* const* heads,
                       const float* weights) {
  const Scratch s(shape.heads, scratch);
  for (Index h = 0; h < s.heads; ++h) {
    Operand* q = s.q + (row * s.heads + h) * kDim;
    float* weight = s.weights + row * s.heads + h;
    *weight = h < shape.heads ? weights[h] : 0.f;
    if (h >= shape.heads) __builtin_memset(q, 0, kDim * sizeof(Operand));
    else if (shape.query != shape.key) load_head(shape.query, shape.key, heads[h], q);
    else if (shape.key == Element::e4m3) load_head<Element::e4m3>(heads[h], q, weight);
    else if (shape.key == Element::bf16) load_head<Element::bf16>(heads[h], q, weight);
    else load_head<Element::f32>(heads[h], q, weight);
  }
}

// ---- scores -----------------------------------------------------------------------------------------

// sum[kBlock] += weights[h] * max(q[h] . key, least), head after head: what a lane adds depends on nothing else.
template <int kHeads>
[[gnu::noinline]] void add_heads(const Operand* q, const float* weights, const Operand* tile, float least_dot,
                                 float* sum) {  // a function of its own: it needs all registers
  constexpr int kVecs = static_cast<int>(Ops::kVecs);
  Vec dots[kHeads][kVecs];
  const auto for_each = [](auto&& f) __attribute__((always_inline)) {
    Unrolled<kHeads>::each([&]<int kHead>() __attribute__((always_inline)) {
      Unrolled<kVecs>::each([&]<int kVec>() __attribute__((always_inline)) { f(kHead, kVec); });
    });
  };
  for_each([&](int h, int v) __attribute__((always_inline)) { dots[h][v] = Ops::set1(0.f); });
  for (Index i = 0; i < kSteps; ++i, tile += kBlock * kPair, q += kPair) {
    Right keys[kVecs];
    Unrolled<kVecs>::each(
        [&]<int kVec>() __attribute__((always_inline)) { keys[kVec] = Ops::right(tile + kVec * kLanes * kPair); });
    Unrolled<kHeads>::each([&]<int kHead>() __attribute__((always_inline)) {
      const Right left = Ops::left(q + kHead * kDim);
      Unrolled<kVecs>::each([&]<int kVec>() __attribute__((always_inline)) {
        dots[kHead][kVec] = Ops::dot(dots[kHead][kVec], left, keys[kVec]);
      });
    });
  }
  const Vec floor = Ops::set1(least_dot);
  Unrolled<kVecs>::each([&]<int kVec>() __attribute__((always_inline)) {
    Vec total = Ops::load(sum + kVec * kLanes);
    Unrolled<kHeads>::each([&]<int kHead>() __attribute__((always_inline)) {
      total = Ops::fma(Ops::set1(weights[kHead]), Ops::max(floor, dots[kHead][kVec]), total);  // a NaN stays one
    });
    Ops::store(sum + kVec * kLanes, total);
  });
}

// As many groups of kHeads as there are, and the rest in smaller ones.
template <int kHeads = Ops::kHeads>
void add_all_heads(const TierShape& shape, Index head, const Operand* q, const float* weights, const Operand* tile,
                   float* sum) {
  for (; head + kHeads <= shape.heads; head += kHeads)
    add_heads<kHeads>(q + head * kDim, weights + head, tile, shape.least, sum);
  if constexpr (kHeads > 1)
    if (head < shape.heads) add_all_heads<kHeads - 1>(shape, head, q, weights, tile, sum);
}

template <class T = Ops>  // a template, so that what a tier does not have is not looked for
void score(const TierShape& shape, std::byte* scratch, const std::byte* const* keys, const float* scales, Index n,
           const Index* rows, float* const* out, Index n_rows) {
  const Scratch s(shape.heads, scratch);
  if constexpr (T::kTiles) T::begin();
  for (Index k = 0; k < n; k += kBlock) {
    alignas(64) float scale[kBlock];
    __builtin_memcpy(scale, scales + k, sizeof scale);
    if (shape.key == Element::e4m3) load_tile<Element::e4m3>(keys + k, s.tile, scale);
    else if (shape.key == Element::bf16) load_tile<Element::bf16>(keys + k, s.tile, scale);
    else load_tile<Element::f32>(keys + k, s.tile, scale);
    for (Index i = 0; i < n_rows; ++i) {
      const Operand* q = s.q + rows[i] * s.heads * kDim;
      const float* weights = s.weights + rows[i] * s.heads;
      alignas(64) float sum[kBlock] = {};
      if constexpr (T::kTiles) T::add_all_heads(shape, q, weights, s.tile, sum);
      else add_all_heads(shape, 0, q, weights, s.tile, sum);
      for (Index j = 0; j < kBlock; j += kLanes)
        Ops::store(out[i] + k + j, Ops::mul(Ops::load(scale + j), Ops::load(sum + j)));
    }
  }
  if constexpr (T::kTiles) T::end();
}

inline Index scratch_bytes(Index heads) { return Scratch(heads, nullptr).bytes; }

constexpr Tier kTier = {scratch_bytes, load_query, score<>};
