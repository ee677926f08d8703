// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/cpu/peak_amx.cc -- products of bf16 tiles: 16 x 16 sums of 32 products each. Four tiles of sums are in flight; a
// product takes 16 cycles and is ready after 52.
#include <immintrin.h>

#include "cli/cpu/peak.h"

namespace sievemla::cli {
namespace {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void run(std::int64_t steps) {
  static constexpr TileConfig kConfig{};
  alignas(64) std::uint16_t factors[16 * 32];
  for (auto& x : factors) x = 0x3F40;  // 0.75
  _tile_loadconfig(&kConfig);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, factors, 64);
  _tile_loadd(5, factors, 64);
  for (std::int64_t i = 0; i < steps; ++i) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
}

}  // namespace

const Peak kPeakAmx = {"bf16 tiles", 4 * 16 * 16 * 32 * 2, run};

}  // namespace sievemla::cli
