// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/pipeline/layer_problem.h -- a seeded layer of several requests: a history in the caches, a few new tokens of each
// request to go through. Every byte of both caches that holds no token is 0xFF: NaN in every format.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "sievemla/pipeline.h"
#include "support/random.h"
#include "support/workspace.h"

namespace sievemla::test {

using Ids = std::vector<std::int32_t>;
using Bytes = std::vector<std::byte>;
inline constexpr std::int32_t kUnwritten = 0x5A5A5A5A;

inline std::vector<Backend> host_backends() { return {Backend::reference(), Backend::cpu({2, {}})}; }

struct LayerShape {
  std::int64_t requests = 2, per = 3;  // new tokens of a request
  std::int64_t context = 130;          // of the longest request, new tokens included; each other is 17 shorter
  std::int64_t page_size = 16;
  std::int64_t topk = 24;
  std::int64_t heads = 3, index_heads = 4;
  KvFormat kv_format = KvFormat::f32;
  IndexFormat index_format = IndexFormat::f32;
  std::int64_t tokens() const { return requests * per; }
  std::int64_t length(std::int64_t request) const { return context - 17 * request; }
  std::int64_t pages_per_request() const { return (context + page_size - 1) / page_size; }
  std::int64_t pages() const { return requests * pages_per_request() + 3; }
};

// Pages in an order of their own, none used twice.
inline Ids random_table(const LayerShape& s, std::uint64_t seed) {
  Ids table;
  for (std::int64_t page : Random(seed).distinct(s.requests * s.pages_per_request(), s.pages()))
    table.push_back(static_cast<std::int32_t>(page));
  return table;
}

struct LayerProblem {
  // What a run leaves behind.
  struct Result {
    Bytes kv, index;
    Ids slots;
    std::vector<float> out, lse;
    bool operator==(const Result& b) const {
      return kv == b.kv && index == b.index && slots == b.slots && same(out, b.out) && same(lse, b.lse);
    }
    static bool same(const std::vector<float>& a, const std::vector<float>& b) {  // bits
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    }
  };

  explicit LayerProblem(const LayerShape& s_, std::uint64_t seed = 1) : s(s_), table(random_table(s_, seed)) {
    Random random(seed);
    const std::int64_t all = s.requests * s.context, n = s.tokens();
    latent = random.f32s(all * 512, 0.25f);
    rope = random.f32s(all * 64, 0.25f);
    index_k = random.f32s(all * kIndexDim);
    norm_weight = random.f32s(kIndexDim);
    norm_bias = random.f32s(kIndexDim);
    for (int position = 0; position < s.context; ++position)
      for (int i = 0; i < kIndexRope; ++i) {
        const double angle = position * std::pow(1e4, -(i % 32) / 32.0);
        cos_sin.push_back(static_cast<float>(i < 32 ? std::cos(angle) : std::sin(angle)));
      }
    index_q = random.f32s(n * s.index_heads * kIndexDim);
    index_weights = random.f32s(n * s.index_heads);
    q = random.f32s(n * s.heads * 576);
    for (std::int64_t r = 0; r < s.requests; ++r)
      for (std::int64_t p = 0; p < s.length(r); ++p) {
        const bool fresh = p >= s.length(r) - s.per;
        (fresh ? new_tokens : old_tokens).push_back({r, p});
        if (!fresh) continue;
        lengths.push_back(static_cast<std::int32_t>(p + 1));
        request.push_back(static_cast<std::int32_t>(r));
      }
    kv.assign(static_cast<std::size_t>(s.pages() * s.page_size * info(s.kv_format).row_bytes(512, 64)),
              std::byte{0xFF});
    index.assign(static_cast<std::size_t>(s.pages() * s.page_size * key_bytes()), std::byte{0xFF});
    Tokens history(*this, old_tokens);
    write_latent(Backend::reference(), history.write_latent_args(*this, kv));
    write_index_keys(Backend::reference(), history.write_index_keys_args(*this, index));
  }

  struct Token {
    std::int64_t request, position;
  };
  // Some tokens' inputs, side by side.
  struct Tokens {
    std::vector<float> latent, rope, k;
    Ids slots, positions;
    Tokens(const LayerProblem& problem, const std::vector<Token>& tokens) {
      for (const auto& [r, p] : tokens) {
        auto append = [&, row = r * problem.s.context + p](std::vector<float>& to, const std::vector<float>& from,
                                                           int n) {
          to.insert(to.end(), from.begin() + row * n, from.begin() + (row + 1) * n);
        };
        append(latent, problem.latent, 512);
        append(rope, problem.rope, 64);
        append(k, problem.index_k, kIndexDim);
        slots.push_back(problem.slot(r, p));
        positions.push_back(static_cast<std::int32_t>(p));
      }
    }
    std::int64_t size() const { return std::ssize(slots); }
    WriteLatentArgs write_latent_args(const LayerProblem& problem, Bytes& cache) const {
      return {tensor(latent.data(), {size(), 512}), tensor(rope.data(), {size(), 64}), tensor(slots.data(), {size()}),
              problem.kv_cache(cache)};
    }
    WriteIndexKeysArgs write_index_keys_args(const LayerProblem& problem, Bytes& cache) const {
      return {.k = tensor(k.data(), {size(), kIndexDim}),
              .norm_weight = tensor(problem.norm_weight.data(), {kIndexDim}),
              .norm_bias = tensor(problem.norm_bias.data(), {kIndexDim}),
              .rope = problem.rope_of(positions),
              .slots = tensor(slots.data(), {size()}),
              .cache = problem.index_cache(cache)};
    }
  };

  std::int64_t key_bytes() const {
    return s.index_format == IndexFormat::fp8 ? kIndexKeyBytes : s.index_format == IndexFormat::bf16 ? 256 : 512;
  }
  std::int32_t slot(std::int64_t r, std::int64_t p) const {
    const std::int32_t page = table[static_cast<std::size_t>(r * s.pages_per_request() + p / s.page_size)];
    return static_cast<std::int32_t>(page * s.page_size + p % s.page_size);
  }
  Rope rope_of(const Ids& positions) const {
    return {RopeStyle::interleaved, tensor(positions.data(), {std::ssize(positions)}),
            tensor(cos_sin.data(), {s.context, kIndexRope})};
  }
  KvCache kv_cache(Bytes& cache) const {
    const KvFormatInfo& format = info(s.kv_format);
    KvCache view{s.kv_format, 512, 64,
                 tensor(reinterpret_cast<std::uint8_t*>(cache.data()),
                        {s.pages(), s.page_size, format.row_bytes(512, 64) / size_of(format.storage)})};
    view.pages.dtype = format.storage;
    return view;
  }
  IndexCache index_cache(Bytes& cache) const {
    const DType storage = s.index_format == IndexFormat::fp8    ? DType::u8
                          : s.index_format == IndexFormat::bf16 ? DType::bf16
                                                                : DType::f32;
    IndexCache view{s.index_format, tensor(reinterpret_cast<std::uint8_t*>(cache.data()),
                                           {s.pages(), s.page_size, key_bytes() / size_of(storage)})};
    view.pages.dtype = storage;
    return view;
  }
  TensorView block_table() const { return tensor(table.data(), {s.requests, s.pages_per_request()}); }

  LayerShape s;
  Ids table, lengths, request;
  std::vector<float> latent, rope, index_k, norm_weight, norm_bias, cos_sin, index_q, index_weights, q;
  std::vector<Token> old_tokens, new_tokens;
  Bytes kv, index;  // the history
};

// The arguments of sparse_layer over memory of their own.
struct LayerCall {
  explicit LayerCall(const LayerProblem& problem)
      : p(problem), fresh(problem, problem.new_tokens), kv(problem.kv), index(problem.index) {
    const std::int64_t n = p.s.tokens(), ih = p.s.index_heads;
    const bool fp8 = p.s.index_format == IndexFormat::fp8;
    out_weights.assign(static_cast<std::size_t>(n * ih), kNan);
    slots.assign(static_cast<std::size_t>(n * p.s.topk), kUnwritten);
    out.assign(static_cast<std::size_t>(n * p.s.heads * 512), kNan);
    lse.assign(static_cast<std::size_t>(n * p.s.heads), kNan);
    out_q.assign(static_cast<std::size_t>(n * ih * kIndexDim * 4), std::byte{0xFF});

    SparseLayerArgs::Indexer indexer;
    indexer.keys = fresh.write_index_keys_args(p, index);
    IndexQueryArgs& queries = indexer.queries;
    queries.q = tensor(p.index_q.data(), {n, ih, kIndexDim});
    queries.weights = tensor(p.index_weights.data(), {n, ih});
    queries.weight_scale = 0.05f;
    queries.rope = p.rope_of(fresh.positions);
    queries.out_q = tensor(reinterpret_cast<const std::uint8_t*>(out_q.data()), {n, ih, kIndexDim});
    queries.out_q.dtype = fp8 ? DType::u8 : DType::f32;
    queries.out_weights = tensor(out_weights.data(), {n, ih});
    SelectArgs& select = indexer.select;
    select.score.q = queries.out_q;
    select.score.weights = queries.out_weights;
    select.score.paged = {indexer.keys.cache, p.block_table(), {}};
    select.score.lengths = tensor(p.lengths.data(), {n});
    select.width = p.s.context;
    select.slots = tensor(slots.data(), {n, p.s.topk});
    select.map = {p.block_table(), {}, p.s.page_size, {}};

    args.latent = fresh.write_latent_args(p, kv);
    args.indexer = indexer;
    AttentionArgs& attention = args.attention;
    attention.q = tensor(p.q.data(), {n, p.s.heads, 576});
    attention.kv = args.latent.cache;
    attention.rows = Slots{select.slots, {}};
    attention.scale = 1.f / 16;
    attention.out = tensor(out.data(), {n, p.s.heads, 512});
    attention.lse = tensor(lse.data(), {n, p.s.heads});
  }
  LayerCall(const LayerCall&) = delete;  // args point into it

  std::int64_t workspace_bytes(const Backend& backend) const {
    const SelectArgs& select = args.indexer->select;
    return sparse_layer_workspace_bytes(
        backend, {{p.s.tokens(), p.s.index_heads, p.s.context, p.s.topk, select.score_budget_bytes},
                  {p.s.tokens(), p.s.heads, p.s.topk}});
  }
  void run(const Backend& backend) { sparse_layer(backend, args, PoisonedWorkspace(workspace_bytes(backend))); }
  LayerProblem::Result result() const { return {kv, index, slots, out, lse}; }

  const LayerProblem& p;
  LayerProblem::Tokens fresh;
  Bytes kv, index, out_q;
  std::vector<float> out_weights, out, lse;
  Ids slots;
  SparseLayerArgs args;
};

}  // namespace sievemla::test
