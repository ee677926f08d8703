// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/combine.h -- stage 4 of 4: merge partial results of ranks that each saw part of the rows.
//
//   indexer -> topk -> attention -> [combine]
//
//   lse = log sum_p exp(partial_lse[p])          out = sum_p exp(partial_lse[p] - lse) * partial_out[p]
//
// Splits inside one attention call live in its workspace and are merged there; this is for decode context parallel.
#pragma once
#include "sievemla/backend.h"

namespace sievemla {

// Any number of parts, tokens, heads and columns.
struct CombineArgs {
  TensorView partial_out;  // [parts, tokens, heads, width] f32 or bf16, each normalised by its own lse; any strides
                           // with a contiguous last dim. Not read where partial_lse is -inf (it may hold NaN).
  TensorView partial_lse;  // [parts, tokens, heads] f32, natural log, without sink; -inf: the part saw nothing
  TensorView sink;         // [heads] f32, optional; apply it here if the parts were made without
  TensorView out;          // [tokens, heads, width] f32 or bf16; +0 where every part is empty
  TensorView lse;          // [tokens, heads] f32, optional; natural log, without sink; -inf where every part is empty
};
// Merging an empty part changes no bit; all-empty gives (0, -inf), never NaN. Parts are added in order: bitwise
// repeatable.
void combine(const Backend& backend, const CombineArgs& args, Stream stream = {});

}  // namespace sievemla
