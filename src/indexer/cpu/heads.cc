// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/heads.cc -- indexer keys and queries on the processor, in f32.
#include <algorithm>

#include "cpu/threads.h"
#include "indexer/head.h"
#include "indexer/registry.h"

namespace sievemla::stage::indexer {

void write_index_keys_cpu(const WriteIndexKeysArgs& args, const base::Exec& exec) {
  constexpr std::int64_t kTokens = 16;  // a task: some microseconds, well above the cost of handing it out
  const std::int64_t tokens = args.k.dim(0);
  cpu::parallel_for(exec.backend, (tokens + kTokens - 1) / kTokens, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(tokens, (task + 1) * kTokens);
    for (std::int64_t t = task * kTokens; t < end; ++t) write_key<float>(args, t);
  });
}

void index_queries_cpu(const IndexQueryArgs& args, const base::Exec& exec) {
  constexpr std::int64_t kHeads = 16;  // a task: so many heads of one token
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1), parts = (heads + kHeads - 1) / kHeads;
  cpu::parallel_for(exec.backend, tokens * parts, [&](std::int64_t task, int) {
    const std::int64_t t = task / parts, first = task % parts * kHeads;
    const TokenRope<float> rope(args.rope, t);
    for (std::int64_t h = first; h < std::min(heads, first + kHeads); ++h) write_query(args, rope, t, h);
  });
}

}  // namespace sievemla::stage::indexer
