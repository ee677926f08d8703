// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/mma/e4m3.cuh -- e4m3 bytes to bf16 pairs, exactly, without fp8 hardware.
//
//   byte s eeee mmm  ->  bf16 s 0000eeee mmm0000 = value * 2^-120, subnormals too
//
// Sign-extend the byte to 16 bits, shift left by 4, keep sign and the seven value bits: 3 instructions a pair. Whoever
// multiplies makes up for the 2^-120 (tensor cores take subnormal bf16).
// The codes 0x7F and 0xFF (NaN) read as +-480, by e4m3_f16x2 as NaN: writers give a row that holds NaN a NaN scale.
#pragma once
#include <cstdint>

#include "cuda/ptx/ptx.cuh"

namespace sievemla::cuda {

// `Pick` = nibbles {byte, byte + 8} of the low and then the high half.
template <std::uint32_t Pick>
__device__ inline std::uint32_t e4m3_pair(std::uint32_t codes) {
  return (prmt<Pick>(codes) << 4) & 0x87F087F0u;
}
inline constexpr std::uint32_t kBytes01 = 0x9180u, kBytes23 = 0xB3A2u, kBytes02 = 0xA280u, kBytes13 = 0xB391u;

// Bytes 2 Half and the next as f16, exactly; NaN stays NaN. Of sm_89 on: one instruction.
template <int Half>
__device__ inline std::uint32_t e4m3_f16x2(std::uint32_t codes) {
  std::uint32_t r;
  if constexpr (Half == 0)
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(r) : "r"(codes));
  else
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(r) : "r"(codes));
  return r;
}

}  // namespace sievemla::cuda
