// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/codec/codec-inl.h -- the loops of codec.h, in plain C++ that compilers vectorise: no branches, one size of
// element where it can be, both candidates computed and one selected. Included inside a tier's unnamed namespace.
#pragma once

using Index = std::int64_t;

inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}
inline float f32_of(std::uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

inline std::uint16_t bf16_of(float x) {
  const std::uint32_t u = bits_of(x), rounded = u + 0x7FFFu + (u >> 16 & 1u);
  return static_cast<std::uint16_t>(((u & 0x7FFFFFFFu) > 0x7F800000u ? u | 0x400000u : rounded) >> 16);
}

// `nearest`, moved by one bit to what rounding to odd gives, where `excess` has the sign of nearest - exact. Rounded
// once more, to a shorter type, that is what one rounding of the exact value gives.
inline float to_odd(float nearest, float excess) {
  const std::uint32_t u = bits_of(nearest), sign = bits_of(excess) >> 31;
  const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(excess) & 0x7FFFFFFFu);
  const std::uint32_t lost = (magnitude > 0 ? 1u : 0u) & (magnitude <= 0x7F800000 ? 1u : 0u);  // 0 for NaN
  return f32_of((u - (lost & ((u >> 31) ^ sign ^ 1u))) | lost);
}
// So that an excess of 2^-30 of any number stays above 0 in f32.
constexpr double kLarge = 0x1p64;

template <class From, class To, class F>
void each(const void* from, Index n, void* to, F&& f) {  // rows may start anywhere
  const char* x = static_cast<const char*>(from);
  char* y = static_cast<char*>(to);
  for (Index i = 0; i < n; ++i) {
    From in;
    __builtin_memcpy(&in, x + i * static_cast<Index>(sizeof in), sizeof in);
    const To out = f(in);
    __builtin_memcpy(y + i * static_cast<Index>(sizeof out), &out, sizeof out);
  }
}

inline void convert(Real type, const void* from, Index n, Real to_type, void* to) {
  if (type == to_type) __builtin_memcpy(to, from, static_cast<std::size_t>(n * (type == Real::f32 ? 4 : 2)));
  else if (type == Real::bf16)
    each<std::uint16_t, float>(from, n, to, [](std::uint16_t x) { return f32_of(std::uint32_t{x} << 16); });
  else each<float, std::uint16_t>(from, n, to, [](float x) { return bf16_of(x); });
}

inline std::uint32_t load_group(Real type, const void* from, float* to) {
  convert(type, from, kGroup, Real::f32, to);
  std::int32_t largest = 0;
  for (Index i = 0; i < kGroup; ++i) {
    const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(to[i]) & 0x7FFFFFFFu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<std::uint32_t>(largest);
}

// As kv/e4m3.h, for a number; selected by masks (all ones or 0), since of `?:` compilers make branches.
inline std::uint8_t e4m3_of(float x) {
  constexpr std::int32_t kMost = 0x43E00000, kLeastNormal = 0x3C800000;  // 448, 2^-6
  const std::int32_t u = static_cast<std::int32_t>(bits_of(x)), exact = u & 0x7FFFFFFF;
  const std::int32_t magnitude = kMost + ((exact - kMost) & (exact - kMost) >> 31);
  const std::int32_t normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const std::int32_t subnormal =
      static_cast<std::int32_t>(bits_of(f32_of(static_cast<std::uint32_t>(magnitude)) + 0x1p14f) & 0xFu);
  const std::int32_t small = (magnitude - kLeastNormal) >> 31;
  return static_cast<std::uint8_t>((u >> 24 & 0x80) | (subnormal & small) | (normal & ~small));
}

inline void encode(const float* x, float scale, bool exact, std::uint8_t* codes) {
  const double wide_scale = static_cast<double>(scale);
  float quotient[kGroup], excess[kGroup];
  for (Index i = 0; i < kGroup; ++i) quotient[i] = x[i] / scale;
  if (!exact) {
    for (Index i = 0; i < kGroup; ++i) codes[i] = e4m3_of(quotient[i]);
    return;
  }
  for (Index i = 0; i < kGroup; ++i)  // exact, but for the last rounding
    excess[i] =
        static_cast<float>((static_cast<double>(quotient[i]) * wide_scale - static_cast<double>(x[i])) * kLarge);
  for (Index i = 0; i < kGroup; ++i) codes[i] = e4m3_of(to_odd(quotient[i], excess[i]));
}

inline float e4m3_value(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7Fu;
  const float normal = f32_of((magnitude << 20) + (120u << 23));
  // Of a subnormal it is 2^-7 + m 2^-10, where 2^-9 m is meant; from 2^-6 on the other is the larger.
  const float other = normal + normal - 0x1p-6f, value = other < normal ? other : normal;
  return f32_of((magnitude == 0x7Fu ? 0x7FC00000u : bits_of(value)) | (code & 0x80u) << 24);
}

inline void decode(const std::uint8_t* codes, float scale, Real to_type, void* to) {
  float value[kGroup], product[kGroup], excess[kGroup];
  for (Index i = 0; i < kGroup; ++i) value[i] = e4m3_value(codes[i]);
  for (Index i = 0; i < kGroup; ++i) product[i] = value[i] * scale;
  if (to_type == Real::f32) return convert(Real::f32, product, kGroup, Real::f32, to);
  const double wide_scale = static_cast<double>(scale);
  for (Index i = 0; i < kGroup; ++i)
    excess[i] =
        static_cast<float>((static_cast<double>(product[i]) - static_cast<double>(value[i]) * wide_scale) * kLarge);
  for (Index i = 0; i < kGroup; ++i) product[i] = to_odd(product[i], excess[i]);
  convert(Real::f32, product, kGroup, Real::bf16, to);
}

constexpr Codec kCodec = {convert, load_group, encode, decode};
