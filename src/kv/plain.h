// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/plain.h -- unquantised rows: latent | rope, side by side, all f32 or all bf16.
#pragma once
#include <cstddef>
#include <cstring>

#include "base/number.h"
#include "sievemla/kv_format.h"

namespace sievemla::kv {

struct F32Row {
  static constexpr KvFormat kFormat = KvFormat::f32;
  static constexpr const char* kName = "f32";
  static constexpr const char* kSource = "this library (CPU and reference)";
  static constexpr DType kStorage = DType::f32;
  static constexpr int kLatent = 0, kRope = -1;  // any
  static constexpr int kScaleGroup = 0;
  static constexpr std::int64_t row_bytes(int latent, int rope) { return std::int64_t{4} * (latent + rope); }

  template <class Real>
  static void load(const std::byte* row, int latent, int rope, Real* out) {
    const float* x = reinterpret_cast<const float*>(row);
    for (int i = 0; i < latent + rope; ++i) out[i] = static_cast<Real>(x[i]);
  }
  static void store(std::byte* row, int latent, int rope, const float* x, ScaleRule) {
    std::memcpy(row, x, static_cast<std::size_t>(row_bytes(latent, rope)));
  }
};

struct Bf16Row {
  static constexpr KvFormat kFormat = KvFormat::bf16;
  static constexpr const char* kName = "bf16";
  static constexpr const char* kSource = "vLLM and SGLang, 576 or 512 elements a token";
  static constexpr DType kStorage = DType::bf16;
  static constexpr int kLatent = 0, kRope = -1;  // any
  static constexpr int kScaleGroup = 0;
  static constexpr std::int64_t row_bytes(int latent, int rope) { return std::int64_t{2} * (latent + rope); }

  template <class Real>
  static void load(const std::byte* row, int latent, int rope, Real* out) {
    const bf16* x = reinterpret_cast<const bf16*>(row);
    for (int i = 0; i < latent + rope; ++i) out[i] = static_cast<Real>(base::to_f32(x[i]));
  }
  static void store(std::byte* row, int latent, int rope, const float* x, ScaleRule) {
    bf16* out = reinterpret_cast<bf16*>(row);
    for (int i = 0; i < latent + rope; ++i) out[i] = base::to_bf16(x[i]);
  }
};

}  // namespace sievemla::kv
