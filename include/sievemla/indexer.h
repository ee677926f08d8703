// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/indexer.h -- stage 1 of 4: score every cached key for every query token.
//
//   [indexer] -> topk -> attention -> combine
//
//   logits[t, j] = k_scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])
//
// The weights may be negative, so relu acts on each head before weighting. Source: DeepSeek-V3.2 (lightning indexer),
// Hugging Face glm_moe_dsa and deepseek_v32.
#pragma once
#include "sievemla/backend.h"
#include "sievemla/kv_format.h"

namespace sievemla {

inline constexpr int kIndexRope = 64;  // rope covers the FIRST 64 of an indexer head (the LAST 64 of an MLA row)

inline constexpr double kHadamardScale = 0x1.6a09e667f3bcdp-4;  // 128^-0.5

// How the first 64 of 128 are rotated. There is no default: a wrong guess is silent up to topk tokens and garbles text
// beyond. DeepSeek-V3.2: half_split; GLM-5 .. 5.2: interleaved; GLM-5.3-Flash: none.
enum class RopeStyle : std::uint8_t {
  unset = 0,    // an error wherever it arrives
  half_split,   // pairs (i, i + 32)
  interleaved,  // pairs (2i, 2i + 1)
  none,         // not rotated; positions and cos_sin are not read
};
std::string_view name_of(RopeStyle style);

struct Rope {
  RopeStyle style = RopeStyle::unset;
  TensorView positions;  // [tokens] i32 or i64, each in [0, cos_sin.dim(0))
  TensorView cos_sin;    // [max_position, 64] f32 or bf16: 32 cosines, then 32 sines
};

// ---- key side ---------------------------------------------------------------------------------------

struct WriteIndexKeysArgs {
  TensorView k;            // [tokens, 128] f32 or bf16: the raw projection x Wk
  TensorView norm_weight;  // [128] f32 or bf16
  TensorView norm_bias;    // [128] f32 or bf16: this is a LayerNorm, with mean and bias
  float norm_eps = 1e-6f;  // 1e-6 whatever the model's RMSNorm eps is
  Rope rope;
  TensorView slots;  // [tokens] i32 or i64; < 0 skipped, >= cache.slots() InvalidArgument on host backends
  IndexCache cache;  // written in place
  ScaleRule scale = ScaleRule::power_of_two;  // fp8 only; engines write powers of two
  bool hadamard = false;                      // H, see below; keys and queries have it, or neither
  bool round_bf16 = false;  // also after the norm and each rotation: engines that run these one by one in bf16
};
// key = [H] rope(LayerNorm(k)); fp8: one scale per key = max(amax, 1e-4) / 448, codes = e4m3(key / scale). A key that
// holds a NaN or an infinity stores scale NaN. H is the Hadamard matrix, 128^-0.5 (-1)^popcount(i & j) in row i, column
// j: it keeps the dot products of queries and keys, and shares out a channel's large values before they become codes.
void write_index_keys(const Backend& backend, const WriteIndexKeysArgs& args, Stream stream = {});

// ---- query side -------------------------------------------------------------------------------------

struct IndexQueryArgs {
  TensorView q;              // [tokens, heads, 128] f32 or bf16: the raw projection
  TensorView weights;        // [tokens, heads] f32 or bf16: the raw projection
  float weight_scale = 0.f;  // multiplies every weight: heads^-0.5 * 128^-0.5; must be positive and finite
  Rope rope;
  ScaleRule scale = ScaleRule::power_of_two;  // u8 output only
  TensorView out_q;           // [tokens, heads, 128]: f32 or bf16, or u8 = e4m3 with the scale folded into the weight
  TensorView out_weights;     // [tokens, heads] f32
  bool hadamard = false;      // as the keys
  bool round_bf16 = false;    // also after each rotation
  WriteIndexKeysArgs keys{};  // optional (no k: none): written too, by the same kernel on cuda
};
// out_q = [H] rope(q), out_weights = weights * weight_scale (* q's scale = max(amax, 1e-10) / 448 for a u8 out_q).
void index_queries(const Backend& backend, const IndexQueryArgs& args, Stream stream = {});

// ---- scores -----------------------------------------------------------------------------------------

// Keys of paged requests. Row t belongs to request row_request[t]; without that tensor rows are dealt evenly:
// request = t / (rows / requests).
struct PagedKeys {
  IndexCache cache;
  TensorView block_table;  // [requests, max_pages] i32: logical page -> physical page; row stride is free
  TensorView row_request;  // [rows] i32, optional
};

// Keys side by side; row t sees keys [start[t], end[t]) and writes them to columns 0 .. end - start - 1.
struct ContiguousKeys {
  TensorView keys;    // [n, 128] f32, bf16, or u8 = e4m3
  TensorView scales;  // [n] f32, with u8 keys only
  TensorView starts;  // [rows] i32, optional: 0
};

struct IndexScoreArgs {
  TensorView q;        // [rows, heads, 128] f32, bf16 or u8 = e4m3; u8 goes with fp8 keys
  TensorView weights;  // [rows, heads] f32, all factors included (IndexQueryArgs::out_weights)
  PagedKeys paged;     // exactly one of the two is given
  ContiguousKeys contiguous;
  TensorView lengths;  // [rows] i32: how many keys the row sees. <= 0: none. With contiguous keys: end - start.
  TensorView logits;   // [rows, width] f32, row stride free, width >= the longest length
  bool fill = true;    // write -inf to columns at and past the length; false: they are left as they are
};
// A length above `width` is InvalidArgument on host backends and clamped on cuda. A key whose page lies outside the
// block table, or whose physical page is outside the cache, scores -inf. Scores are a pure function of the row: equal
// bits on every call, batch and split.
void index_scores(const Backend& backend, const IndexScoreArgs& args, Workspace workspace, Stream stream = {});

struct IndexScoreBounds {
  std::int64_t rows, heads, width;
};
std::int64_t index_scores_workspace_bytes(const Backend& backend, const IndexScoreBounds& bounds);

}  // namespace sievemla
