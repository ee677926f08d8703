// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/attention.h -- stage 3 of 4: softmax over the selected cache rows, or over all of them.
//
//   indexer -> topk -> [attention] -> combine
//
//   s[j] = scale * q . row[j]   p = softmax(s, sink)   out = sum_j p[j] * latent of row[j]   lse = log sum_j exp(s[j])
//
// Absorbed MLA: the value is the latent part of the row, read again. The kernel never sees the model's nope head width;
// it only changes `scale`, which the caller passes. Source: DeepSeek-V2/V3.2 (MLA, DSA); row formats in kv_format.h.
#pragma once
#include <variant>

#include "sievemla/backend.h"
#include "sievemla/kv_format.h"

namespace sievemla {

// A slot list per query token (sparse).
struct Slots {
  TensorView indices;      // [tokens, topk], or [requests, q_len, topk] with tokens = requests * q_len; i32 or i64. Any
                           // stride: a q_len stride of 0 shares one list among a request's rows. A slot outside
                           // [0, cache slots) is skipped wherever it stands; one that stands twice counts twice.
  TensorView topk_length;  // [tokens] i32, optional: lanes at or past it are never read, whatever they hold
};

// All rows of a request (dense). tokens = requests * q_len; query i of a request of length L sees its first
// L - q_len + 1 + i rows (a causal tail), none if that is <= 0.
struct BlockTable {
  TensorView table;    // [requests, max_pages] i32: logical page -> physical page of the cache; row stride free. An
                       // entry outside [0, pages) is skipped, and so is a row past the table's width.
  TensorView lengths;  // [requests] i32, in rows; <= 0 none
};

using RowSource = std::variant<Slots, BlockTable>;

struct AttentionArgs {
  TensorView q;       // [tokens, heads, latent + rope] bf16 or f32 (bf16 on cuda); or [tokens, heads, latent] with
                      // q_rope. heads 1 to 128.
  TensorView q_rope;  // [tokens, heads, rope] same dtype, optional
  KvCache kv;
  RowSource rows;
  float scale = 0.f;  // multiplies q . row before softmax; natural, not pre-multiplied by log2(e). Positive, finite.
  TensorView sink;    // [heads] f32, optional: a score that takes part in the softmax's sum and has no value
  TensorView out;     // [tokens, heads, latent] bf16 or f32; +0 where nothing is selected
  TensorView lse;     // [tokens, heads] f32, optional: natural log, of the scaled scores, WITHOUT the sink; -inf where
                      // nothing is selected
  bool round_weights =
      false;  // on tensor cores a softmax weight is bf16, relative to the peak of the rows so far: round it
              // once, as engines' kernels do. Else what that takes is added where it would show
  bool batch_invariant = false;  // a row's bits depend on that row alone
  bool check_indices = false;    // debug: a slot or page outside the cache, other than -1, is an error, not skipped
};
// tokens, topk, requests = 0 are legal. NaN and infinite scores: docs/numerics.md. Throws InvalidArgument (shapes),
// Unsupported (lists each kernel and why not).
void attention(const Backend& backend, const AttentionArgs& args, Workspace workspace, Stream stream = {});

struct AttentionBounds {
  std::int64_t tokens, heads;
  std::int64_t lanes;  // topk width, or the longest request in rows
  int latent = 512, rope = 64;
};
std::int64_t attention_workspace_bytes(const Backend& backend, const AttentionBounds& bounds);

}  // namespace sievemla
