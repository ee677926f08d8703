// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/codec/avx2.cc -- the codec in AVX2.
#include "cpu/codec/codec.h"

namespace sievemla::cpu::codec {
namespace {

#include "cpu/codec/codec-inl.h"

}  // namespace

const Codec kAvx2 = kCodec;

}  // namespace sievemla::cpu::codec
