// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/heads.h -- indexer keys and queries on the CPU, in f32, stored by the codec of a tier.
#pragma once
#include "base/registry.h"
#include "cpu/codec/codec.h"
#include "sievemla/indexer.h"

namespace sievemla::stage::indexer {

// Defined for the codecs of cpu/codec/codec.h, in heads.cc.
template <const cpu::codec::Codec& kCodec>
void write_index_keys_cpu(const WriteIndexKeysArgs& args, const base::Exec& exec);
template <const cpu::codec::Codec& kCodec>
void index_queries_cpu(const IndexQueryArgs& args, const base::Exec& exec);

}  // namespace sievemla::stage::indexer
