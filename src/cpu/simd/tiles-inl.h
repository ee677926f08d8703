// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/simd/tiles-inl.h -- AMX: eight tiles of 16 x 64 bytes.
#pragma once

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

inline void configure_tiles() {
  static constexpr TileConfig kConfig{};
  _tile_loadconfig(&kConfig);
}
