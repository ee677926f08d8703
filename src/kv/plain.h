// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/plain.h -- unquantised rows: latent | rope, side by side, all f32 or all bf16.
//
//   [0, e * latent)                     latent        e = 4 (f32) or 2 (bf16)
//   [e * latent, e * (latent + rope))   rope
#pragma once
#include <cstddef>
#include <span>

#include "base/number.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

template <class Element>
struct PlainRow {
  static constexpr DType kStorage = sievemla::detail::DTypeOf<Element>::value;
  static constexpr int kLatent = 0, kRope = -1;  // any
  static constexpr int kScaleGroup = 0;
  static constexpr std::int64_t row_bytes(int latent, int rope) {
    return size_of(kStorage) * (std::int64_t{latent} + rope);
  }

  template <class T>
  static void load(const std::byte* row, int latent, int rope, T* out) {
    const auto* x = reinterpret_cast<const Element*>(row);
    for (int i = 0; i < latent + rope; ++i) out[i] = base::round_to<T>(base::to_f32(x[i]));
  }
  template <class T>
  static void store(std::byte* row, std::span<const T> latent, std::span<const T> rope, ScaleRule) {
    auto* out = reinterpret_cast<Element*>(row);
    for (T x : latent) *out++ = base::round_to<Element>(base::to_f32(x));
    for (T x : rope) *out++ = base::round_to<Element>(base::to_f32(x));
  }
};

struct F32Row : PlainRow<float> {
  static constexpr KvFormat kFormat = KvFormat::f32;
  static constexpr const char* kName = "f32";
  static constexpr const char* kSource = "this library (CPU and reference)";
};

struct Bf16Row : PlainRow<bf16> {
  static constexpr KvFormat kFormat = KvFormat::bf16;
  static constexpr const char* kName = "bf16";
  static constexpr const char* kSource = "vLLM and SGLang, 576 or 512 elements a token";
};

}  // namespace sievemla::kv
