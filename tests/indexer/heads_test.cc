// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/heads_test.cc -- write_index_keys and index_queries on the host backends, against the formulas.
#include <gtest/gtest.h>

#include <numeric>

#include "indexer/head_problem.h"
#include "sievemla/error.h"
#include "support/workspace.h"

namespace sievemla::test {
namespace {

constexpr RopeStyle kStyles[] = {RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none};

TEST(WriteIndexKeys, AgreeWithTheFormula) {
  for (RopeStyle style : kStyles) {
    for (DType input : {DType::f32, DType::bf16}) {
      const KeyProblem problem(37, style, input);
      for (const Backend& backend : host_backends())
        for (IndexFormat format : {IndexFormat::f32, IndexFormat::bf16}) {
          const Buffer cache = problem.cache(format);
          write_index_keys(backend, problem.args(cache, format));
          EXPECT_TRUE(problem.agrees(cache, backend));
        }
    }
  }
}

TEST(WriteIndexKeys, Fp8IsTheF32KeyQuantised) {
  const KeyProblem problem(20, RopeStyle::interleaved, DType::bf16);
  for (const Backend& backend : host_backends()) {
    Buffer exact = problem.cache(IndexFormat::f32);
    write_index_keys(backend, problem.args(exact, IndexFormat::f32));
    for (ScaleRule rule : {ScaleRule::arbitrary, ScaleRule::power_of_two}) {
      Buffer packed = problem.cache(IndexFormat::fp8);
      WriteIndexKeysArgs args = problem.args(packed, IndexFormat::fp8);
      args.scale = rule;
      write_index_keys(backend, args);
      for (std::int64_t slot : problem.slots) {
        const float* key = reinterpret_cast<const float*>(exact.bytes.data()) + slot * kIndexDim;
        float amax = 0, stored = 0;
        for (int i = 0; i < kIndexDim; ++i) amax = std::max(amax, std::abs(key[i]));
        const kv::IndexKeyAddress at = kv::index_key_address(args.cache, slot);
        std::memcpy(&stored, at.scale, 4);
        EXPECT_EQ(stored, rule == ScaleRule::arbitrary ? amax / 448 : std::exp2(std::ceil(std::log2(amax / 448))));
        for (int i = 0; i < kIndexDim; ++i) {  // half a step: 2^-4 of the value, or 2^-10 among the subnormals
          const double code = kv::from_e4m3(static_cast<std::uint8_t>(at.key[i])), exact_code = double{key[i]} / stored;
          EXPECT_LE(std::abs(code - exact_code), std::max(std::abs(exact_code) * 0x1p-4, 0x1p-10)) << i;
        }
      }
    }
  }
}

// An engine that runs norm and rotation one by one stores bf16 after each. In f32 a normalised value near a rounding
// edge may land on its other side: a step of 2^-8 in one value of thousands, which rope hands to two.
TEST(WriteIndexKeys, RoundedWhereAnEngineStoresBf16) {
  for (RopeStyle style : kStyles) {
    const KeyProblem problem(100, style, DType::bf16);
    for (const Backend& backend : host_backends()) {
      const bool exact = backend.kind() == BackendKind::reference;
      const Buffer cache = problem.cache(IndexFormat::f32);
      WriteIndexKeysArgs args = problem.args(cache, IndexFormat::f32);
      args.round_bf16 = true;
      write_index_keys(backend, args);
      int different = 0;
      for (int t = 0; t < problem.tokens; ++t) {
        const std::vector<double> want = problem.answer(t, true);
        const float* key = reinterpret_cast<const float*>(cache.bytes.data()) + problem.slots[t] * kIndexDim;
        for (int i = 0; i < kIndexDim; ++i) {
          EXPECT_EQ(double{key[i]}, stored_bf16(double{key[i]})) << backend.name();
          EXPECT_LE(std::abs(key[i] - want[i]), exact ? 0 : 4 * 0x1p-6) << backend.name();
          different += double{key[i]} != want[i];
        }
      }
      EXPECT_LE(different, exact ? 0 : problem.tokens * kIndexDim / 500) << backend.name();
    }
  }
}

TEST(IndexQueries, RoundedWhereAnEngineStoresBf16) {
  for (RopeStyle style : kStyles) {
    const QueryProblem problem(style, DType::bf16);
    for (const Backend& backend : host_backends()) {
      const Buffer out(DType::f32, QueryProblem::kTokens * QueryProblem::kHeads * kIndexDim);
      std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads);
      IndexQueryArgs args = problem.args(out, weights);
      args.round_bf16 = true;
      index_queries(backend, args);
      const float* got = reinterpret_cast<const float*>(out.bytes.data());
      int different = 0;
      for (int t = 0; t < QueryProblem::kTokens; ++t)
        for (int h = 0; h < QueryProblem::kHeads; ++h) {
          const std::vector<double> want = stored_bf16(problem.answer(t, h));
          for (double x : want) different += double{*got++} != x;
        }
      EXPECT_LE(different, backend.kind() == BackendKind::reference ? 0 : 4) << backend.name() << name_of(style);
    }
  }
}

TEST(IndexQueries, WritesTheKeysThatGoWithThem) {
  for (const Backend& backend : host_backends()) {
    const KeyProblem keys(37, RopeStyle::interleaved, DType::bf16);
    const QueryProblem problem(RopeStyle::half_split, DType::bf16);
    const Buffer apart = keys.cache(IndexFormat::fp8), together = keys.cache(IndexFormat::fp8);
    const Buffer out(DType::f32, QueryProblem::kTokens * QueryProblem::kHeads * kIndexDim);
    std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads);
    write_index_keys(backend, keys.args(apart, IndexFormat::fp8));
    IndexQueryArgs args = problem.args(out, weights);
    args.keys = keys.args(together, IndexFormat::fp8);
    index_queries(backend, args);
    EXPECT_EQ(together.bytes, apart.bytes) << backend.name();
    EXPECT_TRUE(problem.agrees(out, weights, backend));
    args.keys.norm_eps = 0;
    EXPECT_THROW(index_queries(backend, args), InvalidArgument);
  }
}

// The bytes of the two backends: a value near a rounding edge may land on either side of it, a step apart.
TEST(WriteIndexKeys, Fp8BytesOfTheBackendsAreAtMostOneCodeApart) {
  const KeyProblem problem(64, RopeStyle::half_split, DType::bf16);
  Buffer a = problem.cache(IndexFormat::fp8), b = a;
  write_index_keys(Backend::reference(), problem.args(a, IndexFormat::fp8));
  write_index_keys(Backend::cpu(), problem.args(b, IndexFormat::fp8));
  int different = 0;
  for (std::int64_t slot : problem.slots) {
    const kv::IndexKeyAddress x = kv::index_key_address(problem.args(a, IndexFormat::fp8).cache, slot);
    const kv::IndexKeyAddress y = kv::index_key_address(problem.args(b, IndexFormat::fp8).cache, slot);
    ASSERT_EQ(std::memcmp(x.scale, y.scale, 4), 0);
    for (int i = 0; i < kIndexDim; ++i) {
      const int p = static_cast<int>(x.key[i]), q = static_cast<int>(y.key[i]);
      EXPECT_LE(std::abs(p - q), 1);
      different += p != q;
    }
  }
  EXPECT_LE(different, problem.tokens * kIndexDim / 1000);
}

TEST(WriteIndexKeys, OnlyTheirSlotsAreWrittenAndNegativeOnesSkipped) {
  for (IndexFormat format : {IndexFormat::f32, IndexFormat::bf16, IndexFormat::fp8}) {
    KeyProblem problem(24, RopeStyle::interleaved, DType::f32);
    for (int t : {0, 5, 23}) {  // padded: nothing of them may be read
      problem.slots[t] = -1 - t;
      problem.positions[t] = kMaxPosition + 1'000'000;
    }
    std::vector<bool> named(static_cast<std::size_t>(problem.pages() * 16));
    for (std::int64_t slot : problem.slots)
      if (slot >= 0) named[slot] = true;
    for (const Backend& backend : host_backends()) {
      Buffer cache = problem.cache(format);
      WriteIndexKeysArgs args = problem.args(cache, format);
      std::vector<std::int32_t> narrow(problem.slots.begin(), problem.slots.end());
      if (format == IndexFormat::bf16) args.slots = tensor(narrow.data(), {problem.tokens});
      write_index_keys(backend, args);
      for (std::int64_t slot = 0; slot < problem.pages() * 16; ++slot) {
        double key[kIndexDim];
        const double scale = kv::load_index_key(args.cache, slot, key);
        for (int i = 0; i < kIndexDim; ++i)  // 0xFF, the initial bytes, are NaN in every format
          ASSERT_EQ(std::isnan(key[i] * scale), !named[slot]) << backend.name() << " slot " << slot;
      }
    }
  }
}

TEST(WriteIndexKeys, EpsilonIsAddedToTheVariance) {
  // Alternating +-1e-3: mean 0, variance 1e-6, so 1e-6 more halves the square: +-1 / sqrt(2).
  std::vector<float> k(kIndexDim), ones(kIndexDim, 1.f), zeros(kIndexDim, 0.f), out(kIndexDim, kNan);
  for (int i = 0; i < kIndexDim; ++i) k[i] = i % 2 ? -1e-3f : 1e-3f;
  const std::int32_t slot = 0;
  WriteIndexKeysArgs args;
  args.k = tensor(k.data(), {1, kIndexDim});
  args.norm_weight = tensor(ones.data(), {kIndexDim});
  args.norm_bias = tensor(zeros.data(), {kIndexDim});
  args.rope.style = RopeStyle::none;
  args.slots = tensor(&slot, {1});
  args.cache = {IndexFormat::f32, tensor(out.data(), {1, 1, kIndexDim})};
  for (const Backend& backend : host_backends()) {
    write_index_keys(backend, args);
    for (int i = 0; i < kIndexDim; ++i) EXPECT_NEAR(out[i], (i % 2 ? -1 : 1) * 0.70710678, 1e-6) << backend.name();
  }
}

// A LayerNorm: a constant added to k changes nothing, and the bias comes through.
TEST(WriteIndexKeys, MeanIsRemovedAndBiasAdded) {
  const KeyProblem problem(3, RopeStyle::none, DType::f32);
  KeyProblem shifted = problem, unbiased = problem;
  for (int i = 0; i < 3 * kIndexDim; ++i) shifted.k.put(i, problem.k_values[i] + 2);
  for (int i = 0; i < kIndexDim; ++i) unbiased.bias.put(i, 0);
  for (const Backend& backend : host_backends()) {
    std::vector<std::vector<float>> keys;
    for (const KeyProblem& p : {problem, shifted, unbiased}) {
      Buffer cache = p.cache(IndexFormat::f32);
      write_index_keys(backend, p.args(cache, IndexFormat::f32));
      keys.push_back(values(cache.view({problem.pages() * 16, kIndexDim})));
    }
    for (std::int64_t slot : problem.slots)
      for (int i = 0; i < kIndexDim; ++i) {
        const std::size_t at = static_cast<std::size_t>(slot * kIndexDim + i);
        // k + 2 is itself rounded, to 2^-23, and values up to 3.5 make the mean's bound above 7/3 as large.
        EXPECT_NEAR(keys[1][at], keys[0][at], 4 * kKeyBound + 4 * 0x1p-23) << backend.name();
        EXPECT_NEAR(keys[0][at] - keys[2][at], problem.bias_values[i], 1e-6) << backend.name();
      }
  }
}

TEST(WriteIndexKeys, AnAllZeroKeyGetsTheFloorAsEnginesDo) {
  std::vector<float> k(kIndexDim, 3.f), zeros(kIndexDim, 0.f);
  const std::int32_t slot = 1;
  std::vector<std::uint8_t> page(2 * kIndexKeyBytes, 0xA5);
  WriteIndexKeysArgs args;
  args.k = tensor(k.data(), {1, kIndexDim});
  args.norm_weight = args.norm_bias = tensor(zeros.data(), {kIndexDim});
  args.rope.style = RopeStyle::none;
  args.slots = tensor(&slot, {1});
  args.cache.pages = tensor(page.data(), {1, 2, kIndexKeyBytes});
  for (const Backend& backend : host_backends()) {
    for (ScaleRule rule : {ScaleRule::arbitrary, ScaleRule::power_of_two}) {
      args.scale = rule;
      write_index_keys(backend, args);
      float scale = 0;
      std::memcpy(&scale, page.data() + 2 * kIndexDim + 4, 4);
      EXPECT_EQ(scale, rule == ScaleRule::arbitrary ? 1e-4f / 448 : 0x1p-22f);  // 2.2e-7, 2.4e-7
      for (int i = 0; i < kIndexDim; ++i) EXPECT_EQ(page[kIndexDim + i], 0);
      for (int i = 0; i < kIndexDim; ++i) EXPECT_EQ(page[i], 0xA5);
    }
  }
}

TEST(WriteIndexKeys, ANanOrInfinityMakesTheScaleNan) {
  for (float bad : {kNan, kInf, -kInf}) {
    KeyProblem problem(2, RopeStyle::half_split, DType::f32);
    problem.k.put(kIndexDim + 100, static_cast<double>(bad));
    for (const Backend& backend : host_backends()) {
      Buffer cache = problem.cache(IndexFormat::fp8);
      const WriteIndexKeysArgs args = problem.args(cache, IndexFormat::fp8);
      write_index_keys(backend, args);
      float key[kIndexDim];
      EXPECT_TRUE(std::isfinite(kv::load_index_key(args.cache, problem.slots[0], key))) << backend.name();
      EXPECT_TRUE(std::isnan(kv::load_index_key(args.cache, problem.slots[1], key))) << backend.name();
    }
  }
}

TEST(WriteIndexKeys, BitsDoNotDependOnThreads) {
  const KeyProblem problem(70, RopeStyle::interleaved, DType::bf16);
  Buffer one = problem.cache(IndexFormat::fp8);
  write_index_keys(Backend::cpu({1, {}}), problem.args(one, IndexFormat::fp8));
  for (int threads : {2, 7, 16}) {
    Buffer many = problem.cache(IndexFormat::fp8);
    write_index_keys(Backend::cpu({threads, {}}), problem.args(many, IndexFormat::fp8));
    EXPECT_EQ(many.bytes, one.bytes) << threads;
  }
}

TEST(WriteIndexKeys, NoTokensIsLegal) {
  const KeyProblem problem(1, RopeStyle::half_split, DType::f32);
  Buffer cache = problem.cache(IndexFormat::fp8);
  const std::vector<std::byte> before = cache.bytes;
  WriteIndexKeysArgs args = problem.args(cache, IndexFormat::fp8);
  for (TensorView* v : {&args.k, &args.slots, &args.rope.positions}) v->shape[0] = 0, v->data = nullptr;
  for (const Backend& backend : host_backends()) write_index_keys(backend, args);
  EXPECT_EQ(cache.bytes, before);
}

// ---- queries ----------------------------------------------------------------------------------------

TEST(IndexQueries, AgreeWithTheFormula) {
  for (RopeStyle style : kStyles) {
    for (DType input : {DType::f32, DType::bf16}) {
      for (DType output : {DType::f32, DType::bf16, DType::u8}) {
        const QueryProblem problem(style, input);
        for (const Backend& backend : host_backends()) {
          Buffer out(output, QueryProblem::kTokens * QueryProblem::kHeads * kIndexDim);
          std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads, kNan);
          index_queries(backend, problem.args(out, weights));
          EXPECT_TRUE(problem.agrees(out, weights, backend));
        }
      }
    }
  }
}

TEST(IndexQueries, TheOutputMayBeTheInput) {
  const QueryProblem problem(RopeStyle::half_split, DType::f32);
  for (const Backend& backend : host_backends()) {
    Buffer apart(DType::f32, std::ssize(problem.q_values));
    std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads, kNan);
    index_queries(backend, problem.args(apart, weights));
    QueryProblem inplace = problem;
    index_queries(backend, inplace.args(inplace.q, weights));
    EXPECT_EQ(inplace.q.bytes, apart.bytes) << backend.name();
  }
}

TEST(IndexQueries, AQueryOfZerosOrNan) {
  QueryProblem problem(RopeStyle::none, DType::f32);
  for (int i = 0; i < kIndexDim; ++i) problem.q.put(i, 0);
  problem.q.put(kIndexDim + 3, static_cast<double>(kNan));
  for (const Backend& backend : host_backends()) {
    Buffer out(DType::u8, std::ssize(problem.q_values));
    std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads, 0.f);
    index_queries(backend, problem.args(out, weights));
    for (int i = 0; i < 2 * kIndexDim; ++i) EXPECT_EQ(out.bytes[i], std::byte{0}) << backend.name();
    // floor 1e-10: 1e-10 / 448 = 2.2e-13, up to the next power of two 2^-42 = 2.3e-13
    EXPECT_FLOAT_EQ(weights[0], static_cast<float>(problem.weight_values[0] * 0.125 * 0x1p-42)) << backend.name();
    EXPECT_TRUE(std::isnan(weights[1])) << backend.name();
    EXPECT_TRUE(std::isfinite(weights[2])) << backend.name();
  }
}

TEST(IndexQueries, BitsDoNotDependOnThreads) {
  const QueryProblem problem(RopeStyle::interleaved, DType::bf16);
  Buffer one(DType::u8, std::ssize(problem.q_values)), many = one;
  std::vector<float> one_weights(QueryProblem::kTokens * QueryProblem::kHeads), many_weights = one_weights;
  index_queries(Backend::cpu({1, {}}), problem.args(one, one_weights));
  for (int threads : {2, 7, 16}) {
    index_queries(Backend::cpu({threads, {}}), problem.args(many, many_weights));
    EXPECT_EQ(many.bytes, one.bytes) << threads;
    EXPECT_EQ(many_weights, one_weights) << threads;
  }
}

TEST(IndexQueries, NoTokensIsLegal) {
  const QueryProblem problem(RopeStyle::interleaved, DType::f32);
  std::vector<float> weights(1, kUntouched);
  Buffer out(DType::u8, 0);
  IndexQueryArgs args = problem.args(out, weights);
  for (TensorView* v : {&args.q, &args.weights, &args.rope.positions, &args.out_q, &args.out_weights})
    v->shape[0] = 0, v->data = nullptr;
  for (const Backend& backend : host_backends()) index_queries(backend, args);
  EXPECT_EQ(weights[0], kUntouched);
}

// In f32 each of 7 sums loses a rounding of values whose sum is below 128 * 4, and scaling two more; H hands a key's
// error to all 128 of its values.
TEST(Hadamard, KeysAndQueriesAgreeWithTheMatrix) {
  const KeyProblem keys(9, RopeStyle::interleaved, DType::bf16);
  const QueryProblem queries(RopeStyle::interleaved, DType::f32);
  const double root = std::sqrt(double{kIndexDim});
  for (const Backend& backend : host_backends()) {
    const bool exact = backend.kind() == BackendKind::reference;
    const Buffer cache = keys.cache(IndexFormat::f32), out(DType::f32, std::ssize(queries.q_values));
    WriteIndexKeysArgs key_args = keys.args(cache, IndexFormat::f32);
    key_args.hadamard = true;
    write_index_keys(backend, key_args);
    std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads);
    IndexQueryArgs args = queries.args(out, weights);
    args.hadamard = true;
    index_queries(backend, args);
    const auto agrees = [&](const Buffer& got, std::int64_t at, const std::vector<double>& want, double bound) {
      const float* x = reinterpret_cast<const float*>(got.bytes.data()) + at * kIndexDim;
      for (std::size_t i = 0; i < kIndexDim; ++i)
        ASSERT_NEAR(x[i], want[i], (exact ? 1e-12 : root * (bound + 9 * 4 * kU)) + kU * std::abs(want[i]))
            << backend.name() << " " << at << " " << i;
    };
    for (int t = 0; t < keys.tokens; ++t)
      agrees(cache, keys.slots[static_cast<std::size_t>(t)], hadamard(keys.answer(t)), kKeyBound);
    for (int t = 0; t < QueryProblem::kTokens; ++t)
      for (int h = 0; h < QueryProblem::kHeads; ++h)
        agrees(out, t * QueryProblem::kHeads + h, hadamard(queries.answer(t, h)), 12 * kU);
  }
}

// Keys and queries are f32 here: each of the four vectors of two dot products is off by a rounding of its length.
TEST(Hadamard, LeavesScoresAsTheyAre) {
  const KeyProblem keys(9, RopeStyle::half_split, DType::f32);
  const QueryProblem queries(RopeStyle::half_split, DType::f32);
  constexpr int kHeads = QueryProblem::kHeads, kTokens = QueryProblem::kTokens;
  const std::int64_t width = 2 * keys.tokens;
  const Backend reference = Backend::reference();
  const auto scores = [&](bool of_keys, bool of_queries) {
    const Buffer cache = keys.cache(IndexFormat::f32), q(DType::f32, std::ssize(queries.q_values));
    std::vector<float> weights(kTokens * kHeads), logits(static_cast<std::size_t>(kTokens * width));
    WriteIndexKeysArgs key_args = keys.args(cache, IndexFormat::f32);
    key_args.hadamard = of_keys;
    write_index_keys(reference, key_args);
    IndexQueryArgs query_args = queries.args(q, weights);
    query_args.hadamard = of_queries;
    index_queries(reference, query_args);
    std::vector<std::int32_t> table, lengths(kTokens, static_cast<std::int32_t>(width));
    for (std::int32_t page = 0; page < keys.pages(); ++page) table.push_back(page);
    IndexScoreArgs args;
    args.q = query_args.out_q, args.weights = query_args.out_weights;
    args.paged = {key_args.cache, tensor(table.data(), {1, keys.pages()}), {}};
    args.lengths = tensor(lengths.data(), {kTokens}), args.logits = tensor(logits.data(), {kTokens, width});
    index_scores(reference, args, PoisonedWorkspace(index_scores_workspace_bytes(reference, {kTokens, kHeads, width})));
    return logits;
  };
  const auto length = [](const std::vector<double>& x) {
    return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.));
  };
  const std::vector<float> plain = scores(false, false), turned = scores(true, true), wrong = scores(true, false);
  for (int t = 0; t < kTokens; ++t) {
    double heads = 0;
    for (int h = 0; h < kHeads; ++h)
      heads += std::abs(queries.weight_values[static_cast<std::size_t>(t * kHeads + h)]) * 0.125 *
               length(queries.answer(t, h));
    for (int j = 0; j < keys.tokens; ++j) {
      const std::size_t at = static_cast<std::size_t>(t * width + keys.slots[static_cast<std::size_t>(j)]);
      EXPECT_NEAR(turned[at], plain[at], 4 * kU * heads * length(keys.answer(j)) + 2 * kU * std::abs(plain[at]));
      EXPECT_NE(wrong[at], plain[at]);
    }
  }
}

// What the rope is for: the dot product of a rotated query and key depends on the distance of their positions alone.
TEST(IndexRope, DotProductsDependOnTheDistance) {
  const std::vector<float> table = rope_table(1e4);
  const std::vector<double> q = {Random(1).uniform(), 2, 3, 4}, k = {1, -2, Random(2).uniform(), 5};
  for (RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved}) {
    auto dot = [&](int a, int b) {
      double x[kIndexRope] = {}, y[kIndexRope] = {}, cos[2][32], sin[2][32], sum = 0;
      for (int i = 0; i < 32; ++i) {
        cos[0][i] = table[a * kIndexRope + i], sin[0][i] = table[a * kIndexRope + 32 + i];
        cos[1][i] = table[b * kIndexRope + i], sin[1][i] = table[b * kIndexRope + 32 + i];
      }
      for (std::size_t i = 0; i < 4; ++i)
        x[i * 16] = q[i], y[i * 16] = k[i], x[i * 16 + 1] = k[i], y[i * 16 + 1] = q[i];
      stage::indexer::rotate(style, 32, cos[0], sin[0], x);
      stage::indexer::rotate(style, 32, cos[1], sin[1], y);
      for (int i = 0; i < kIndexRope; ++i) sum += x[i] * y[i];
      return sum;
    };
    EXPECT_NEAR(dot(30, 25), dot(9, 4), 1e-4) << name_of(style);  // the table is f32: angles to 40 are off by 1e-6
    EXPECT_GT(std::abs(dot(30, 25) - dot(9, 5)), 1e-2) << name_of(style);
  }
}

// d = 4, theta 1e4, position 1.
TEST(Case20, RopeBothWays) {
  const double expected[2][4] = {{-1.984111, 1.959901, 2.462378, 4.019800}, {-1.142640, 1.922076, 2.959851, 4.029799}};
  const RopeStyle styles[2] = {RopeStyle::half_split, RopeStyle::interleaved};
  for (int s = 0; s < 2; ++s) {
    const double cos[] = {std::cos(1.0), std::cos(0.01)}, sin[] = {std::sin(1.0), std::sin(0.01)};
    double x[] = {1, 2, 3, 4};
    stage::indexer::rotate(styles[s], 2, cos, sin, x);
    const float cos_f[] = {std::cos(1.f), std::cos(0.01f)}, sin_f[] = {std::sin(1.f), std::sin(0.01f)};
    float y[] = {1, 2, 3, 4};
    stage::indexer::rotate(styles[s], 2, cos_f, sin_f, y);
    for (int i = 0; i < 4; ++i) {
      EXPECT_NEAR(x[i], expected[s][i], 1e-6) << name_of(styles[s]) << i;
      EXPECT_NEAR(y[i], expected[s][i], 2e-6) << name_of(styles[s]) << i;
    }
  }
}

// In an indexer head of 128 the FIRST 64 turn: the last 64 keep their bits, and at position > 0 the first do not.
TEST(Case20, RopeCoversTheFirst64OfAnIndexerHead) {
  for (RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved}) {
    const QueryProblem problem(style, DType::f32);
    for (const Backend& backend : host_backends()) {
      Buffer out(DType::f32, std::ssize(problem.q_values));
      std::vector<float> weights(QueryProblem::kTokens * QueryProblem::kHeads);
      index_queries(backend, problem.args(out, weights));
      for (int at = 0; at < QueryProblem::kHeads * kIndexDim; ++at) {  // token 0, at position 5
        const bool kept = std::memcmp(out.bytes.data() + 4 * at, problem.q.bytes.data() + 4 * at, 4) == 0;
        // The slowest of theta 1e6 turns by 5 * 1e-6^(31/32) = 8e-6 rad, which an f32 near 1 sees, one near 0 may not.
        if (const int d = at % kIndexDim; d >= kIndexRope || d < 8) {
          EXPECT_EQ(kept, d >= kIndexRope) << backend.name() << " " << at;
        }
      }
    }
  }
}

}  // namespace
}  // namespace sievemla::test
