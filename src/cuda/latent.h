// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/latent.h -- latent rows, as kernels are told, and what a call about them lacks. Plain C++.
#pragma once
#include <cstdint>

#include "cuda/cache.h"
#include "cuda/layout.h"
#include "sievemla/kv_cache.h"

namespace sievemla::cuda {

inline constexpr int kRowThreads = 128;  // that write or gather a row

struct LatentParams {
  SlotList at;
  Pages cache;
  KvFormat format;  // bf16, fp8_ds_mla or fp8_nope
  int latent, rope;
  // [n, latent] and [n, rope] f32 or bf16: of the writer; of the gatherer one tensor [n, latent + rope], and no second.
  void* latents;
  void* ropes;
  bool f32;
  std::int64_t latents_row, ropes_row;  // in elements
  ScaleRule rule;
};

inline SlotList slots_of(const TensorView& view) { return {view.data, view.dtype == DType::i64, view.step(0)}; }
inline Pages cache_of(const TensorView& pages) {
  const std::int64_t size = size_of(pages.dtype);
  return {static_cast<unsigned char*>(pages.data), pages.step(0) * size, pages.step(1) * size,
          pages.dim(0) * pages.dim(1), static_cast<int>(pages.dim(1))};
}

inline LatentParams latent_params(const KvCache& cache, const TensorView& slots, const TensorView& rows) {
  LatentParams p{};
  p.at = slots_of(slots), p.cache = cache_of(cache.pages), p.format = cache.format;
  p.latent = cache.latent, p.rope = cache.rope;
  p.latents = rows.data, p.f32 = rows.dtype == DType::f32, p.latents_row = rows.step(0);
  return p;
}
inline LatentParams latent_params(const WriteLatentArgs& args) {
  LatentParams p = latent_params(args.cache, args.slots, args.latent);
  if (args.cache.rope > 0) p.ropes = args.rope.data, p.ropes_row = args.rope.step(0);
  p.rule = args.scale;
  return p;
}

inline base::Lack latent_lacks(const KvCache& cache, std::int64_t rows) {
  if (cache.format == KvFormat::f32) return "the cache must be bf16 or fp8";
  if (rows > kMost || cache.page_size() > kMost) return "rows and page size must be at most 2^30";
  return misplaced(cache.pages, "the cache");
}

}  // namespace sievemla::cuda
