// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/kv_cache.h -- before stage 1: write the rows of new tokens into the latent cache, and read rows back.
//
//   hidden -> [kv: write] per new token: latent row (here), indexer key (indexer.h)
//
// All functions here enqueue on `stream` and neither allocate nor synchronise. Slots are i32 or i64; a slot < 0 is
// skipped; a slot >= cache.slots() is InvalidArgument on host backends and skipped on cuda.
#pragma once
#include "sievemla/backend.h"
#include "sievemla/kv_format.h"

namespace sievemla {

struct WriteLatentArgs {
  TensorView latent;  // [tokens, cache.latent] f32 or bf16, normalised
  TensorView rope;    // [tokens, cache.rope] same dtype, rotated; absent where cache.rope is 0
  TensorView slots;   // [tokens] i32 or i64; those >= 0 are distinct (else the shared row is undefined)
  KvCache cache;      // written in place
  ScaleRule scale = ScaleRule::arbitrary;  // fp8 rows only
};
// Quantises and scatters. fp8 rows: per group of 128 latent values, scale = amax / 448 (1 for an all-zero group), codes
// = e4m3(value / scale), round to nearest even, saturating. A group that holds a NaN or an infinity stores scale NaN, so
// that its scores and outputs are NaN on every backend. Throws InvalidArgument, Unsupported.
void write_latent(const Backend& backend, const WriteLatentArgs& args, Stream stream = {});

struct GatherLatentArgs {
  KvCache cache;
  TensorView slots;  // [n] i32 or i64; outside [0, cache.slots()): the output row is zeros
  TensorView out;    // [n, cache.latent + cache.rope] f32 or bf16, dequantised (bf16: rounded to nearest even)
};
void gather_latent(const Backend& backend, const GatherLatentArgs& args, Stream stream = {});

struct GatherIndexKeysArgs {
  IndexCache cache;
  TensorView slots;   // [n] i32 or i64; outside [0, cache.slots()): the output key is zeros, its scale 0
  TensorView keys;    // [n, 128]: u8 (raw e4m3) of an fp8 cache, else the cache's dtype
  TensorView scales;  // [n] f32, fp8 caches only
};
void gather_index_keys(const Backend& backend, const GatherIndexKeysArgs& args, Stream stream = {});

}  // namespace sievemla
