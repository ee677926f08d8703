// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/codec/avx512.cc -- the codec in AVX-512.
#include "cpu/codec/codec.h"

namespace sievemla::cpu::codec {
namespace {

#include "cpu/codec/codec-inl.h"

}  // namespace

const Codec kAvx512 = kCodec;

}  // namespace sievemla::cpu::codec
