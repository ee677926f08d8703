// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/rows.h -- what a writer or gatherer does to its i-th row: a copy between a tensor and a slot.
//
// The row types are the specification of the bytes, so the reference and the CPU share this; their loops differ.
#pragma once
#include <algorithm>
#include <cstring>

#include "base/view.h"
#include "kv/formats.h"
#include "kv/index_page.h"
#include "sievemla/kv_cache.h"

namespace sievemla::kv {

inline void copy_row(const WriteLatentArgs& args, std::int64_t i) {
  const std::int64_t slot = base::load_int(args.slots, i);
  if (slot < 0) return;
  base::visit_real(args.latent.dtype, [&](auto element) {
    using T = decltype(element);
    const T* rope = args.cache.rope > 0 ? base::at<T>(args.rope, i) : nullptr;
    store_row(args.cache, slot, base::at<T>(args.latent, i), rope, args.scale);
  });
}

inline void copy_row(const GatherLatentArgs& args, std::int64_t i) {
  const std::int64_t slot = base::load_int(args.slots, i);
  base::visit_real(args.out.dtype, [&](auto element) {
    auto* out = base::at<decltype(element)>(args.out, i);
    if (slot >= 0 && slot < args.cache.slots()) load_row(args.cache, slot, out);
    else std::fill_n(out, args.out.dim(1), decltype(element){});
  });
}

inline void copy_row(const GatherIndexKeysArgs& args, std::int64_t i) {
  const std::int64_t slot = base::load_int(args.slots, i);
  const std::size_t key_bytes = static_cast<std::size_t>(kIndexDim * size_of(args.keys.dtype));
  std::byte* key = static_cast<std::byte*>(args.keys.data) + base::offset(args.keys, i) * size_of(args.keys.dtype);
  float scale = 0.f;
  if (slot >= 0 && slot < args.cache.slots()) {
    const IndexKeyAddress from = index_key_address(args.cache, slot);
    std::memcpy(key, from.key, key_bytes);
    if (from.scale) std::memcpy(&scale, from.scale, sizeof scale);
  } else {
    std::memset(key, 0, key_bytes);
  }
  if (args.scales) *base::at<float>(args.scales, i) = scale;
}

}  // namespace sievemla::kv
