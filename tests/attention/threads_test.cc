// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/threads_test.cc -- bits do not depend on threads, on the pool, on other tokens, on repetition.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "support/attention_problem.h"

namespace sievemla::test {
namespace {

// A pool as a host may bring it: three workers, and the work goes through backwards.
struct BackwardPool {
  static constexpr int kWorkers = 3;
  std::atomic<std::int64_t> calls{0};
  static void run(void* context, std::int64_t n, ParallelFor::Body body, void* body_context) {
    auto& pool = *static_cast<BackwardPool*>(context);
    pool.calls += n;
    std::atomic<std::int64_t> left{n};
    const auto work = [&](int worker) {
      for (std::int64_t i; (i = --left) >= 0;) body(body_context, i, worker);
    };
    std::vector<std::thread> threads;
    for (int w = 1; w < kWorkers; ++w) threads.emplace_back(work, w);
    work(0);
    for (std::thread& t : threads) t.join();
  }
  Backend backend() { return Backend::cpu({.threads = kWorkers, .host = {run, this}}); }
};

// Rows of 0 to 5000 lanes: no chunk, one, and many.
Problem ragged() {
  Problem p{.tokens = 7, .heads = 6, .pages = 40, .sinks = true};
  p.random_list(5000, 2300);
  p.topk_length = {5000, 0, 1, 256, 257, 4097, 700};
  return p;
}
Problem dense() {
  Problem p{.tokens = 8, .heads = 6, .pages = 20};
  p.table_width = 10;
  for (std::int32_t i = 0; i < 20; ++i) p.table.push_back(i * 13 % 20);
  p.lengths = {640, 300};
  return p;
}

TEST(Threads, AnyNumberGivesTheSameBits) {
  for (const Problem& p : {ragged(), dense()}) {
    const Result one = p.run(Backend::cpu({.threads = 1}));
    for (int threads : {2, 7, 16}) EXPECT_TRUE(same_bits(p.run(Backend::cpu({.threads = threads})), one)) << threads;
  }
}

TEST(Threads, AHostsOwnPoolGivesTheSameBits) {
  for (const Problem& p : {ragged(), dense()}) {
    BackwardPool pool;
    EXPECT_TRUE(same_bits(p.run(pool.backend()), p.run(Backend::cpu({.threads = 1}))));
    EXPECT_GT(pool.calls, 0);
  }
}

// More partial results than the workspace holds at a time: 32 chunks of 16 heads are 1 MiB a token.
TEST(Threads, TokensInWaves) {
  Problem p{.tokens = 80, .heads = 16};
  p.random_list(8192, 40);
  const Backend backend = Backend::cpu({.threads = 2});
  EXPECT_LT(attention_workspace_bytes(backend, {80, 16, 8192}), std::int64_t{66} << 20);
  EXPECT_EQ(attention_workspace_bytes(backend, {80'000, 16, 8192}), attention_workspace_bytes(backend, {80, 16, 8192}));
  EXPECT_TRUE(solved(p, backend, /*step=*/31));
  EXPECT_TRUE(same_bits(p.run(backend), p.run(Backend::cpu({.threads = 7}))));
}

// A token alone gives the bits that it gives among others.
TEST(Threads, BatchInvariant) {
  for (const Backend& backend : {Backend::reference(), Backend::cpu({.threads = 2})}) {
    const Problem p = ragged();
    const Result all = p.run(backend);
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      const Result alone = p.run(backend, [&](AttentionArgs& args) {
        args.batch_invariant = true;
        Slots& rows = std::get<Slots>(args.rows);
        for (TensorView* view : {&args.q, &args.out, &args.lse, &rows.indices, &rows.topk_length}) {
          if (view != &args.out && view != &args.lse)
            view->data = static_cast<std::byte*>(view->data) + t * view->step(0) * size_of(view->dtype);
          view->shape[0] = 1;
        }
      });
      for (std::int64_t h = 0; h < p.heads; ++h)
        EXPECT_TRUE(same_bits(alone.row(h, 512), all.row(t * p.heads + h, 512))) << t;
      EXPECT_TRUE(same_bits(std::span(alone.lse).first(Problem::at(p.heads)),
                            std::span(all.lse).subspan(Problem::at(t * p.heads), Problem::at(p.heads))));
    }
  }
}

// A workspace for larger bounds is enough for a smaller call, whichever bound is larger.
TEST(Threads, WorkspaceGrowsWithEveryBound) {
  Random random(3);
  for (const Backend& backend : {Backend::reference(), Backend::cpu({.threads = 5})})
    for (int i = 0; i < 3000; ++i) {
      AttentionBounds small{random.below(300), 1 + random.below(128), random.below(20000)}, large = small;
      switch (random.below(3)) {
        case 0: large.tokens += random.below(300); break;
        case 1: large.heads += random.below(129 - large.heads); break;
        default: large.lanes += random.below(20000);
      }
      ASSERT_LE(attention_workspace_bytes(backend, small), attention_workspace_bytes(backend, large))
          << small.tokens << " tokens, " << small.heads << " heads, " << small.lanes << " lanes";
    }
}

// Random calls, first one after the other, then from two host threads at once: every checksum stays.
TEST(Case24, Soak) {
  constexpr int kCalls = 120;
  Problem pool{.tokens = 65, .heads = 64, .pages = 34};  // queries and rows to draw from; the cache is full
  Problem::Cache cache(pool);
  for (std::int64_t s = 0; s < pool.slots(); ++s) cache.fill(pool, s);
  std::vector<bf16> q = Random(24).bf16s(65 * 64 * 576);
  const Backend backend = Backend::cpu({.threads = 2});

  const auto call = [&](int i) {
    Random random(static_cast<std::uint64_t>(i) + 1000);
    constexpr std::int64_t kTokens[] = {1, 2, 3, 5, 8, 64, 65}, kHeads[] = {8, 16, 64};
    const std::int64_t tokens = kTokens[random.below(7)], heads = kHeads[random.below(3)];
    const std::int64_t topk = tokens > 8 ? 1 + random.below(40) : 1 + random.below(2048 / tokens);
    std::vector<std::int32_t> indices, lengths;
    for (std::int64_t n = 0; n < tokens * topk; ++n)
      indices.push_back(static_cast<std::int32_t>(random.below(pool.slots() + 200) - 100));
    for (std::int64_t n = 0; n < tokens; ++n) lengths.push_back(static_cast<std::int32_t>(random.below(topk + 1)));
    std::vector<float> out(Problem::at(tokens * heads * 512), kNan), lse(Problem::at(tokens * heads), kNan);
    AttentionArgs args;
    args.q = tensor(q.data(), {tokens, heads, 576});
    args.kv = cache.view;
    args.rows = Slots{tensor(indices.data(), {tokens, topk}), tensor(lengths.data(), {tokens})};
    args.scale = 1.f / 16;
    args.out = tensor(out.data(), {tokens, heads, 512});
    args.lse = tensor(lse.data(), {tokens, heads});
    attention(backend, args, PoisonedWorkspace(attention_workspace_bytes(backend, {tokens, heads, topk})));
    std::uint64_t sum = 1469598103934665603u;  // FNV-1a over the bits of all outputs
    for (const auto* values : {&out, &lse})
      for (float x : *values) sum = (sum ^ std::bit_cast<std::uint32_t>(x)) * 1099511628211u;
    return sum;
  };

  std::vector<std::uint64_t> first;
  for (int i = 0; i < kCalls; ++i) first.push_back(call(i));
  std::atomic<int> different{0};
  const auto again = [&](int start) {
    for (int i = 0; i < kCalls; ++i)
      different += call((start + i) % kCalls) != first[static_cast<std::size_t>((start + i) % kCalls)];
  };
  std::thread other(again, kCalls / 2);
  again(0);
  other.join();
  EXPECT_EQ(different, 0);
}

}  // namespace
}  // namespace sievemla::test
