// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/layer.cc -- what a layer writes, on host backends: the separate steps one after the other.
#include <algorithm>
#include <cmath>

#include "cpu/threads.h"
#include "indexer/head.h"
#include "indexer/registry.h"
#include "kv/formats.h"

namespace sievemla::stage::indexer {
namespace {

constexpr int kMostLatent = 2048;  // values of a row on the stack

// Writes one latent row. In double up to the rounding to T, the dtype that the separate steps would leave in memory.
template <class T>
void write_row(const WriteLayerArgs& args, std::int64_t token, std::int64_t slot) {
  const WriteLatentArgs& a = args.latent;
  T latent[kMostLatent], rope[kMostLatent];
  double squares = 0;
  for (int i = 0; i < a.cache.latent; ++i) {
    const double x = base::to_f32(*base::at<T>(a.latent, token, i));
    squares += x * x;
  }
  const double scale = 1 / std::sqrt(squares / a.cache.latent + static_cast<double>(args.latent_eps));
  for (int i = 0; i < a.cache.latent; ++i)
    latent[i] = base::round_to<T>(static_cast<double>(base::to_f32(*base::at<T>(a.latent, token, i))) * scale *
                                  static_cast<double>(base::load_f32(args.latent_weight, i)));
  if (args.rope.style != RopeStyle::none) {
    double turned[kIndexRope];
    for (int i = 0; i < kIndexRope; ++i) turned[i] = base::to_f32(*base::at<T>(a.rope, token, i));
    TokenRope<double>(args.rope, token).turn(turned);
    for (int i = 0; i < kIndexRope; ++i) rope[i] = base::round_to<T>(turned[i]);
  } else {
    for (int i = 0; i < a.cache.rope; ++i) rope[i] = *base::at<T>(a.rope, token, i);
  }
  kv::store_row(a.cache, slot, latent, rope, a.scale);
}

}  // namespace

base::Lack write_layer_host_lacks(const WriteLayerArgs& args) {
  return std::max(args.latent.cache.latent, args.latent.cache.rope) > kMostLatent
             ? "latent and rope must be at most 2048 wide"
             : base::Lack("");
}

void write_layer_host(const WriteLayerArgs& args, const base::Exec& exec) {
  const WriteLatentArgs& a = args.latent;
  cpu::parallel_for(exec.backend, a.slots.dim(0), [&](std::int64_t token, int) {
    const std::int64_t slot = base::load_int(a.slots, token);
    if (slot < 0) return;
    base::visit_real(a.latent.dtype, [&](auto type) { write_row<decltype(type)>(args, token, slot); });
  });
  if (args.keys.k) base::pick(write_index_keys_kernels(), exec.backend, args.keys, "write_layer").run(args.keys, exec);
  if (args.indices)
    for (std::int64_t row = 0; row < args.indices.dim(0); ++row)
      std::fill_n(base::at<std::int32_t>(args.indices, row), args.indices.dim(1), -1);
}

}  // namespace sievemla::stage::indexer
