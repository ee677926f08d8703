// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/rows.cuh -- cache rows in shared memory, and the MMA fragments of their latent and rope.
//
// A warp owns 128 latent dimensions and a quarter of the rope of every row of a tile. It reads them twice: as keys (rows on
// M, dimensions on K) and as values (dimensions on M, rows on K).
#pragma once
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

// bf16 latent | bf16 rope.
template <int Rope>
struct Bf16Rows {
  static constexpr KvFormat kFormat = KvFormat::bf16;
  static constexpr const char* kName = Rope ? "bf16" : "bf16_nope";
  static constexpr int kRope = Rope, kBytes = static_cast<int>(kv::Bf16Row::row_bytes(kLatent, Rope));
  static constexpr int kStride = kBytes + 16;  // an odd number of 16-byte pieces: ldmatrix then meets no bank twice
  static constexpr int kRopeOffset = 2 * kLatent;
  static constexpr bool kScaled = false;

  // Column of the row that MMA key position (2c, 2c + 1 | 2c + 8, 2c + 9) of a step of 16 stands for.
  __device__ static int key_column(int c, int half) { return 2 * c + 8 * half; }
  // Keys of 16 rows from s_rows on: steps 2i and 2i + 1 of the warp's eight.
  __device__ static void keys(std::uint32_t s_rows, int warp, int i, int lane, Fragment (&step)[2]) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      cu::ldmatrix_x4(step[k].a, s_rows + (lane % 16) * kStride + 2 * (kWarpLatent * warp + 16 * (2 * i + k)) + lane / 16 * 16);
  }
  // Values of 16 rows: columns 32 i .. 32 i + 31 of the warp's 128, as two fragments of 16.
  __device__ static void values(std::uint32_t s_rows, int warp, int i, int lane, Fragment (&column)[2]) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      cu::ldmatrix_x4_trans(column[k].a, s_rows + (lane % 8 + lane / 16 * 8) * kStride +
                                             2 * (kWarpLatent * warp + 32 * i + 16 * k) + lane / 8 % 2 * 16);
  }
  // Column of fragment row g (low) or g + 8 (high) within its 16.
  static constexpr bool kPairedColumns = false;  // g and g + 8
};

// e4m3 latent | 4 x f32 scale | bf16 rope.
template <int Rope>
struct Fp8Rows {
  using Map = kv::Fp8Row<Rope>;
  static constexpr KvFormat kFormat = Rope ? KvFormat::fp8_ds_mla : KvFormat::fp8_nope;
  static constexpr const char* kName = Rope ? "fp8_ds_mla" : "fp8_nope";
  static constexpr int kRope = Rope, kBytes = Map::kRowBytes;
  static constexpr int kStride = kBytes;  // 41 or 33 pieces of 16 bytes: odd already
  static constexpr int kRopeOffset = Map::kRopeOffset, kScaleOffset = Map::kScaleOffset;
  static constexpr bool kScaled = true;
  static_assert(Map::kScaleGroup == kWarpLatent, "a warp's latent has one scale");

  // One 16-byte piece is a step of 16: the thread's four bytes 4c .. 4c + 3 make the positions 2c, 2c + 1, 2c + 8, 2c + 9.
  __device__ static int key_column(int c, int half) { return 4 * c + 2 * half; }
  __device__ static void keys(std::uint32_t s_rows, int warp, int i, int lane, Fragment (&step)[2]) {
    std::uint32_t r[4];
    cu::ldmatrix_x4(r, s_rows + (lane % 16) * kStride + kWarpLatent * warp + 32 * i + lane / 16 * 16);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      step[k].a[0] = cu::e4m3_pair<cu::kBytes01>(r[2 * k]);
      step[k].a[1] = cu::e4m3_pair<cu::kBytes01>(r[2 * k + 1]);
      step[k].a[2] = cu::e4m3_pair<cu::kBytes23>(r[2 * k]);
      step[k].a[3] = cu::e4m3_pair<cu::kBytes23>(r[2 * k + 1]);
    }
  }
  // Transposed as pairs of bytes: a register holds columns 2g and 2g + 1 of two rows, which become fragment rows g, g + 8.
  __device__ static void values(std::uint32_t s_rows, int warp, int i, int lane, Fragment (&column)[2]) {
    std::uint32_t r[4];
    cu::ldmatrix_x4_trans(r, s_rows + (lane % 16) * kStride + kWarpLatent * warp + 32 * i + lane / 16 * 16);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      column[k].a[0] = cu::e4m3_pair<cu::kBytes02>(r[2 * k]);
      column[k].a[1] = cu::e4m3_pair<cu::kBytes13>(r[2 * k]);
      column[k].a[2] = cu::e4m3_pair<cu::kBytes02>(r[2 * k + 1]);
      column[k].a[3] = cu::e4m3_pair<cu::kBytes13>(r[2 * k + 1]);
    }
  }
  static constexpr bool kPairedColumns = true;  // 2g and 2g + 1
};

}  // namespace sievemla::stage::attention
