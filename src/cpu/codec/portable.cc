// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cpu/codec/portable.cc -- the codec in whatever the compiler has.
#include "cpu/codec/codec.h"

namespace sievemla::cpu::codec {
namespace {

#include "cpu/codec/codec-inl.h"

}  // namespace

const Codec kPortable = kCodec;

}  // namespace sievemla::cpu::codec
