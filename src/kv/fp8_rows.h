// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/fp8_rows.h -- packed rows with an e4m3 latent, one f32 scale per 128 values, and an unquantised rope.
//
//   fp8_ds_mla, 656 bytes:  [  0, 512)  e4m3 latent
//                           [512, 528)  f32 scale x 4, one per 128 latent values; value = e4m3 * scale
//                           [528, 656)  bf16 rope x 64
//   fp8_nope,   528 bytes:  the same without the rope
//
// Scales are arbitrary f32, never rounded to e8m0 or bf16. Source: FlashMLA (fp8 sparse decode, 656 bytes a token),
// vLLM fp8_ds_mla; FlashInfer's rope-free payload of 528 bytes. Golden bytes: tests/golden/trace-glm5.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/number.h"
#include "kv/e4m3.h"
#include "kv/quantise.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

template <int Rope>
struct Fp8Row {
  static constexpr DType kStorage = DType::u8;
  static constexpr int kLatent = 512, kRope = Rope;
  static constexpr int kScaleGroup = 128, kGroups = kLatent / kScaleGroup;
  static constexpr int kScaleOffset = kLatent;
  static constexpr int kRopeOffset = kScaleOffset + 4 * kGroups;
  static constexpr int kRowBytes = kRopeOffset + 2 * kRope;
  static constexpr std::int64_t row_bytes(int, int) { return kRowBytes; }

  static float scale(const std::byte* row, int group) {
    float s;  // rows may start anywhere
    std::memcpy(&s, row + kScaleOffset + 4 * group, sizeof s);
    return s;
  }
  static float rope(const std::byte* row, int i) {
    bf16 x;
    std::memcpy(&x, row + kRopeOffset + 2 * i, sizeof x);
    return base::to_f32(x);
  }

  // Rounds once, whatever T is: the product has 4 + 24 bits of significand, so double holds it and float rounds it.
  template <class T>
  static void load(const std::byte* row, int, int, T* out) {
    using Product = std::conditional_t<std::is_same_v<T, float>, float, double>;
    for (int g = 0; g < kGroups; ++g) {
      const Product s = scale(row, g);
      for (int i = g * kScaleGroup; i < (g + 1) * kScaleGroup; ++i)
        out[i] = base::round_to<T>(Product{kE4m3Value[static_cast<std::uint8_t>(row[i])]} * s);
    }
    for (int i = 0; i < kRope; ++i) out[kLatent + i] = base::round_to<T>(rope(row, i));
  }
  template <class T>
  static void store(std::byte* row, std::span<const T> latent, std::span<const T> rope, ScaleRule rule) {
    for (int g = 0; g < kGroups; ++g) {
      const float s = quantise_group(latent.data() + g * kScaleGroup, kScaleGroup, rule, 0.f,
                                     reinterpret_cast<std::uint8_t*>(row) + g * kScaleGroup);
      std::memcpy(row + kScaleOffset + 4 * g, &s, sizeof s);
    }
    for (int i = 0; i < kRope; ++i) {
      const bf16 r = base::to_bf16(base::to_f32(rope[static_cast<std::size_t>(i)]));
      std::memcpy(row + kRopeOffset + 2 * i, &r, sizeof r);
    }
  }
};

struct Fp8DsMlaRow : Fp8Row<64> {
  static constexpr KvFormat kFormat = KvFormat::fp8_ds_mla;
  static constexpr const char* kName = "fp8_ds_mla";
  static constexpr const char* kSource = "FlashMLA sparse decode, vLLM fp8_ds_mla: 656 bytes a token";
};
static_assert(Fp8DsMlaRow::kRowBytes == 656, "the wire format that FlashMLA and vLLM write");

struct Fp8NopeRow : Fp8Row<0> {
  static constexpr KvFormat kFormat = KvFormat::fp8_nope;
  static constexpr const char* kName = "fp8_nope";
  static constexpr const char* kSource = "FlashInfer, GLM-5.3-Flash: 528 bytes a token, at any row stride";
};
static_assert(Fp8NopeRow::kRowBytes == 528);

}  // namespace sievemla::kv
