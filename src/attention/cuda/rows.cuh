// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/rows.cuh -- cache rows in shared memory, and the MMA fragments of their latent and rope.
//
// A warp owns 128 latent dimensions and a quarter of the rope of every row of a tile. It reads them twice: as keys
// (rows on M, dimensions on K) and as values (dimensions on M, rows on K).
#pragma once
#include <cuda_bf16.h>

#include "cuda/mma/e4m3.cuh"
#include "cuda/ptx/ptx.cuh"
#include "kv/fp8_rows.h"
#include "kv/plain.h"

namespace sievemla::stage::attention {

namespace cu = sievemla::cuda;

inline constexpr int kLatent = 512, kWarpLatent = 128;

struct Fragment {
  std::uint32_t a[4];
};

// A scale, or a number in place of NaN and of what, times the factors below, would be infinite.
__device__ inline float finite_scale(float x) { return fmaxf(fminf(x, 0x1p71f), -0x1p71f); }
// Two bf16, 0 in place of one that is not finite.
__device__ inline std::uint32_t finite_bf16x2(std::uint32_t x) {
  if ((x & 0x7F80u) == 0x7F80u) x &= 0xFFFF0000u;
  if ((x & 0x7F800000u) == 0x7F800000u) x &= 0x0000FFFFu;
  return x;
}

// Both row types have, for a tile of rows in shared memory:
//   load_keys:   what 16 rows hold of steps 2i and 2i + 1 (of the warp's eight steps of 16 dimensions)
//   load_values: the same of columns 32 i .. 32 i + 31 (of the warp's 128), transposed
//   key, value:  fragment 0 or 1 of what was loaded
//   value_row:   the row of the 16 whose address a lane gives to load_values
//   clear_not_finite: a warp makes a number of what is none in a row's values
//   query_step:  a query's step of 16, as shared memory has it beside key fragments (turns.cuh; ScaledHeads in
//                hopper_heads.cuh has the same order)
// Loading is apart from converting, so that loads can run ahead.
struct Raw {
  std::uint32_t r[8];
};

// bf16 latent | bf16 rope.
template <int Rope>
struct Bf16Rows {
  static constexpr KvFormat kFormat = KvFormat::bf16;
  static constexpr const char* kName = Rope ? "bf16" : "bf16_nope";
  static constexpr int kRope = Rope, kBytes = static_cast<int>(kv::Bf16Row::row_bytes(kLatent, Rope));
  static constexpr int kValueBytes = 2 * kLatent;
  static constexpr int kStride = kBytes + 16;  // an odd number of 16-byte pieces: ldmatrix then meets no bank twice
  static constexpr int kRopeOffset = 2 * kLatent;
  static constexpr bool kScaled = false;
  static constexpr std::uint32_t kQueryFactor = 0;  // none
  static constexpr float kKeyFactor = 1.f, kWeightFactor = 1.f, kValueFactor = 1.f;

  // Of a query's step of 16, what stands at MMA key positions (2c, 2c + 1) and (2c + 8, 2c + 9).
  __device__ static uint2 query(const __nv_bfloat16* step, int c) {
    return {__ldg(reinterpret_cast<const unsigned*>(step + 2 * c)),
            __ldg(reinterpret_cast<const unsigned*>(step + 2 * c + 8))};
  }
  __device__ static void query_step(uint4 (&)[2]) {}
  __device__ static void clear_not_finite(unsigned char* row, int lane) {
    for (int i = lane; i < kLatent / 2; i += 32) {
      auto& pair = reinterpret_cast<std::uint32_t*>(row)[i];
      pair = finite_bf16x2(pair);
    }
  }
  __device__ static int value_row(int lane) { return lane % 8 + lane / 16 * 8; }
  __device__ static void load_keys(Raw& raw, std::uint32_t s_rows, int warp, int i, int lane) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      load4(raw, k, s_rows + (lane % 16) * kStride + 2 * (kWarpLatent * warp + 16 * (2 * i + k)) + lane / 16 * 16,
            false);
  }
  __device__ static void load_values(Raw& raw, std::uint32_t s_rows, int warp, int i, int lane) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      load4(raw, k, s_rows + value_row(lane) * kStride + 2 * (kWarpLatent * warp + 32 * i + 16 * k) + lane / 8 % 2 * 16,
            true);
  }
  __device__ static Fragment key(const Raw& raw, int k) {
    return {raw.r[4 * k], raw.r[4 * k + 1], raw.r[4 * k + 2], raw.r[4 * k + 3]};
  }
  __device__ static Fragment value(const Raw& raw, int k) { return key(raw, k); }
  static constexpr bool kPairedColumns = false;  // a value fragment's rows g and g + 8 are columns g and g + 8

 private:
  __device__ static void load4(Raw& raw, int k, std::uint32_t s_row, bool transposed) {
    std::uint32_t r[4];
    if (transposed) cu::ldmatrix_x4_trans(r, s_row);
    else cu::ldmatrix_x4(r, s_row);
#pragma unroll
    for (int j = 0; j < 4; ++j) raw.r[4 * k + j] = r[j];
  }
};

// e4m3 latent | 4 x f32 scale | bf16 rope.
//
// A code becomes a bf16 of value * 2^-120 (cuda/mma/e4m3.cuh). By mma.sync Q carries 2^64 and P 2^48 to keep sums far
// from the ends of f32; the rest is made up for where the scale meets the score, and in the end. Exact for scales up to
// 2^70; in the loops of sm_90 by wgmma, whose weights carry 2^56 (hopper_heads.cuh) and may be 2^8, below 2^63.
template <int Rope>
struct Fp8Rows {
  using Map = kv::Fp8Row<Rope>;
  static constexpr KvFormat kFormat = Rope ? KvFormat::fp8_ds_mla : KvFormat::fp8_nope;
  static constexpr const char* kName = Rope ? "fp8_ds_mla" : "fp8_nope";
  static constexpr int kRope = Rope, kBytes = Map::kRowBytes;
  static constexpr int kValueBytes = kLatent;
  static constexpr int kStride = kBytes;  // 41 or 33 pieces of 16 bytes: odd already
  static constexpr int kRopeOffset = Map::kRopeOffset, kScaleOffset = Map::kScaleOffset;
  static constexpr bool kScaled = true;
  static constexpr std::uint32_t kQueryFactor = 0x5F805F80u;  // 2^64, twice
  static constexpr float kKeyFactor = 0x1p56f, kWeightFactor = 0x1p48f, kValueFactor = 0x1p72f;
  static_assert(Map::kScaleGroup == kWarpLatent, "a warp's latent has one scale");

  // One 16-byte piece is a step of 16: the thread's four bytes 4c .. 4c + 3 make the positions 2c, 2c + 1, 2c + 8, 2c +
  // 9.
  __device__ static uint2 query(const __nv_bfloat16* step, int c) {
    return __ldg(reinterpret_cast<const uint2*>(step + 4 * c));
  }
  __device__ static void query_step(uint4 (&y)[2]) {
    y[0] = times_factor(y[0]), y[1] = times_factor(y[1]);
    const uint4 low = {y[0].x, y[0].z, y[1].x, y[1].z}, high = {y[0].y, y[0].w, y[1].y, y[1].w};
    y[0] = low, y[1] = high;
  }
  __device__ static void clear_not_finite(unsigned char* row, int lane) {
    auto* const scale = reinterpret_cast<float*>(row + kScaleOffset);
    if (lane < 4) scale[lane] = finite_scale(scale[lane]);
  }
  __device__ static int value_row(int lane) { return lane % 16; }
  __device__ static void load_keys(Raw& raw, std::uint32_t s_rows, int warp, int i, int lane) {
    std::uint32_t r[4];
    cu::ldmatrix_x4(r, s_rows + (lane % 16) * kStride + kWarpLatent * warp + 32 * i + lane / 16 * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) raw.r[j] = r[j];
  }
  __device__ static void load_values(Raw& raw, std::uint32_t s_rows, int warp, int i, int lane) {
    std::uint32_t r[4];
    cu::ldmatrix_x4_trans(r, s_rows + value_row(lane) * kStride + kWarpLatent * warp + 32 * i + lane / 16 * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) raw.r[j] = r[j];
  }
  __device__ static Fragment key(const Raw& raw, int k) {
    return {cu::e4m3_pair<cu::kBytes01>(raw.r[2 * k]), cu::e4m3_pair<cu::kBytes01>(raw.r[2 * k + 1]),
            cu::e4m3_pair<cu::kBytes23>(raw.r[2 * k]), cu::e4m3_pair<cu::kBytes23>(raw.r[2 * k + 1])};
  }
  // Transposed as pairs of bytes: a register holds columns 2g and 2g + 1 of two rows, which become fragment rows g, g +
  // 8.
  __device__ static Fragment value(const Raw& raw, int k) {
    return {cu::e4m3_pair<cu::kBytes02>(raw.r[2 * k]), cu::e4m3_pair<cu::kBytes13>(raw.r[2 * k]),
            cu::e4m3_pair<cu::kBytes02>(raw.r[2 * k + 1]), cu::e4m3_pair<cu::kBytes13>(raw.r[2 * k + 1])};
  }
  static constexpr bool kPairedColumns = true;  // a value fragment's rows g and g + 8 are columns 2g and 2g + 1

 private:
  __device__ static uint4 times_factor(uint4 y) {
    constexpr std::uint32_t kZero = 0x80008000u;  // -0: added, it changes nothing
    return {cu::fma_bf16x2(y.x, kQueryFactor, kZero), cu::fma_bf16x2(y.y, kQueryFactor, kZero),
            cu::fma_bf16x2(y.z, kQueryFactor, kZero), cu::fma_bf16x2(y.w, kQueryFactor, kZero)};
  }
};

}  // namespace sievemla::stage::attention
