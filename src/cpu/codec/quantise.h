// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/codec/quantise.h -- a scaled group of e4m3 values, with a tier's codec.
#pragma once
#include "cpu/codec/codec.h"
#include "sievemla/kv_format.h"

namespace sievemla::cpu::codec {

constexpr Real real_of(DType dtype) { return dtype == DType::bf16 ? Real::bf16 : Real::f32; }

// kv::quantise_group of kGroup values that lie side by side, f32 or bf16.
float quantise(const Codec& codec, DType type, const void* x, ScaleRule rule, float floor, std::uint8_t* codes);

}  // namespace sievemla::cpu::codec
