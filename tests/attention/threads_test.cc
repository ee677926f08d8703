// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/threads_test.cc -- bits do not depend on threads, on the pool, on other tokens, on repetition.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>

#include "support/attention_problem.h"
#include "support/backends.h"
#include "support/backward_pool.h"
#include "support/deadline.h"

namespace sievemla::test {
namespace {

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
    EXPECT_GT(pool.bodies, 0);
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
  for (const Backend& backend : host_backends()) {
    const Problem p = ragged();
    const Result all = p.run(backend, [](AttentionArgs& args) { args.batch_invariant = true; });
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

// Chunks that name no row, before, between and after others, change no bit.
TEST(Threads, EmptyChunks) {
  for (const KvFormat format : {KvFormat::bf16, KvFormat::fp8_ds_mla}) {
    Problem p{.heads = 9, .format = format, .pages = 4};
    const std::vector<std::int64_t> none(512, -1), first = Random(1).distinct(100, 256);
    std::vector<std::int64_t> lanes = none;
    lanes.insert(lanes.end(), first.begin(), first.end());
    lanes.insert(lanes.end(), none.begin(), none.end());
    for (int threads : {1, 7}) {
      const Backend backend = Backend::cpu({.threads = threads});
      const Result alone = p.list({first}).run(backend);
      EXPECT_TRUE(same_bits(p.list({lanes}).run(backend), alone)) << threads << " threads";
      EXPECT_TRUE(solved(p, backend));
    }
  }
}

// A workspace for larger bounds is enough for a smaller call, whichever bound is larger.
TEST(Threads, WorkspaceGrowsWithEveryBound) {
  Random random(3);
  for (const Backend& backend : host_backends({5}))
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

TEST(DeadlineDeathTest, EndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto hangs = [] {
    const Deadline deadline(std::chrono::seconds(0), "call 7");
    std::this_thread::sleep_for(std::chrono::minutes(1));
  };
  EXPECT_EXIT(hangs(), testing::ExitedWithCode(EXIT_FAILURE), "call 7: not done after 0 s");
}

// Calls of 1 to 512 tokens and up to 2048 lanes, first one after the other, then from two host threads at once: every
// checksum stays, and every call is over within 10 seconds. Of the 20,000 launches on two streams that a GPU must
// stand, a host makes 300: the edges of both ranges, then random shapes of at most 40,000 rows to attend to, so that it
// takes seconds. The rest, and 512 tokens of 2048 lanes, is left to the GPU's soak.
TEST(Case24, Soak) {
  constexpr int kCalls = 100;
  constexpr std::chrono::seconds kLimit{*SIEVEMLA_SANITIZED ? 100 : 10};  // a sanitizer takes about ten times as long
  constexpr std::int64_t kMostCells = 65 * 64, kMostRows = 40'000;        // tokens * heads, and times lanes
  constexpr std::array<std::int64_t, 3> kEdges[] = {{1, 8, 2048}, {1, 64, 2048}, {2, 16, 2048}, {3, 8, 2047},
                                                    {512, 8, 8},  {511, 8, 17},  {257, 16, 9},  {512, 8, 0},
                                                    {65, 64, 20}, {64, 64, 20},  {64, 16, 65},  {65, 8, 129}};
  Problem pool{.pages = 34};  // rows to draw from: the cache is full
  Problem::Cache cache(pool);
  for (std::int64_t s = 0; s < pool.slots(); ++s) cache.fill(pool, s);
  std::vector<bf16> q = Random(24).bf16s(kMostCells * 576);
  const Backend backend = Backend::cpu({.threads = 2});

  const auto call = [&](int i) {
    Random random(static_cast<std::uint64_t>(i) + 1000);
    constexpr std::int64_t kHeads[] = {8, 16, 64};
    const auto draw = [&]() -> std::array<std::int64_t, 3> {
      const std::int64_t heads = kHeads[random.below(3)];
      const std::int64_t tokens = 1 + random.below(std::min<std::int64_t>(512, kMostCells / heads));
      return {tokens, heads, random.below(std::min<std::int64_t>(2048, kMostRows / (tokens * heads)) + 1)};
    };
    const auto [tokens, heads, topk] = i < std::ssize(kEdges) ? kEdges[i] : draw();
    const Deadline deadline(kLimit, "call " + std::to_string(i) + ": " + std::to_string(tokens) + " tokens, " +
                                        std::to_string(heads) + " heads, topk " + std::to_string(topk));
    std::vector<std::int32_t> indices, lengths;
    for (std::int64_t n = 0; n < tokens * topk; ++n)
      indices.push_back(static_cast<std::int32_t>(random.below(pool.slots() + 200) - 100));
    for (std::int64_t n = 0; n < tokens; ++n) lengths.push_back(static_cast<std::int32_t>(random.below(topk + 1)));
    lengths.back() = static_cast<std::int32_t>(topk);  // one row is as long as it can be
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
