// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "indexer/cpu/heads.h"

#include <algorithm>

#include "cpu/codec/quantise.h"
#include "cpu/threads.h"
#include "indexer/head.h"

namespace sievemla::stage::indexer {
namespace {

namespace codec = cpu::codec;

template <const codec::Codec& kCodec>
float store_values(const float* x, DType dtype, ScaleRule rule, float floor, std::byte* to) {
  static_assert(codec::kGroup == kIndexDim);
  if (dtype == DType::u8) return quantise(kCodec, DType::f32, x, rule, floor, reinterpret_cast<std::uint8_t*>(to));
  kCodec.convert(codec::Real::f32, x, kIndexDim, codec::real_of(dtype), to);
  return 1.f;
}

}  // namespace

template <const codec::Codec& kCodec>
void write_index_keys_cpu(const WriteIndexKeysArgs& args, const base::Exec& exec) {
  constexpr std::int64_t kTokens = 16;  // a task: some microseconds, well above the cost of handing it out
  const std::int64_t tokens = args.k.dim(0);
  cpu::parallel_for(exec.backend, (tokens + kTokens - 1) / kTokens, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(tokens, (task + 1) * kTokens);
    for (std::int64_t t = task * kTokens; t < end; ++t) write_key<float>(args, t, store_values<kCodec>);
  });
}

template <const codec::Codec& kCodec>
void index_queries_cpu(const IndexQueryArgs& args, const base::Exec& exec) {
  constexpr std::int64_t kHeads = 16;  // a task: so many heads of one token
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1), parts = (heads + kHeads - 1) / kHeads;
  cpu::parallel_for(exec.backend, tokens * parts, [&](std::int64_t task, int) {
    const std::int64_t t = task / parts, first = task % parts * kHeads;
    const TokenRope<float> rope(args.rope, t);
    for (std::int64_t h = first; h < std::min(heads, first + kHeads); ++h)
      write_query(args, rope, t, h, store_values<kCodec>);
  });
}

template void write_index_keys_cpu<codec::kPortable>(const WriteIndexKeysArgs&, const base::Exec&);
template void index_queries_cpu<codec::kPortable>(const IndexQueryArgs&, const base::Exec&);
#if defined(__x86_64__)
template void write_index_keys_cpu<codec::kAvx2>(const WriteIndexKeysArgs&, const base::Exec&);
template void write_index_keys_cpu<codec::kAvx512>(const WriteIndexKeysArgs&, const base::Exec&);
template void index_queries_cpu<codec::kAvx2>(const IndexQueryArgs&, const base::Exec&);
template void index_queries_cpu<codec::kAvx512>(const IndexQueryArgs&, const base::Exec&);
#endif

}  // namespace sievemla::stage::indexer
