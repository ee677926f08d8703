// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cpu/rows.h -- writers and gatherers in blocks of rows over the threads, with the codec of a tier.
//
// Rows are independent, so the number of threads changes no bit; nor does the tier.
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/registry.h"
#include "cpu/codec/quantise.h"
#include "cpu/threads.h"
#include "kv/rows.h"

namespace sievemla::kv {

using sievemla::cpu::codec::Codec;
using sievemla::cpu::codec::real_of;

inline constexpr std::int64_t kRowsPerBlock = 16;  // microseconds of work: well above the cost of handing it out

// The row of an fp8 type, to and from values of `type`, f32 or bf16, that lie side by side.
template <class Row>
void store_packed(const Codec& codec, DType type, const std::byte* latent, const std::byte* rope, ScaleRule rule,
                  std::byte* row) {
  static_assert(Row::kScaleGroup == sievemla::cpu::codec::kGroup);
  const std::ptrdiff_t group_bytes = Row::kScaleGroup * size_of(type);
  for (std::ptrdiff_t g = 0; g < Row::kGroups; ++g) {
    const float scale = quantise(codec, type, latent + g * group_bytes, rule, 0.f,
                                 reinterpret_cast<std::uint8_t*>(row) + g * Row::kScaleGroup);
    std::memcpy(row + Row::kScaleOffset + 4 * g, &scale, sizeof scale);
  }
  if (Row::kRope > 0) codec.convert(real_of(type), rope, Row::kRope, real_of(DType::bf16), row + Row::kRopeOffset);
}
template <class Row>
void load_packed(const Codec& codec, const std::byte* row, DType type, std::byte* out) {
  const std::ptrdiff_t group_bytes = Row::kScaleGroup * size_of(type);
  for (std::ptrdiff_t g = 0; g < Row::kGroups; ++g)
    codec.decode(reinterpret_cast<const std::uint8_t*>(row) + g * Row::kScaleGroup,
                 Row::scale(row, static_cast<int>(g)), real_of(type), out + g * group_bytes);
  if (Row::kRope > 0)
    codec.convert(real_of(DType::bf16), row + Row::kRopeOffset, Row::kRope, real_of(type),
                  out + Row::kLatent * size_of(type));
}

inline std::byte* row_of(const TensorView& view, std::int64_t i) {
  return static_cast<std::byte*>(view.data) + base::offset(view, i) * size_of(view.dtype);
}

// As copy_row of kv/rows.h.
inline void copy_row(const Codec& codec, const WriteLatentArgs& args, std::int64_t i) {
  const std::int64_t slot = base::load_int(args.slots, i);
  if (slot < 0) return;
  const DType type = args.latent.dtype;
  const std::byte* latent = row_of(args.latent, i);
  const std::byte* rope = args.cache.rope > 0 ? row_of(args.rope, i) : nullptr;
  std::byte* row = row_address(args.cache, slot);
  visit(args.cache.format, [&]<class Row>(Row) {
    if constexpr (Row::kScaleGroup > 0) {
      store_packed<Row>(codec, type, latent, rope, args.scale, row);
    } else {
      codec.convert(real_of(type), latent, args.cache.latent, real_of(Row::kStorage), row);
      if (rope)
        codec.convert(real_of(type), rope, args.cache.rope, real_of(Row::kStorage),
                      row + args.cache.latent * size_of(Row::kStorage));
    }
  });
}

inline void copy_row(const Codec& codec, const GatherLatentArgs& args, std::int64_t i) {
  const std::int64_t slot = base::load_int(args.slots, i), width = args.out.dim(1);
  const DType type = args.out.dtype;
  std::byte* out = row_of(args.out, i);
  if (slot < 0 || slot >= args.cache.slots()) {
    std::memset(out, 0, static_cast<std::size_t>(width * size_of(type)));
    return;
  }
  const std::byte* row = row_address(args.cache, slot);
  visit(args.cache.format, [&]<class Row>(Row) {
    if constexpr (Row::kScaleGroup > 0) load_packed<Row>(codec, row, type, out);
    else codec.convert(real_of(Row::kStorage), row, width, real_of(type), out);
  });
}

template <class F>
void for_each_row(const base::Exec& exec, std::int64_t rows, F&& f) {
  sievemla::cpu::parallel_for(exec.backend, (rows + kRowsPerBlock - 1) / kRowsPerBlock, [&](std::int64_t block, int) {
    const std::int64_t end = std::min(rows, (block + 1) * kRowsPerBlock);
    for (std::int64_t i = block * kRowsPerBlock; i < end; ++i) f(i);
  });
}

template <class Args, const Codec& kCodec>
void run_cpu(const Args& args, const base::Exec& exec) {
  for_each_row(exec, args.slots.dim(0), [&](std::int64_t i) { copy_row(kCodec, args, i); });
}

// Copies bytes: the same in every tier.
inline void gather_index_keys_cpu(const GatherIndexKeysArgs& args, const base::Exec& exec) {
  for_each_row(exec, args.slots.dim(0), [&](std::int64_t i) { copy_row(args, i); });
}

}  // namespace sievemla::kv
