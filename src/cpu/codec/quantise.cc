// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cpu/codec/quantise.h"

#include <algorithm>
#include <cmath>

#include "kv/quantise.h"

namespace sievemla::cpu::codec {

float quantise(const Codec& codec, DType type, const void* x, ScaleRule rule, float floor, std::uint8_t* codes) {
  float values[kGroup];
  const float scale = kv::scale_of(codec.load_group(real_of(type), x, values), rule, floor);
  if (std::isnan(scale)) std::fill_n(codes, kGroup, std::uint8_t{0});
  else codec.encode(values, scale, rule == ScaleRule::arbitrary, codes);
  return scale;
}

}  // namespace sievemla::cpu::codec
