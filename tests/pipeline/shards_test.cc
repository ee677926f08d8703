// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/pipeline/shards_test.cc -- decode context parallel: each rank holds part of the positions, attends to the slots
// that are its own, and combine() gives what one rank with everything gives.
#include <gtest/gtest.h>

#include <bit>

#include "pipeline/layer_problem.h"
#include "sievemla/combine.h"
#include "support/near.h"

namespace sievemla::test {
namespace {

// Combining adds to the f32 attention of one rank: the rounding of each partial out (2^-24) and of each partial lse
// (|lse| <= 16: 2^-21 absolute, so relative in its weight), the f32 sum of at most 8 terms (8 * 2^-24), and the final
// rounding. Below 2^-20 in all, of sum p |v| <= 1; the outputs compared here reach 0.1: 1e-5 of the largest. The cpu's
// own arithmetic is f32: 1e-4 (the tier's bound).
double tolerance(const Backend& backend) { return backend.kind() == BackendKind::reference ? 1e-5 : 1e-4; }

// The latent rows of a problem, dealt to ranks. Each rank has pages and a block table of its own; what it holds no
// position for is NaN.
struct Ranks {
  Ranks(const LayerProblem& problem, int ranks, int interleave_) : p(problem), count(ranks), interleave(interleave_) {
    std::vector<LayerProblem::Token> tokens = p.old_tokens;
    tokens.insert(tokens.end(), p.new_tokens.begin(), p.new_tokens.end());
    for (int rank = 0; rank < count; ++rank) {
      tables.push_back(random_table(p.s, 100 + static_cast<std::uint64_t>(rank)));
      caches.emplace_back(p.kv.size(), std::byte{0xFF});
      LayerProblem::Tokens all(p, tokens);
      Ids request;
      for (const auto& token : tokens) request.push_back(static_cast<std::int32_t>(token.request));
      SlotMap map = this->map(rank);
      map.row_request = tensor(request.data(), {all.size()});
      // A token of another rank gets slot -1, which the writer skips.
      positions_to_slots(Backend::reference(), tensor(all.positions.data(), {all.size(), 1}), map,
                         tensor(all.slots.data(), {all.size(), 1}));
      write_latent(Backend::reference(), all.write_latent_args(p, caches.back()));
    }
  }
  SlotMap map(int rank) const {
    return {tensor(tables[static_cast<std::size_t>(rank)].data(), {p.s.requests, p.s.pages_per_request()}),
            {},
            p.s.page_size,
            {rank, count, interleave}};
  }

  // Attention of every rank over its own slots, then combine.
  struct Output {
    std::vector<float> out, lse;
    int empty_rows = 0;  // rows of a rank that had nothing to attend to
  };
  Output attend(const Backend& backend, const TensorView& q, const TensorView& positions) {
    const std::int64_t n = q.dim(0), heads = q.dim(1), k = positions.dim(1);
    std::vector<float> part_out(static_cast<std::size_t>(count * n * heads * 512), kNan);
    std::vector<float> part_lse(static_cast<std::size_t>(count * n * heads), kNan);
    Output result{std::vector<float>(static_cast<std::size_t>(n * heads * 512), kNan),
                  std::vector<float>(static_cast<std::size_t>(n * heads), kNan)};
    for (int rank = 0; rank < count; ++rank) {
      Ids slots(static_cast<std::size_t>(n * k), kUnwritten);
      positions_to_slots(backend, positions, map(rank), tensor(slots.data(), {n, k}));
      for (std::int64_t t = 0; t < n; ++t)
        result.empty_rows += std::all_of(slots.begin() + t * k, slots.begin() + (t + 1) * k,
                                         [](std::int32_t slot) { return slot == -1; });
      AttentionArgs args;
      args.q = q;
      args.kv = p.kv_cache(caches[static_cast<std::size_t>(rank)]);
      args.rows = Slots{tensor(slots.data(), {n, k}), {}};
      args.scale = 1.f / 16;
      args.out = tensor(part_out.data() + rank * n * heads * 512, {n, heads, 512});
      args.lse = tensor(part_lse.data() + rank * n * heads, {n, heads});
      attention(backend, args, PoisonedWorkspace(attention_workspace_bytes(backend, {n, heads, k})));
    }
    for (std::size_t i = 0; i < part_lse.size(); ++i)  // an empty part's rows are never read
      if (part_lse[i] == -kInf) std::fill_n(part_out.begin() + static_cast<std::int64_t>(i) * 512, 512, kNan);
    combine(backend, {tensor(part_out.data(), {count, n, heads, 512}),
                      tensor(part_lse.data(), {count, n, heads}),
                      {},
                      tensor(result.out.data(), {n, heads, 512}),
                      tensor(result.lse.data(), {n, heads})});
    return result;
  }

  const LayerProblem& p;
  int count, interleave;
  std::vector<Ids> tables;
  std::vector<Bytes> caches;
};

TEST(Shards, CombinedEqualsUnsharded) {
  for (std::int64_t page : {16, 48, 64, 176}) {
    const LayerShape shape{.page_size = page};
    const LayerProblem problem(shape);
    for (const Backend& backend : host_backends()) {
      LayerCall whole(problem);
      Ids positions(whole.slots.size(), kUnwritten);
      const TensorView selected = tensor(positions.data(), {shape.tokens(), shape.topk});
      whole.args.indexer->select.positions = selected;
      whole.run(backend);
      for (int ranks : {2, 4, 8})
        for (std::int64_t interleave : {std::int64_t{1}, page}) {
          Ranks shards(problem, ranks, static_cast<int>(interleave));
          const Ranks::Output got = shards.attend(backend, whole.args.attention.q, selected);
          EXPECT_LE(relative_error(got.out, whole.out), tolerance(backend)) << ranks << " ranks, by " << interleave;
          EXPECT_LE(relative_error(got.lse, whole.lse), tolerance(backend)) << ranks << " ranks, by " << interleave;
        }
    }
  }
}

// Fewer selected rows than ranks: most ranks have nothing, and weigh nothing.
TEST(Shards, EmptyRanksWeighNothing) {
  const LayerShape shape{.topk = 2};
  const LayerProblem problem(shape);
  for (const Backend& backend : host_backends()) {
    LayerCall whole(problem);
    Ids positions(whole.slots.size(), kUnwritten);
    const TensorView selected = tensor(positions.data(), {shape.tokens(), shape.topk});
    whole.args.indexer->select.positions = selected;
    whole.run(backend);
    Ranks shards(problem, 8, 1);
    const Ranks::Output got = shards.attend(backend, whole.args.attention.q, selected);
    EXPECT_GE(got.empty_rows, 6 * shape.tokens());
    EXPECT_LE(relative_error(got.out, whole.out), tolerance(backend));
    EXPECT_LE(relative_error(got.lse, whole.lse), tolerance(backend));
  }
}

TEST(Shards, NothingSelectedAnywhere) {
  const LayerProblem problem({});
  const Ids none(static_cast<std::size_t>(problem.s.tokens() * 3), -1);
  for (const Backend& backend : host_backends()) {
    Ranks shards(problem, 4, 16);
    const Ranks::Output got =
        shards.attend(backend, tensor(problem.q.data(), {problem.s.tokens(), problem.s.heads, 576}),
                      tensor(none.data(), {problem.s.tokens(), 3}));
    for (float x : got.out) ASSERT_EQ(std::bit_cast<std::uint32_t>(x), 0u);
    for (float x : got.lse) ASSERT_EQ(x, -kInf);
  }
}

// Every visible row selected, over four ranks, against dense causal attention through a block table.
TEST(Case23, ShardedDenseEquality) {
  constexpr std::int64_t kLength = 300, kHeads = 2;
  LayerShape shape{
      .requests = 1, .per = kLength, .context = kLength, .page_size = 64, .topk = kLength, .heads = kHeads};
  const LayerProblem problem(shape);
  Ids positions(kLength * kLength, -1);
  for (std::int32_t t = 0; t < kLength; ++t)
    std::iota(positions.begin() + t * kLength, positions.begin() + t * kLength + t + 1, 0);
  const TensorView q = tensor(problem.q.data(), {kLength, kHeads, 576});
  for (const Backend& backend : host_backends()) {
    LayerCall whole(problem);
    write_latent(backend, whole.args.latent);
    // A dense call sees a causal tail of a few tokens; each row alone is the last of its own length.
    const std::int32_t* lengths = problem.lengths.data();
    for (std::int64_t t = 0; t < kLength; ++t) {
      AttentionArgs row = whole.args.attention;
      row.q = tensor(problem.q.data() + t * kHeads * 576, {1, kHeads, 576});
      row.rows = BlockTable{problem.block_table(), tensor(lengths + t, {1})};
      row.out = tensor(whole.out.data() + t * kHeads * 512, {1, kHeads, 512});
      row.lse = tensor(whole.lse.data() + t * kHeads, {1, kHeads});
      attention(backend, row, PoisonedWorkspace(attention_workspace_bytes(backend, {1, kHeads, kLength})));
    }
    for (int interleave : {1, 64}) {
      Ranks shards(problem, 4, interleave);
      const Ranks::Output got = shards.attend(backend, q, tensor(positions.data(), {kLength, kLength}));
      EXPECT_LE(relative_error(got.out, whole.out), tolerance(backend));
      EXPECT_LE(relative_error(got.lse, whole.lse), tolerance(backend));
    }
  }
}

}  // namespace
}  // namespace sievemla::test
