// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/cuda_test.cc -- stage 1 on a CUDA device: scores against the definition in double, keys and queries
// against the reference's bytes.
#include "indexer/head_problem.h"
#include "sievemla/error.h"
#include "support/on_cuda.h"

namespace sievemla::test {
namespace {

using IndexerOnCuda = OnCuda;

std::vector<float> run(const Backend& cuda, IndexScoreArgs args, std::int64_t width) {
  OnDevice device(cuda.device());
  const std::int64_t rows = args.q.dim(0);
  std::vector<float> logits(static_cast<std::size_t>(rows * width), kUntouched);
  const TensorView out = tensor(logits.data(), {rows, width});
  args.q = device.put(args.q), args.weights = device.put(args.weights), args.lengths = device.put(args.lengths);
  args.paged.cache.pages = device.put(args.paged.cache.pages);
  args.paged.block_table = device.put(args.paged.block_table);
  args.paged.row_request = device.put(args.paged.row_request);
  args.contiguous.keys = device.put(args.contiguous.keys), args.contiguous.scales = device.put(args.contiguous.scales);
  args.contiguous.starts = device.put(args.contiguous.starts);
  args.logits = device.put(out);
  index_scores(cuda, args, {});
  cuda_good(cudaDeviceSynchronize());
  device.take_back(out);
  return logits;
}

// 1 - 2 <x, y> / (<x, x> + <y, y>) below 5e-6 over what is visible; -inf elsewhere.
void expect_scores(const ScoreProblem& problem, const std::vector<float>& got) {
  double xx = 0, yy = 0, xy = 0;
  for (int r = 0; r < problem.shape.rows(); ++r)
    for (int j = 0; j < problem.width; ++j) {
      const double y = static_cast<double>(got[static_cast<std::size_t>(r * problem.width + j)]);
      if (j >= problem.shape.lengths[static_cast<std::size_t>(r)]) {
        ASSERT_EQ(y, -HUGE_VAL) << "row " << r << ", column " << j;
        continue;
      }
      const double x = problem.answer(r, j, true).score;
      xx += x * x, yy += y * y, xy += x * y;
    }
  EXPECT_LT(1 - 2 * xy / (xx + yy), 5e-6);
}

TEST_F(IndexerOnCuda, PagedRows) {
  const Backend cuda = backend();
  for (int heads : {1, 8, 12, 32, 64})
    for (int page_size : {16, 48, 64, 256})
      for (int each : {1, 3, 20}) {  // rows a request: alone, folded, many
        SCOPED_TRACE(testing::Message() << heads << " heads, page " << page_size << ", " << each << " rows a request");
        ScoreShape shape{.lengths = {}, .requests = 3, .heads = heads, .page_size = page_size};
        for (int r = 0; r < 3 * each; ++r) shape.lengths.push_back(r == 1 ? 0 : (r * 97 + 211) % 400);
        const ScoreProblem problem(shape);
        const std::vector<float> got = run(cuda, problem.args(), problem.width);
        expect_scores(problem, got);
        IndexScoreArgs by_tensor = problem.args();
        by_tensor.paged.row_request = tensor(problem.row_request.data(), {shape.rows()});
        for (int repeat = 0; repeat < 5; ++repeat) EXPECT_EQ(run(cuda, by_tensor, problem.width), got) << "other bits";
      }
}

TEST_F(IndexerOnCuda, RowsScoreAlikeAloneAndAmongOthers) {
  const Backend cuda = backend();
  const ScoreProblem problem(ScoreShape{.lengths = std::vector<int>(40, 333), .requests = 1, .heads = 32});
  const std::vector<float> all = run(cuda, problem.args(), problem.width);
  IndexScoreArgs one = problem.args();
  one.q.shape[0] = one.weights.shape[0] = one.lengths.shape[0] = 1;
  const std::vector<float> alone = run(cuda, one, problem.width);
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin()));
}

TEST_F(IndexerOnCuda, ContiguousKeys) {
  const Backend cuda = backend();
  Random random(3);
  constexpr int kKeys = 700, kWidth = 410;
  Buffer keys(DType::u8, kKeys * kIndexDim);
  std::vector<double> values;
  for (int i = 0; i < kKeys * kIndexDim; ++i) values.push_back(keys.put(i, random.uniform() * 448));
  const std::vector<float> scales = random.f32s(kKeys);
  for (int rows : {2, 30}) {
    const int heads = 32;
    Buffer q(DType::u8, rows * heads * kIndexDim);
    std::vector<double> q_values;
    for (int i = 0; i < rows * heads * kIndexDim; ++i) q_values.push_back(q.put(i, random.uniform() * 448));
    const std::vector<float> weights = random.f32s(rows * heads);
    std::vector<std::int32_t> starts, lengths;
    for (int r = 0; r < rows; ++r) starts.push_back(r < rows / 2 ? 7 : 290), lengths.push_back(300 + r);
    IndexScoreArgs args;
    args.q = q.view({rows, heads, kIndexDim}), args.weights = tensor(weights.data(), {rows, heads});
    args.contiguous = {keys.view({kKeys, kIndexDim}), tensor(scales.data(), {kKeys}), tensor(starts.data(), {rows})};
    args.lengths = tensor(lengths.data(), {rows});
    args.fill = false;
    const std::vector<float> got = run(cuda, args, kWidth);
    double xx = 0, yy = 0, xy = 0;
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < kWidth; ++j) {
        const float y = got[static_cast<std::size_t>(r * kWidth + j)];
        if (j >= lengths[static_cast<std::size_t>(r)]) {
          ASSERT_EQ(y, kUntouched);
          continue;
        }
        const int key = starts[static_cast<std::size_t>(r)] + j;
        double x = 0;
        for (int h = 0; h < heads; ++h) {
          double dot = 0;
          for (int d = 0; d < kIndexDim; ++d)
            dot += q_values[static_cast<std::size_t>((r * heads + h) * kIndexDim + d)] *
                   values[static_cast<std::size_t>(key * kIndexDim + d)];
          x += static_cast<double>(weights[static_cast<std::size_t>(r * heads + h)]) * std::max(dot, 0.0);
        }
        x *= static_cast<double>(scales[static_cast<std::size_t>(key)]);
        xx += x * x, yy += static_cast<double>(y) * static_cast<double>(y), xy += x * static_cast<double>(y);
      }
    EXPECT_LT(1 - 2 * xy / (xx + yy), 5e-6);
  }
}

TEST_F(IndexerOnCuda, PagesThatAreNotThereScoreMinusInfinity) {
  const Backend cuda = backend();
  ScoreProblem problem(ScoreShape{.lengths = {300, 290}, .requests = 2, .heads = 8});
  problem.table[1] = -1, problem.table[problem.pages_per_request + 2] = problem.pages;
  const std::vector<float> got = run(cuda, problem.args(), problem.width);
  const std::vector<float> want = problem.run(Backend::reference());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isinf(got[i]), std::isinf(want[i])) << i;
}

TEST_F(IndexerOnCuda, KeysAreTheReferencesBytes) {
  const Backend cuda = backend();
  for (RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none})
    for (DType dtype : {DType::f32, DType::bf16})
      for (IndexFormat format : {IndexFormat::fp8, IndexFormat::bf16})
        for (ScaleRule rule : {ScaleRule::power_of_two, ScaleRule::arbitrary}) {
          KeyProblem problem(37, style, dtype);
          problem.slots[5] = -1;
          const Buffer want = problem.cache(format);
          Buffer got = problem.cache(format);
          WriteIndexKeysArgs args = problem.args(want, format);
          args.scale = rule;
          write_index_keys(Backend::reference(), args);
          OnDevice device(cuda.device());
          const TensorView pages = problem.args(got, format).cache.pages;
          args.k = device.put(args.k), args.norm_weight = device.put(args.norm_weight);
          args.norm_bias = device.put(args.norm_bias), args.slots = device.put(args.slots);
          args.rope.positions = device.put(args.rope.positions), args.rope.cos_sin = device.put(args.rope.cos_sin);
          args.cache.pages = device.put(pages);
          write_index_keys(cuda, args);
          cuda_good(cudaDeviceSynchronize());
          device.take_back(pages);
          EXPECT_EQ(got.bytes, want.bytes) << name_of(style) << " " << name_of(dtype) << " " << name_of(format);
        }
}

TEST_F(IndexerOnCuda, QueriesAreTheReferencesBytes) {
  const Backend cuda = backend();
  for (RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none})
    for (DType dtype : {DType::f32, DType::bf16})
      for (DType out_dtype : {DType::u8, DType::bf16}) {
        const QueryProblem problem(style, dtype);
        constexpr std::int64_t kHeads = QueryProblem::kTokens * QueryProblem::kHeads;
        Buffer want(out_dtype, kHeads * kIndexDim), got(out_dtype, kHeads * kIndexDim);
        std::vector<float> want_weights(kHeads), got_weights(kHeads);
        index_queries(Backend::reference(), problem.args(want, want_weights));
        OnDevice device(cuda.device());
        IndexQueryArgs args = problem.args(got, got_weights);
        const TensorView out = args.out_q, weights = args.out_weights;
        args.q = device.put(args.q), args.weights = device.put(args.weights);
        args.rope.positions = device.put(args.rope.positions), args.rope.cos_sin = device.put(args.rope.cos_sin);
        args.out_q = device.put(out), args.out_weights = device.put(weights);
        index_queries(cuda, args);
        cuda_good(cudaDeviceSynchronize());
        device.take_back(out), device.take_back(weights);
        EXPECT_EQ(got.bytes, want.bytes) << name_of(style) << " " << name_of(dtype) << " " << name_of(out_dtype);
        EXPECT_EQ(got_weights, want_weights);
      }
}

TEST_F(IndexerOnCuda, RefusesWhatItCannotDo) {
  const Backend cuda = backend();
  const ScoreProblem problem(ScoreShape{.lengths = {20}, .format = IndexFormat::bf16, .q_dtype = DType::bf16});
  EXPECT_THROW(run(cuda, problem.args(), problem.width), Unsupported);
}

}  // namespace
}  // namespace sievemla::test
