// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/scores_test.cc -- index_scores on the host backends against the formula, and what it must not touch.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "indexer/problem.h"
#include "support/backward_pool.h"
#include "support/lazy_memory.h"
#include "support/property.h"

namespace sievemla::test {
namespace {

// The bits, so that NaN and -0 count.
std::vector<std::uint32_t> bits(const std::vector<float>& x) {
  std::vector<std::uint32_t> out(x.size());
  std::memcpy(out.data(), x.data(), x.size() * sizeof(float));
  return out;
}

double calc_diff(const std::vector<float>& a, const std::vector<float>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isinf(a[i])) continue;
    const double x = a[i], y = b[i];
    ab += x * y, aa += x * x, bb += y * y;
  }
  return 1 - 2 * ab / (aa + bb);
}

struct Formats {
  IndexFormat keys;
  DType q;
};
constexpr Formats kFormats[] = {
    {IndexFormat::fp8, DType::u8},   {IndexFormat::fp8, DType::f32},   {IndexFormat::fp8, DType::bf16},
    {IndexFormat::bf16, DType::f32}, {IndexFormat::bf16, DType::bf16}, {IndexFormat::f32, DType::f32},
    {IndexFormat::f32, DType::bf16},
};

TEST(IndexScores, AgreeWithTheFormulaInEveryFormatAndPageSize) {
  for (const Formats& f : kFormats) {
    for (int page_size : {1, 16, 48, 64, 176}) {
      const ScoreProblem problem({.lengths = {1, 63, 64, 65, 200, 300},
                                  .requests = 3,
                                  .heads = 3,
                                  .page_size = page_size,
                                  .format = f.keys,
                                  .q_dtype = f.q});
      const std::vector<float> reference = problem.run(Backend::reference()), cpu = problem.run(Backend::cpu());
      const std::string where =
          std::string(name_of(f.keys)) + " keys, " + name_of(f.q) + " q, page size " + std::to_string(page_size);
      EXPECT_TRUE(problem.agrees(reference, false)) << "reference, " << where;
      EXPECT_TRUE(problem.agrees(cpu, true)) << "cpu, " << where;
      EXPECT_LT(calc_diff(cpu, reference), 5e-6) << where;
    }
  }
}

TEST(IndexScores, AnyNumberOfHeads) {
  for (int heads = 1; heads <= 64; ++heads) {
    const ScoreProblem problem({.lengths = {70}, .heads = heads});
    EXPECT_TRUE(problem.agrees(problem.run(Backend::reference()), false)) << heads;
    EXPECT_TRUE(problem.agrees(problem.run(Backend::cpu()), true)) << heads;
  }
}

// Longer than what a kernel of the cpu backend gets at a time (512 columns), so that every row spans several.
TEST(IndexScores, BitsDoNotDependOnThreadsOrTheHostsPool) {
  const ScoreProblem problem({.lengths = {700, 701, 13, 0, 512, 513, 700, 1, 699}, .heads = 5});
  const std::vector<std::uint32_t> one = bits(problem.run(Backend::cpu({1, {}})));
  for (int threads : {2, 7, 16}) EXPECT_EQ(bits(problem.run(Backend::cpu({threads, {}}))), one) << threads;

  BackwardPool pool;
  EXPECT_EQ(bits(problem.run(pool.backend())), one);
  EXPECT_GT(pool.bodies, 1);
}

// Each row alone, and with everything past its own keys poisoned, gives the bits that it gives in the batch.
TEST(IndexScores, ARowIsAFunctionOfThatRowAlone) {
  ScoreProblem problem({.lengths = {90, 300, 301, 302, 17, 260}, .heads = 4, .page_size = 16});
  for (const Backend& backend : host_backends()) {
    const std::vector<std::uint32_t> batch = bits(problem.run(backend));
    for (int t = 0; t < problem.shape.rows(); ++t) {
      ScoreProblem alone = problem;
      IndexScoreArgs args = alone.args();
      for (int j = problem.shape.lengths[t]; j < problem.width; ++j) {
        const kv::IndexKeyAddress at = kv::index_key_address(args.paged.cache, problem.slot(0, j));
        std::memset(at.key, 0xFF, kIndexDim);
        std::memset(at.scale, 0xFF, 4);
      }
      for (TensorView* v : {&args.q, &args.weights, &args.lengths}) {
        v->data = static_cast<std::byte*>(v->data) + t * v->step(0) * size_of(v->dtype);
        v->shape[0] = 1;
      }
      const std::vector<std::uint32_t> row = bits(alone.run(backend, args));
      EXPECT_TRUE(std::equal(row.begin(), row.end(), batch.begin() + std::int64_t{t} * problem.width))
          << backend.name() << " row " << t;
    }
  }
}

// Keys past the length may lie in memory that does not exist.
TEST(IndexScores, KeysPastTheLengthAreNotTouched) {
  const std::int64_t page = sysconf(_SC_PAGESIZE), keys = page / 512;  // f32 keys of 512 bytes
  auto* memory = static_cast<std::byte*>(
      mmap(nullptr, static_cast<std::size_t>(2 * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(memory), MAP_FAILED);
  ASSERT_EQ(mprotect(memory + page, static_cast<std::size_t>(page), PROT_NONE), 0);
  const std::vector<float> q(128, 1.f), weights(1, 1.f);
  const std::int32_t length = static_cast<std::int32_t>(keys);
  for (bool paged : {false, true}) {
    const std::int32_t table[] = {0, 1};
    IndexScoreArgs args;
    args.q = tensor(q.data(), {1, 1, kIndexDim});
    args.weights = tensor(weights.data(), {1, 1});
    if (paged) {
      args.paged.cache = {IndexFormat::f32, tensor(reinterpret_cast<float*>(memory), {1, 2 * keys, kIndexDim})};
      args.paged.block_table = tensor(table, {1, 2});
    } else {
      args.contiguous.keys = tensor(reinterpret_cast<float*>(memory), {2 * keys, kIndexDim});
    }
    args.lengths = tensor(&length, {1});
    for (const Backend& backend : host_backends()) {
      std::vector<float> logits(static_cast<std::size_t>(2 * keys), kNan);
      args.logits = tensor(logits.data(), {1, 2 * keys});
      index_scores(backend, args, PoisonedWorkspace(index_scores_workspace_bytes(backend, {1, 1, 2 * keys})));
      for (std::int64_t j = 0; j < 2 * keys; ++j)
        EXPECT_EQ(logits[static_cast<std::size_t>(j)], j < keys ? 0.f : -kInf) << backend.name() << " key " << j;
    }
  }
  munmap(memory, static_cast<std::size_t>(2 * page));
}

TEST(IndexScores, WithoutFillTheRestOfTheRowStays) {
  const ScoreProblem problem({.lengths = {10, -3, 300, 65}, .heads = 2});
  IndexScoreArgs args = problem.args();
  for (const Backend& backend : host_backends()) {
    args.fill = true;
    const std::vector<float> filled = problem.run(backend, args);
    args.fill = false;
    const std::vector<float> left = problem.run(backend, args);
    for (std::size_t i = 0; i < left.size(); ++i) {
      const bool seen = static_cast<int>(i) % problem.width < problem.shape.lengths[i / problem.width];
      EXPECT_EQ(left[i], seen ? filled[i] : kUntouched) << backend.name() << " element " << i;
      EXPECT_EQ(filled[i] == -kInf, !seen) << backend.name() << " element " << i;
    }
  }
}

TEST(IndexScores, RowsAreDealtToRequestsEvenlyOrByTheTensor) {
  ScoreProblem problem({.lengths = {40, 41, 70, 71, 9, 10}, .requests = 3, .heads = 3, .page_size = 16});
  IndexScoreArgs args = problem.args();
  for (const Backend& backend : host_backends()) {
    const bool f32 = backend.kind() == BackendKind::cpu;
    EXPECT_TRUE(problem.agrees(problem.run(backend, args), f32)) << "evenly, " << backend.name();
    // Request 2 has keys for 10 positions, request 0 for 41, request 1 for 71.
    ScoreProblem mixed = problem;
    mixed.row_request = {1, 0, 1, 1, 2, 0};
    mixed.shape.lengths = {71, 40, 3, 64, 10, 41};
    IndexScoreArgs by_tensor = mixed.args();
    by_tensor.paged.row_request = tensor(mixed.row_request.data(), {6});
    EXPECT_TRUE(mixed.agrees(mixed.run(backend, by_tensor), f32)) << "by tensor, " << backend.name();
  }
}

// A padded row has length <= 0; its request, query and start may be anything.
TEST(IndexScores, PaddedRowsReadNothing) {
  ScoreProblem problem({.lengths = {20, 0, 30, -7}, .requests = 2, .heads = 2});
  for (int t : {1, 3}) {
    problem.row_request[t] = 99;
    for (int i = 0; i < 2 * kIndexDim; ++i) problem.q.bytes[t * 2 * kIndexDim + i] = std::byte{0x7F};
    problem.weights[2 * t] = kNan;
  }
  IndexScoreArgs args = problem.args();
  args.paged.row_request = tensor(problem.row_request.data(), {4});
  for (const Backend& backend : host_backends())
    EXPECT_TRUE(problem.agrees(problem.run(backend, args), backend.kind() == BackendKind::cpu)) << backend.name();
}

TEST(IndexScores, KeysWhosePageLiesNowhereScoreMinusInfinity) {
  const ScoreProblem problem({.lengths = {160}, .heads = 2, .page_size = 16});
  for (std::int32_t nowhere :
       {-1, problem.pages, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    ScoreProblem holed = problem;
    holed.table[3] = nowhere;
    IndexScoreArgs args = holed.args();
    args.paged.block_table.shape[1] = 9;  // ten pages are asked for: the last lies outside the table
    for (const Backend& backend : host_backends()) {
      const std::vector<float> whole = problem.run(backend), got = holed.run(backend, args);
      for (int j = 0; j < 160; ++j)
        EXPECT_EQ(got[j], j / 16 == 3 || j / 16 == 9 ? -kInf : whole[j]) << backend.name() << " key " << j;
    }
  }
}

TEST(IndexScores, TheBlockTableMayBeANarrowViewOfAWideOne) {
  const ScoreProblem problem({.lengths = {100, 90, 80, 70}, .requests = 4, .heads = 2, .page_size = 16});
  std::vector<std::int32_t> wide(4 * 37, 1 << 30);
  for (int r = 0; r < 4; ++r)
    std::copy_n(problem.table.begin() + r * problem.pages_per_request, problem.pages_per_request,
                wide.begin() + r * 37);
  IndexScoreArgs args = problem.args();
  args.paged.block_table.data = wide.data();
  args.paged.block_table.stride[0] = 37;
  for (const Backend& backend : host_backends()) EXPECT_EQ(problem.run(backend, args), problem.run(backend));
}

// Pages of other layers may lie between: the page stride is free, and so is the key stride of unquantised caches.
TEST(IndexScores, StridesOfTheCacheAreFree) {
  for (IndexFormat format : {IndexFormat::fp8, IndexFormat::bf16, IndexFormat::f32}) {
    const ScoreProblem problem({.lengths = {100},
                                .heads = 2,
                                .page_size = 16,
                                .format = format,
                                .q_dtype = format == IndexFormat::fp8 ? DType::u8 : DType::f32});
    const IndexScoreArgs tight = problem.args();
    IndexScoreArgs loose = tight;
    const DType dtype = tight.paged.cache.pages.dtype;
    const std::int64_t row = tight.paged.cache.pages.dim(2), step = format == IndexFormat::fp8 ? row : row + 24,
                       page = 16 * step + 44;
    Buffer spread(dtype, problem.pages * page);
    loose.paged.cache.pages.data = spread.bytes.data();
    loose.paged.cache.pages.stride = {page, step, 1};
    for (std::int64_t p = 0; p < problem.pages; ++p)
      for (std::int64_t i = 0; i < 16; ++i)
        std::memcpy(spread.bytes.data() + (p * page + i * step) * size_of(dtype),
                    problem.cache.bytes.data() + (p * 16 + i) * row * size_of(dtype),
                    static_cast<std::size_t>(row * size_of(dtype)));
    for (const Backend& backend : host_backends())
      EXPECT_EQ(problem.run(backend, loose), problem.run(backend, tight)) << backend.name() << name_of(format);
  }
}

TEST(IndexScores, StridesOfTheQueryAreFree) {
  const ScoreProblem problem({.lengths = {30, 40}, .heads = 3, .q_dtype = DType::f32});
  Buffer transposed(DType::f32, 2 * 3 * kIndexDim);  // [heads, rows, 128]
  for (int t = 0; t < 2; ++t)
    for (int h = 0; h < 3; ++h)
      for (int d = 0; d < kIndexDim; ++d)
        transposed.put((h * 2 + t) * kIndexDim + d, problem.q_values[(t * 3 + h) * kIndexDim + d]);
  IndexScoreArgs args = problem.args();
  args.q.data = transposed.bytes.data();
  args.q.stride = {kIndexDim, 2 * kIndexDim, 1};
  for (const Backend& backend : host_backends()) EXPECT_EQ(problem.run(backend, args), problem.run(backend));
}

// Keys side by side, each row with a start of its own; keys no row sees are poison.
TEST(IndexScores, ContiguousKeysWithStarts) {
  for (IndexFormat format : {IndexFormat::fp8, IndexFormat::bf16, IndexFormat::f32}) {
    ScoreProblem problem({.lengths = {100, 257, 90, 0, 1},
                          .heads = 3,
                          .format = format,
                          .q_dtype = format == IndexFormat::fp8 ? DType::u8 : DType::f32});
    constexpr int kKeys = 400, kBefore = 50;  // position p of the problem lies at kBefore + p
    const std::vector<std::int32_t> starts = {kBefore, kBefore, kBefore + 7, -5, kBefore + 256};
    Buffer keys(storage(format), kKeys * kIndexDim);
    std::vector<float> scales(kKeys, kNan);
    for (int j = 0; j < 257; ++j) {
      const Key& key = problem.keys[0][j];
      for (int d = 0; d < kIndexDim; ++d) keys.put((kBefore + j) * kIndexDim + d, key.value[d]);
      scales[kBefore + j] = key.scale;
    }
    IndexScoreArgs args = problem.args();
    args.paged = {};
    args.contiguous.keys = keys.view({kKeys, kIndexDim});
    if (format == IndexFormat::fp8) args.contiguous.scales = tensor(scales.data(), {kKeys});
    args.contiguous.starts = tensor(starts.data(), {5});
    for (const Backend& backend : host_backends()) {
      const std::vector<float> got = problem.run(backend, args);
      for (int t = 0; t < 5; ++t)
        for (int c = 0; c < problem.width; ++c) {
          const float x = got[t * problem.width + c];
          if (c >= problem.shape.lengths[t]) {
            EXPECT_EQ(x, -kInf) << backend.name() << " row " << t << " column " << c;
            continue;
          }
          const auto want = problem.answer(t, c + starts[t] - kBefore, backend.kind() == BackendKind::cpu);
          EXPECT_NEAR(x, want.score, want.bound) << backend.name() << " row " << t << " column " << c;
        }
    }
  }
}

// A NaN reaches the scores it belongs to, through relu and negative weights, and no other.
TEST(IndexScores, NanStaysNanAndStaysPut) {
  const ScoreProblem problem({.lengths = {80, 80}, .heads = 2});
  for (const Backend& backend : host_backends()) {
    const std::vector<float> clean = problem.run(backend);
    auto expect_nan = [&](const ScoreProblem& p, auto&& is_nan) {
      const std::vector<float> got = p.run(backend);
      for (int t = 0; t < 2; ++t)
        for (int j = 0; j < 80; ++j) {
          const float x = got[t * 80 + j];
          if (is_nan(t, j)) EXPECT_TRUE(std::isnan(x)) << backend.name() << " row " << t << " key " << j << ": " << x;
          else EXPECT_EQ(x, clean[t * 80 + j]) << backend.name() << " row " << t << " key " << j;
        }
    };
    ScoreProblem scale = problem;
    std::memset(kv::index_key_address(scale.args().paged.cache, scale.slot(0, 66)).scale, 0xFF, 4);
    expect_nan(scale, [](int, int j) { return j == 66; });
    for (int code : {0x7F, 0xFF}) {
      ScoreProblem key = problem;
      kv::index_key_address(key.args().paged.cache, key.slot(0, 5)).key[127] = static_cast<std::byte>(code);
      expect_nan(key, [](int, int j) { return j == 5; });
      ScoreProblem query = problem;
      query.q.bytes[3 * kIndexDim] = static_cast<std::byte>(code);  // row 1, head 1
      expect_nan(query, [](int t, int) { return t == 1; });
    }
  }
}

TEST(IndexScores, NothingToDoIsLegal) {
  const float unread = 0;
  for (const Backend& backend : host_backends()) {
    IndexScoreArgs args;
    args.q = tensor(static_cast<float*>(nullptr), {0, 4, kIndexDim});
    args.weights = tensor(&unread, {0, 4});
    args.paged.cache = {IndexFormat::f32, tensor(static_cast<float*>(nullptr), {0, 64, kIndexDim})};
    args.paged.block_table = tensor(static_cast<std::int32_t*>(nullptr), {0, 0});
    args.lengths = tensor(static_cast<std::int32_t*>(nullptr), {0});
    args.logits = tensor(static_cast<float*>(nullptr), {0, 100});
    index_scores(backend, args, PoisonedWorkspace(index_scores_workspace_bytes(backend, {0, 4, 100})));

    const ScoreProblem problem({.lengths = {0, -1}, .heads = 4});  // rows, but no column
    args = problem.args();
    args.logits = tensor(static_cast<float*>(nullptr), {2, 0});
    index_scores(backend, args, PoisonedWorkspace(index_scores_workspace_bytes(backend, {2, 4, 0})));
  }
}

RC_GTEST_PROP(IndexScores, AnyShapeAgreesWithTheFormula, ()) {
  const Formats f = kFormats[*rc::gen::inRange(0, 7)];
  const int requests = *rc::gen::inRange(1, 4), next_n = *rc::gen::inRange(1, 4);
  ScoreShape shape{.lengths = {},
                   .requests = requests,
                   .heads = *rc::gen::inRange(1, 9),
                   .page_size = *rc::gen::inRange(1, 80),
                   .format = f.keys,
                   .q_dtype = f.q,
                   .seed = *rc::gen::arbitrary<std::uint32_t>()};
  for (int i = 0; i < requests * next_n; ++i) shape.lengths.push_back(*rc::gen::inRange(-2, 150));
  const ScoreProblem problem(shape);
  RC_ASSERT(problem.agrees(problem.run(Backend::reference()), false));
  RC_ASSERT(problem.agrees(problem.run(Backend::cpu({2, {}})), true));
}

// ---- cases from public reports ----------------------------------------------------------------------

TEST(Case14, LogitsOfTheGoldenIndexerPage) {
  const GoldenPage golden;
  IndexScoreArgs args = golden.args();
  for (const Backend& backend : host_backends()) {
    std::vector<float> logits(64, kNan);
    args.logits = tensor(logits.data(), {1, 64});
    index_scores(backend, args, PoisonedWorkspace(index_scores_workspace_bytes(backend, {1, 1, 64})));
    for (int j = 0; j < 64; ++j) EXPECT_EQ(logits[j], 128.f * static_cast<float>(j + 1)) << backend.name();
  }
}

// A cache of 4.3 GB that exists only where it is touched: keys past 2^31 and 2^32 bytes.
TEST(Case15, IndexerSlotsBeyond32Bits) {
  constexpr std::int64_t kPages = 520'000, kBytes = kPages * 64 * kIndexKeyBytes;
  static_assert(kBytes > (std::int64_t{1} << 32));
  const LazyMemory memory(kBytes);
  if (!memory) GTEST_SKIP() << "cannot reserve 4.3 GB of addresses";
  auto* bytes = reinterpret_cast<std::uint8_t*>(memory.data());
  IndexCache cache;
  cache.pages = tensor(bytes, {kPages, 64, kIndexKeyBytes});

  const std::vector<float> k = Random(3).f32s(2 * kIndexDim), ones(kIndexDim, 1.f), zeros(kIndexDim, 0.f);
  const std::int64_t slots[] = {16'268'816, 32'537'700};
  WriteIndexKeysArgs write;
  write.k = tensor(k.data(), {2, kIndexDim});
  write.norm_weight = tensor(ones.data(), {kIndexDim});
  write.norm_bias = tensor(zeros.data(), {kIndexDim});
  write.rope.style = RopeStyle::none;
  write.slots = tensor(slots, {2});
  write.cache = cache;

  const std::vector<float> q = Random(4).f32s(kIndexDim);
  const float weights[] = {1, 1};
  IndexScoreArgs args;
  args.q = tensor(q.data(), {2, 1, kIndexDim});
  args.q.stride[0] = 0;  // both rows ask the same
  args.weights = tensor(weights, {2, 1});
  args.paged.cache = cache;
  const std::int32_t table[] = {static_cast<std::int32_t>(slots[0] / 64), static_cast<std::int32_t>(slots[1] / 64)};
  args.paged.block_table = tensor(table, {2, 1});
  const std::int32_t lengths[] = {64, 64};
  args.lengths = tensor(lengths, {2});
  for (const Backend& backend : host_backends()) {
    write_index_keys(backend, write);
    std::vector<float> logits(2 * 64, kNan);
    args.logits = tensor(logits.data(), {2, 64});
    index_scores(backend, args, PoisonedWorkspace(index_scores_workspace_bytes(backend, {2, 1, 64})));
    for (int t = 0; t < 2; ++t) {
      double key[kIndexDim], dot = 0;
      const double scale = kv::load_index_key(cache, slots[t], key);
      for (int d = 0; d < kIndexDim; ++d) dot += static_cast<double>(q[d]) * key[d];
      ASSERT_NE(dot, 0);
      for (int i = 0; i < 64; ++i) {  // the rest of the page was never written: zeros
        const double want = i == slots[t] % 64 ? scale * std::max(dot, 0.0) : 0.0;
        EXPECT_NEAR(logits[t * 64 + i], want, 1e-5 * std::abs(scale * dot)) << backend.name();
      }
      const std::int64_t page = slots[t] / 64 * 64 * kIndexKeyBytes, wrapped = page & 0xFFFFFFFF;
      for (std::int64_t b = wrapped; wrapped != page && b < wrapped + 64 * kIndexKeyBytes; ++b) ASSERT_EQ(bytes[b], 0);
    }
    std::memset(bytes + slots[0] / 64 * 64 * kIndexKeyBytes, 0, 64 * kIndexKeyBytes);
    std::memset(bytes + slots[1] / 64 * 64 * kIndexKeyBytes, 0, 64 * kIndexKeyBytes);
  }
}

TEST(Case19, BadLengthsScoreNothing) {
  for (const std::vector<int>& lengths :
       {std::vector<int>{10, -1, 0, 3}, std::vector<int>{9, 10, -2, -1, -1, 0, 2, 3}}) {  // the second: next_n = 2
    const ScoreProblem problem({.lengths = lengths, .requests = 4, .heads = 2});
    for (const Backend& backend : host_backends())
      EXPECT_TRUE(problem.agrees(problem.run(backend), backend.kind() == BackendKind::cpu)) << backend.name();
  }
}

// n = 2, d = 4: q0.k = -3, q1.k = 2, w = [5, -1], factor (n d)^-0.5.
TEST(Case21, ReluSignedWeightsFactor) {
  std::vector<float> q(2 * kIndexDim, 0.f), key(kIndexDim, 0.f);
  q[0] = -3, q[kIndexDim + 1] = 2, key[0] = 1, key[1] = 1;
  const float weights[] = {5, -1};
  const std::int32_t length = 1;
  std::vector<float> folded(2, kNan), out_q(2 * kIndexDim, kNan);
  for (const Backend& backend : host_backends()) {
    IndexQueryArgs query;
    query.q = tensor(q.data(), {1, 2, kIndexDim});
    query.weights = tensor(weights, {1, 2});
    query.weight_scale = 1 / std::sqrt(2.f * 4.f);
    query.rope.style = RopeStyle::none;
    query.out_q = tensor(out_q.data(), {1, 2, kIndexDim});
    query.out_weights = tensor(folded.data(), {1, 2});
    index_queries(backend, query);
    float logit = kNan;
    IndexScoreArgs args;
    args.q = query.out_q;
    args.weights = query.out_weights;
    args.contiguous.keys = tensor(key.data(), {1, kIndexDim});
    args.lengths = tensor(&length, {1});
    args.logits = tensor(&logit, {1, 1});
    index_scores(backend, args, PoisonedWorkspace(index_scores_workspace_bytes(backend, {1, 2, 1})));
    EXPECT_NEAR(logit, -0.707107, 1e-6) << backend.name();  // without relu: -6.010408

    for (const auto& [heads, factor] : {std::pair{64, 0.0110485}, std::pair{32, 0.015625}}) {
      query.weight_scale = 1 / std::sqrt(static_cast<float>(heads * kIndexDim));
      index_queries(backend, query);
      EXPECT_NEAR(folded[0], 5 * factor, 1e-7 * 5) << backend.name();
      EXPECT_NEAR(folded[1], -factor, 1e-7) << backend.name();
    }
  }
}

}  // namespace
}  // namespace sievemla::test
