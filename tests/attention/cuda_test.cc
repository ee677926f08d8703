// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/cuda_test.cc -- stage 3 on a CUDA device, against the definition in double, within the bounds that
// hold for bf16 arithmetic: |error| <= 8e-3 |ref| + 2e-3 max(1, sum p |v|), lse 1e-3.
#include <gtest/gtest.h>

#include "sievemla/error.h"
#include "support/attention_problem.h"

namespace sievemla::test {
namespace {

class OnCuda : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  }
  static Backend backend() {
    const Backend cuda = Backend::cuda(0);
    cuda.prepare();
    return cuda;
  }
};

testing::AssertionResult near(const Problem& p, const Result& result, const Answer& want, std::int64_t t,
                              std::int64_t h) {
  const double lse = static_cast<double>(result.lse[Problem::at(t * p.heads + h)]);
  if (std::isinf(want.lse) ? lse != want.lse : !(std::abs(lse - want.lse) <= 1e-3))
    return testing::AssertionFailure() << "token " << t << ", head " << h << ": lse " << lse << ", want " << want.lse;
  const auto out = result.row(t * p.heads + h, p.latent);
  for (std::size_t d = 0; d < out.size(); ++d) {
    const double bound = want.rows == 0 ? 0 : 8e-3 * std::abs(want.out[d]) + 2e-3 * std::max(1.0, want.mass[d]);
    if (!(std::abs(static_cast<double>(out[d]) - want.out[d]) <= bound) || (want.rows == 0 && std::signbit(out[d])))
      return testing::AssertionFailure() << "token " << t << ", head " << h << ", column " << d << ": " << out[d]
                                         << ", want " << want.out[d] << ", bound " << bound;
  }
  return testing::AssertionSuccess();
}

void expect_solved(const Problem& p, const Backend& backend) {
  Problem::Cache cache(p);
  for (std::int64_t t = 0; t < p.tokens; ++t)
    for (std::int64_t s : p.live(t)) cache.fill(p, s);
  const Result result = p.run(backend, cache);
  const std::int64_t cells = p.tokens * p.heads, step = cells / 40 + 1;
  for (std::int64_t i = 0; i < cells; i += step)
    EXPECT_TRUE(
        near(p, result, answer(p, cache, p.live(i / p.heads), i / p.heads, i % p.heads), i / p.heads, i % p.heads));
}

constexpr struct {
  KvFormat format;
  int rope;
} kRows[] = {{KvFormat::bf16, 64}, {KvFormat::bf16, 0}, {KvFormat::fp8_ds_mla, 64}, {KvFormat::fp8_nope, 0}};

TEST_F(OnCuda, Case06Heads) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (std::int64_t heads : {1, 2, 5, 8, 12, 16, 20, 32, 64, 96, 127, 128}) {
      SCOPED_TRACE(heads);
      Problem p{.tokens = 2, .heads = heads, .format = format, .rope = rope};
      p.random_list(64, 64);
      expect_solved(p, cuda);
    }
}

TEST_F(OnCuda, Case07AnyTopkWidth) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (std::int64_t k : {1, 2, 63, 64, 65, 100, 127, 512, 1152, 2048, 2051, 2176}) {
      SCOPED_TRACE(k);
      Problem p{.tokens = 2, .heads = k % 2 ? 16 : 64, .format = format, .rope = rope, .pages = 40};
      p.random_list(k, k);
      expect_solved(p, cuda);
    }
}

TEST_F(OnCuda, HolesAndLengths) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows) {
    Problem p{.tokens = 4, .heads = 20, .format = format, .rope = rope, .pages = 8, .sinks = true};
    p.random_list(300, 90);
    p.indices[7] = p.slots(), p.indices[8] = INT32_MAX, p.indices[9] = INT32_MIN;
    p.topk_length = {300, 0, -3, 170};
    expect_solved(p, cuda);
    p.wide = true;
    expect_solved(p, cuda);
  }
}

TEST_F(OnCuda, StridedCacheAndQuery) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (std::int64_t page_size : {16, 48, 64, 176}) {
      const std::int64_t unit = info(format).storage == DType::u8 ? 16 : 8;
      Problem p{.tokens = 3,
                .heads = 16,
                .format = format,
                .rope = rope,
                .pages = 12,
                .page_size = page_size,
                .row_padding = unit,
                .page_padding = 5 * unit,
                .out_dtype = DType::bf16,
                .split_q = rope > 0};
      p.random_list(150, 120);
      expect_solved(p, cuda);
    }
}

TEST_F(OnCuda, DenseRagged) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (std::int64_t q_len : {1, 2, 8}) {
      Problem p{.tokens = 5 * q_len, .heads = 16, .format = format, .rope = rope, .pages = 64, .page_size = 16};
      p.table_width = 20, p.table_stride = 23;
      p.lengths = {1, 0, 333, 120, 16};
      Random random(3);
      for (std::int64_t i = 0; i < 5 * p.table_stride; ++i)
        p.table.push_back(static_cast<std::int32_t>(random.distinct(1, 64)[0]));
      p.table[4] = -1, p.table[2 * 23 + 3] = 1000;
      expect_solved(p, cuda);
    }
}

TEST_F(OnCuda, BatchInvariant) {
  const Backend cuda = backend();
  Problem many{.tokens = 9, .heads = 64, .format = KvFormat::fp8_ds_mla, .pages = 40};
  many.random_list(2048, 2000);
  const auto invariant = [](AttentionArgs& args) { args.batch_invariant = true; };
  const Result all = many.run(cuda, invariant);
  Problem one = many;
  one.tokens = 1, one.indices.resize(2048);
  const Result alone = one.run(cuda, invariant);
  for (std::int64_t h = 0; h < 64; ++h) EXPECT_TRUE(same_bits(alone.row(h, 512), all.row(h, 512)));
}

TEST_F(OnCuda, NothingToDo) {
  const Backend cuda = backend();
  Problem p{.tokens = 3, .heads = 8};
  p.list({{}, {}, {}});
  expect_solved(p, cuda);
}

TEST_F(OnCuda, RefusesWhatItCannotDo) {
  const Backend cuda = backend();
  Problem p{.q_dtype = DType::f32};
  p.random_list(16, 16);
  EXPECT_THROW(p.run(cuda), Unsupported);
}

}  // namespace
}  // namespace sievemla::test
