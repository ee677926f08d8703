// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/combine/cuda_test.cc -- stage 4 on a CUDA device against the definition; attention over shards of the rows,
// merged, against attention over all of them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "attention/on_cuda.h"
#include "support/near.h"

namespace sievemla::test {
namespace {

using CombineOnCuda = OnCuda;

struct Merged {
  std::vector<float> out, lse;
};
Merged merge(const Backend& backend, CombineArgs args) {
  const std::int64_t tokens = args.partial_out.dim(1), heads = args.partial_out.dim(2), width = args.partial_out.dim(3);
  Merged merged{std::vector<float>(Problem::at(tokens * heads * width), kNan),
                std::vector<float>(Problem::at(tokens * heads), kNan)};
  args.out = tensor(merged.out.data(), {tokens, heads, width});
  args.lse = tensor(merged.lse.data(), {tokens, heads});
  OnDevice device(backend.device());
  combine(backend, device.put(args));
  device.take_back(args.out), device.take_back(args.lse);
  return merged;
}

// exp and its argument (a difference of at most 16) round a weight by 2 + 16 + 1 units of 2^-24, the sums once a part:
// as the CPU's bound (combine_test.cc). Values are below 1.
TEST_F(CombineOnCuda, AgreesWithTheReference) {
  const Backend cuda = backend();
  for (const std::int64_t parts : {1, 2, 3, 7, 32})
    for (const std::int64_t width : {1, 64, 512, 700})
      for (const bool short_parts : {false, true})
        for (const double empty : {0.0, 0.3, 1.0}) {
          Random random(static_cast<std::uint64_t>(parts * 1000 + width));
          constexpr std::int64_t kTokens = 3, kHeads = 5;
          std::vector<float> out = random.f32s(parts * kTokens * kHeads * width), lse, sink = random.f32s(kHeads, 3.f);
          for (std::int64_t i = 0; i < parts * kTokens * kHeads; ++i) {
            const bool nothing = (random.uniform() + 1) / 2 <= empty;
            lse.push_back(nothing ? -kInf : static_cast<float>(random.uniform()) * 8);
            if (nothing) std::fill_n(out.begin() + i * width, width, kNan);
          }
          std::vector<bf16> short_out;
          for (float x : out) short_out.push_back(base::to_bf16(x));
          CombineArgs args;
          args.partial_out = short_parts ? tensor(short_out.data(), {parts, kTokens, kHeads, width})
                                         : tensor(out.data(), {parts, kTokens, kHeads, width});
          args.partial_lse = tensor(lse.data(), {parts, kTokens, kHeads});
          for (const bool sinks : {false, true}) {
            args.sink = sinks ? tensor(sink.data(), {kHeads}) : TensorView{};
            const Merged got = merge(cuda, args), want = merge(Backend::reference(), args);
            const float bound = 2 * (19 + static_cast<float>(parts)) * 0x1p-24f;
            for (std::size_t i = 0; i < want.out.size(); ++i)
              ASSERT_NEAR(got.out[i], want.out[i], bound) << parts << " parts, width " << width;
            for (std::size_t i = 0; i < want.lse.size(); ++i)
              ASSERT_TRUE(got.lse[i] == want.lse[i] || std::abs(got.lse[i] - want.lse[i]) <= 1e-5f * 8);
          }
        }
}

TEST_F(CombineOnCuda, EmptyPartsChangeNoBit) {
  const Backend cuda = backend();
  Random random(3);
  constexpr std::int64_t kCells = 4 * 6 * 512;
  std::vector<float> one = random.f32s(kCells), lse = random.f32s(4 * 6, 5.f);
  one[0] = -0.f;
  std::vector<float> three(kCells, kNan), lses(4 * 6, -kInf);
  three.insert(three.end(), one.begin(), one.end()), lses.insert(lses.end(), lse.begin(), lse.end());
  three.resize(3 * kCells, kNan), lses.resize(3 * 4 * 6, -kInf);
  CombineArgs args;
  args.partial_out = tensor(three.data(), {3, 4, 6, 512}), args.partial_lse = tensor(lses.data(), {3, 4, 6});
  const Merged got = merge(cuda, args);
  EXPECT_TRUE(same_bits(got.out, one));
  EXPECT_TRUE(same_bits(got.lse, lse));
}

TEST_F(CombineOnCuda, Case23LseBase) {
  const Backend cuda = backend();
  const float out[] = {0, 4, kNan}, lse[] = {0, std::log(3.f), -kInf};
  CombineArgs args;
  args.partial_out = tensor(out, {3, 1, 1, 1}), args.partial_lse = tensor(lse, {3, 1, 1});
  const Merged got = merge(cuda, args);
  EXPECT_NEAR(got.out[0], 3.f, 1e-6f);
  EXPECT_NEAR(got.lse[0], 1.386294f, 1e-6f);
  const float nothing[] = {-kInf, -kInf, -kInf};
  args.partial_lse = tensor(nothing, {3, 1, 1});
  const Merged empty = merge(cuda, args);
  EXPECT_TRUE(empty.out[0] == 0 && !std::signbit(empty.out[0]));
  EXPECT_EQ(empty.lse[0], -kInf);
}

// Decode context parallel: every lane is on one of N ranks, by token or by page, and a last rank holds nothing. What
// each rank's attention gives; the output of what is empty is NaN, since nobody may read it.
struct Parts {
  Parts(const Backend& backend, const Problem& whole, const Problem::Cache& cache, std::int64_t ranks,
        std::int64_t interleave) {
    for (std::int64_t r = 0; r <= ranks; ++r) {
      Problem part = whole;
      part.sinks = false;
      for (std::int64_t& slot : part.indices)
        if (slot / interleave % ranks != r) slot = -1;
      Result result = part.run(backend, cache);
      for (std::size_t c = 0; c < result.lse.size(); ++c)
        if (result.lse[c] == -kInf) std::fill_n(result.out.begin() + static_cast<std::ptrdiff_t>(c * 512), 512, kNan);
      out.insert(out.end(), result.out.begin(), result.out.end());
      lse.insert(lse.end(), result.lse.begin(), result.lse.end());
    }
    for (std::int64_t h = 0; h < whole.heads; ++h) sink.push_back(whole.sink(h));
    args.partial_out = tensor(out.data(), {ranks + 1, whole.tokens, whole.heads, 512});
    args.partial_lse = tensor(lse.data(), {ranks + 1, whole.tokens, whole.heads});
    if (whole.sinks) args.sink = tensor(sink.data(), {whole.heads});
  }
  Parts(const Parts&) = delete;
  std::vector<float> out, lse, sink;
  CombineArgs args;
};

// Tokens whose lanes lie on every rank, on the first alone, and on at most three.
Problem sharded(KvFormat format, int rope, std::int64_t ranks, std::int64_t interleave) {
  Problem whole{.tokens = 3, .heads = ranks == 4 ? 64 : 8, .format = format, .rope = rope, .pages = 8};
  whole.random_list(400, 350);
  for (std::int64_t i = 0; i < 400; ++i)
    if (std::int64_t& slot = whole.indices[Problem::at(400 + i)]; slot / interleave % ranks != 0) slot = -1;
  std::fill_n(whole.indices.begin() + 803, 397, -1);
  return whole;
}

template <class Run>
void over_shards(Run&& run) {
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t ranks : {2, 4, 8})
      for (const std::int64_t interleave : {1, 64}) {
        SCOPED_TRACE(testing::Message() << info(format).name << ", " << ranks << " ranks by " << interleave);
        run(sharded(format, rope, ranks, interleave), ranks, interleave);
      }
}

// Whole and merged, a weight (for fp8 rows times its scale) is rounded to bf16 once, relative to another peak: by 2^-9
// of it each. The sums of at most 350 terms add 350 * 2^-24 each, and what f32 does to exp and lse is below that.
// The ranks' LSEs are natural logarithms; they may have been f32 in base 2 on the way, as with some engines.
TEST_F(CombineOnCuda, ShardsOfAttentionMergeToTheWhole) {
  constexpr double kOfMass = 2 * (0x1p-9 + 2 * 350 * 0x1p-24);
  const Backend cuda = backend();
  double worst = 0;
  over_shards([&](Problem whole, std::int64_t ranks, std::int64_t interleave) {
    whole.sinks = ranks > 2;
    Problem::Cache cache(whole);
    const Result want = whole.run(cuda, cache.fill(whole));
    Parts parts(cuda, whole, cache, ranks, interleave);
    const Merged natural = merge(cuda, parts.args);
    expect_near(whole, cache, {natural.out, natural.lse});
    for (std::int64_t c = 0; c < whole.tokens * whole.heads; c += 5) {
      const std::int64_t t = c / whole.heads, h = c % whole.heads;
      const Answer exact = answer(whole, cache, whole.live(t), t, h);
      for (std::int64_t d = 0; d < 512; ++d) {
        const double apart = std::abs(static_cast<double>(natural.out[Problem::at(c * 512 + d)]) -
                                      static_cast<double>(want.out[Problem::at(c * 512 + d)]));
        worst = std::max(worst, apart / exact.mass[Problem::at(d)]);
      }
    }
    for (float& x : parts.lse) {
      const float log2 = static_cast<float>(static_cast<double>(x) / std::log(2.0));
      x = static_cast<float>(static_cast<double>(log2) * std::log(2.0));
    }
    const Merged base2 = merge(cuda, parts.args);
    expect_near(whole, cache, {base2.out, base2.lse});
  });
  std::printf("merged and whole: at most %.2g of sum p |v| apart, bound %.2g\n", worst, kOfMass);
  EXPECT_LE(worst, kOfMass);
}

// Weights that are powers of two and values of three bits: bf16 holds the weights, f32 the sums, in every order. What
// is left to differ: log and exp of each part's sum (|lse| <= 16: at most four roundings of 2^-21 on the way to the
// weight of a part, and to the sum of those), and the sums, products and quotients of at most 9 parts, 22 of 2^-24: in
// all 6e-6.
TEST_F(CombineOnCuda, ShardsOfExactWeightsMergeToTheWhole) {
  const Backend cuda = backend();
  double worst = 0;
  over_shards([&](Problem whole, std::int64_t ranks, std::int64_t interleave) {
    whole.exact = true;
    whole.scale = std::log(2.f);
    Problem::Cache cache(whole);
    const Result want = whole.run(cuda, cache.fill(whole)), definition = whole.run(Backend::reference(), cache);
    const Merged got = merge(cuda, Parts(cuda, whole, cache, ranks, interleave).args);
    for (const Result* one : {&want, &definition})
      for (const double apart : {relative_error(got.out, one->out), relative_error(got.lse, one->lse)}) {
        EXPECT_LE(apart, 1e-5);
        worst = std::max(worst, apart);
      }
  });
  std::printf("merged, whole, definition: at most %.2g of the largest apart, bound 1e-5\n", worst);
}

}  // namespace
}  // namespace sievemla::test
