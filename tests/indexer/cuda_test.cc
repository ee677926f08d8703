// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/cuda_test.cc -- stage 1 on a CUDA device: scores against the definition in double, keys and queries
// against the reference's bytes.
#include "indexer/write_layer.h"
#include "sievemla/error.h"
#include "support/on_cuda.h"

namespace sievemla::test {
namespace {

using IndexerOnCuda = OnCuda;

// [rows, width]. Between rows lie three columns that must not change.
std::vector<float> run(const Backend& cuda, IndexScoreArgs args, std::int64_t width) {
  OnDevice device(cuda.device());
  const std::int64_t rows = args.q.dim(0), stride = width + 3;
  std::vector<float> logits(static_cast<std::size_t>(rows * stride), kUntouched), out;
  args.logits = tensor(logits.data(), {rows, width});
  args.logits.stride[0] = stride;
  index_scores(cuda, device.put(args), {});
  device.take_back(args.logits);
  for (std::int64_t i = 0; i < (rows - 1) * stride + width; ++i) {
    const float x = logits[static_cast<std::size_t>(i)];
    if (i % stride < width) out.push_back(x);
    else EXPECT_EQ(x, kUntouched) << "a column past the view";
  }
  return out;
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
        for (int repeat = 0; repeat < (page_size == 64 ? 20 : 1); ++repeat)
          EXPECT_EQ(run(cuda, by_tensor, problem.width), got) << "other bits";
      }
}

// Few rows and many are scored by different kernels.
TEST_F(IndexerOnCuda, RowsScoreAlikeAloneAndAmongOthers) {
  const Backend cuda = backend();
  for (int heads : {12, 32, 64}) {
    const ScoreProblem problem(ScoreShape{.lengths = std::vector<int>(100, 333), .requests = 1, .heads = heads});
    const std::vector<float> all = run(cuda, problem.args(), problem.width);
    for (int repeat = 0; repeat < 20; ++repeat) EXPECT_EQ(run(cuda, problem.args(), problem.width), all) << repeat;
    for (std::int64_t rows : {1, 7, 8, 9, 37}) {
      IndexScoreArgs some = problem.args();
      some.q.shape[0] = some.weights.shape[0] = some.lengths.shape[0] = rows;
      const std::vector<float> alone = run(cuda, some, problem.width);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin())) << heads << " heads, " << rows << " rows";
    }
  }
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

// One kernel, with the bytes of the two writers and of the reference.
TEST_F(IndexerOnCuda, WriteLayerIsTheSeparateSteps) {
  const Backend cuda = backend();
  for_each_write_layer([&]<class T>(const WriteLayer<T>& problem, ScaleRule rule) {
    const Buffer want = problem.kv_cache(), apart = want, got = want, keys_want = problem.keys.cache(IndexFormat::fp8),
                 keys_apart = keys_want, keys_got = keys_want;
    std::vector<std::int32_t> indices = problem.indices(), indices_got = indices;
    OnDevice device(cuda.device());
    const auto take_back = [&](const Buffer& buffer) { device.take_back(buffer.view({1})); };
    write_layer(Backend::reference(), problem.args(want, keys_want, rule, indices));
    write_layer(cuda, device.put(problem.args(got, keys_got, rule, indices_got)));
    write_latent(cuda, device.put(problem.separate(apart, rule)));
    write_index_keys(cuda, device.put(problem.key_args(keys_apart, rule)));
    for (const Buffer* buffer : {&apart, &got, &keys_apart, &keys_got}) take_back(*buffer);
    device.take_back(tensor(indices_got.data(), {1}));
    EXPECT_EQ(got.bytes, want.bytes);
    EXPECT_EQ(apart.bytes, want.bytes);
    EXPECT_EQ(keys_got.bytes, keys_want.bytes);
    EXPECT_EQ(keys_apart.bytes, keys_want.bytes);
    EXPECT_EQ(indices_got, indices);
  });
}

TEST_F(IndexerOnCuda, AnyNumberOfHeads) {
  const Backend cuda = backend();
  for (int heads = 1; heads <= 64; ++heads) {
    SCOPED_TRACE(heads);
    const ScoreProblem problem(ScoreShape{.lengths = {150, 77, 3}, .requests = 3, .heads = heads});
    expect_scores(problem, run(cuda, problem.args(), problem.width));
  }
}

TEST_F(IndexerOnCuda, Case14LogitsOfTheGoldenIndexerPage) {
  const Backend cuda = backend();
  const GoldenPage golden;
  const std::vector<float> logits = run(cuda, golden.args(), 64);
  for (int j = 0; j < 64; ++j) EXPECT_EQ(logits[static_cast<std::size_t>(j)], 128.f * static_cast<float>(j + 1));
}

// Keys past 2^31 and 2^32 bytes: written, read back, scored. The rest of the cache is zeros, and stays so.
TEST_F(IndexerOnCuda, Case15KeysBeyond32Bits) {
  const Backend cuda = backend();
  constexpr std::int64_t kPages = 520'000, kPageBytes = 64 * kIndexKeyBytes;
  std::size_t free = 0, total = 0;
  cuda_good(cudaMemGetInfo(&free, &total));
  if (free < kPages * kPageBytes) GTEST_SKIP() << "too little memory";
  const cuda::Memory memory = cuda::Memory::on(cuda.device(), kPages * kPageBytes);
  auto* const bytes = static_cast<std::uint8_t*>(memory.data());
  cuda_good(cudaMemset(bytes, 0, static_cast<std::size_t>(memory.bytes())));
  IndexCache cache;
  cache.pages = tensor(bytes, {kPages, 64, kIndexKeyBytes}, cuda.device());

  const std::int64_t slots[] = {16'268'816, 32'537'700};
  const std::vector<float> k = Random(3).f32s(2 * kIndexDim), ones(kIndexDim, 1.f), zeros(kIndexDim, 0.f);
  OnDevice device(cuda.device());
  WriteIndexKeysArgs write;
  write.k = tensor(k.data(), {2, kIndexDim});
  write.norm_weight = tensor(ones.data(), {kIndexDim}), write.norm_bias = tensor(zeros.data(), {kIndexDim});
  write.rope.style = RopeStyle::none;
  write.slots = tensor(slots, {2});
  write.cache = cache;
  write_index_keys(cuda, device.put(write));

  Buffer q(DType::u8, kIndexDim);
  std::vector<double> q_values;
  for (int d = 0; d < kIndexDim; ++d) q_values.push_back(q.put(d, 448 * Random(4 + d).uniform()));
  const float weights[] = {1, 1};
  const std::int32_t table[] = {static_cast<std::int32_t>(slots[0] / 64), static_cast<std::int32_t>(slots[1] / 64)};
  const std::int32_t lengths[] = {64, 64};
  IndexScoreArgs args;
  args.q = q.view({2, 1, kIndexDim});
  args.q.stride[0] = 0;  // both rows ask the same
  args.weights = tensor(weights, {2, 1});
  args.paged.cache = cache;
  args.paged.block_table = tensor(table, {2, 1});
  args.lengths = tensor(lengths, {2});
  const std::vector<float> logits = run(cuda, args, 64);

  std::vector<std::uint8_t> keys(2 * kIndexDim);
  std::vector<float> scales(2);
  const TensorView slot_view = tensor(slots, {2}), key_view = tensor(keys.data(), {2, kIndexDim}),
                   scale_view = tensor(scales.data(), {2});
  gather_index_keys(cuda, {cache, device.put(slot_view), device.put(key_view), device.put(scale_view)});
  device.take_back(key_view), device.take_back(scale_view);
  for (std::size_t t = 0; t < 2; ++t) {
    double dot = 0;
    for (std::size_t d = 0; d < kIndexDim; ++d) {
      const double x = static_cast<double>(kv::from_e4m3(keys[t * kIndexDim + d]));
      dot += q_values[d] * x;
    }
    ASSERT_NE(dot, 0);
    const double want = static_cast<double>(scales[t]) * std::max(dot, 0.0);
    for (std::int64_t i = 0; i < 64; ++i)
      EXPECT_NEAR(static_cast<double>(logits[t * 64 + static_cast<std::size_t>(i)]), i == slots[t] % 64 ? want : 0,
                  1e-3 * std::abs(dot * static_cast<double>(scales[t])));
    const std::int64_t page = slots[t] / 64 * kPageBytes;
    for (const std::int64_t wrapped : {page & 0x7FFFFFFF, page & 0xFFFFFFFF}) {
      if (wrapped == page) continue;
      std::vector<std::uint8_t> there(kPageBytes, 1);
      cuda_copy(there.data(), bytes + wrapped, kPageBytes);
      EXPECT_EQ(there, std::vector<std::uint8_t>(kPageBytes, 0));
    }
  }
}

TEST_F(IndexerOnCuda, Case19BadLengthsScoreNothing) {
  const Backend cuda = backend();
  for (const std::vector<int>& lengths :
       {std::vector<int>{10, -1, 0, 3}, std::vector<int>{9, 10, -2, -1, -1, 0, 2, 3}}) {  // the second: next_n = 2
    const ScoreProblem problem({.lengths = lengths, .requests = 4, .heads = 2});
    expect_scores(problem, run(cuda, problem.args(), problem.width));
  }
}

// A key whose scale is NaN scores NaN, and no other does.
TEST_F(IndexerOnCuda, NanStaysPut) {
  const Backend cuda = backend();
  for (int each : {1, 20}) {
    ScoreProblem problem(ScoreShape{.lengths = std::vector<int>(static_cast<std::size_t>(each), 200), .heads = 16});
    const std::int64_t slot = problem.slot(0, 70);
    const kv::IndexKeyAddress at = kv::index_key_address(problem.args().paged.cache, slot);
    std::memcpy(at.scale, &kNan, sizeof kNan);
    const std::vector<float> got = run(cuda, problem.args(), problem.width);
    for (int r = 0; r < each; ++r)
      for (int j = 0; j < 200; ++j)
        ASSERT_EQ(std::isnan(got[static_cast<std::size_t>(r * problem.width + j)]), j == 70) << r << ", " << j;
  }
}

TEST_F(IndexerOnCuda, KeysAreTheReferencesBytes) {
  const Backend cuda = backend();
  for (RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none})
    for (DType dtype : {DType::f32, DType::bf16})
      for (IndexFormat format : {IndexFormat::fp8, IndexFormat::bf16})
        for (ScaleRule rule : {ScaleRule::power_of_two, ScaleRule::arbitrary})
          for (bool hadamard : {false, true}) {
            KeyProblem problem(37, style, dtype);
            problem.slots[5] = -1;
            const Buffer want = problem.cache(format);
            Buffer got = problem.cache(format);
            WriteIndexKeysArgs args = problem.args(want, format);
            args.scale = rule, args.hadamard = hadamard;
            write_index_keys(Backend::reference(), args);
            OnDevice device(cuda.device());
            const TensorView pages = problem.args(got, format).cache.pages;
            args.cache.pages = pages;
            write_index_keys(cuda, device.put(args));
            cuda_good(cudaDeviceSynchronize());
            device.take_back(pages);
            EXPECT_EQ(got.bytes, want.bytes) << name_of(style) << " " << name_of(dtype) << " " << name_of(format);
          }
}

TEST_F(IndexerOnCuda, QueriesAreTheReferencesBytes) {
  const Backend cuda = backend();
  for (RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none})
    for (DType dtype : {DType::f32, DType::bf16})
      for (DType out_dtype : {DType::u8, DType::bf16})
        for (bool hadamard : {false, true}) {
          const QueryProblem problem(style, dtype);
          constexpr std::int64_t kHeads = QueryProblem::kTokens * QueryProblem::kHeads;
          Buffer want(out_dtype, kHeads * kIndexDim), got(out_dtype, kHeads * kIndexDim);
          std::vector<float> want_weights(kHeads), got_weights(kHeads);
          IndexQueryArgs args = problem.args(want, want_weights);
          args.hadamard = hadamard;
          index_queries(Backend::reference(), args);
          OnDevice device(cuda.device());
          args = problem.args(got, got_weights), args.hadamard = hadamard;
          const TensorView out = args.out_q, weights = args.out_weights;
          index_queries(cuda, device.put(args));
          cuda_good(cudaDeviceSynchronize());
          device.take_back(out), device.take_back(weights);
          EXPECT_EQ(got.bytes, want.bytes) << name_of(style) << " " << name_of(dtype) << " " << name_of(out_dtype);
          EXPECT_EQ(got_weights, want_weights);
        }
}

TEST_F(IndexerOnCuda, KeysBesideQueriesAreTheirBytes) {
  const Backend cuda = backend();
  for (const int tokens : {1, 37}) {
    const KeyProblem keys(tokens, RopeStyle::interleaved, DType::bf16);
    const QueryProblem problem(RopeStyle::half_split, DType::bf16);
    constexpr std::int64_t kHeads = QueryProblem::kTokens * QueryProblem::kHeads;
    Buffer want = keys.cache(IndexFormat::fp8), got = want;
    Buffer want_q(DType::u8, kHeads * kIndexDim), got_q = want_q;
    std::vector<float> want_weights(kHeads), got_weights(kHeads);
    IndexQueryArgs args = problem.args(want_q, want_weights);
    args.keys = keys.args(want, IndexFormat::fp8);
    index_queries(Backend::reference(), args);
    args = problem.args(got_q, got_weights);
    args.keys = keys.args(got, IndexFormat::fp8);
    OnDevice device(cuda.device());
    const TensorView out = args.out_q, weights = args.out_weights, pages = args.keys.cache.pages;
    index_queries(cuda, device.put(args));
    cuda_good(cudaDeviceSynchronize());
    device.take_back(out), device.take_back(weights), device.take_back(pages);
    EXPECT_EQ(got.bytes, want.bytes);
    EXPECT_EQ(got_q.bytes, want_q.bytes);
    EXPECT_EQ(got_weights, want_weights);
  }
}

TEST_F(IndexerOnCuda, RefusesWhatItCannotDo) {
  const Backend cuda = backend();
  const ScoreProblem problem(ScoreShape{.lengths = {20}, .format = IndexFormat::bf16, .q_dtype = DType::bf16});
  EXPECT_THROW(run(cuda, problem.args(), problem.width), Unsupported);
  const ScoreProblem pages(ScoreShape{.lengths = {20}, .page_size = 10});
  try {
    run(cuda, pages.args(), pages.width);
    FAIL() << "pages of 10";
  } catch (const InvalidArgument& error) {  // names the size, and what sets it
    EXPECT_NE(std::string(error.what()).find("--block-size"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("pages of 10"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace sievemla::test
