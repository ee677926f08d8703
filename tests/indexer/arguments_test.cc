// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/arguments_test.cc -- every argument rule of stage 1: broken alone it throws, says why, and nothing was
// written.
#include <gtest/gtest.h>

#include <functional>

#include "indexer/problem.h"
#include "sievemla/error.h"

namespace sievemla::test {
namespace {

// One broken rule: part of the message, and how to break it.
template <class Args>
struct Bad {
  const char* says;
  std::function<void(Args&)> make;
};

// A valid call and its outputs, which `pristine` looks at.
template <class Args>
struct Call {
  Args good;
  std::function<void(const Backend&, const Args&)> run;
  std::function<bool()> pristine;

  template <class Error>
  void expect_refused(const std::vector<Bad<Args>>& bad) const {
    for (const Backend& backend : host_backends()) {
      for (const Bad<Args>& b : bad) {
        Args args = good;
        b.make(args);
        try {
          run(backend, args);
          ADD_FAILURE() << backend.name() << ": no error that says '" << b.says << "'";
        } catch (const Error& e) {
          EXPECT_NE(std::string(e.what()).find(b.says), std::string::npos) << backend.name() << ": " << e.what();
        }
        EXPECT_TRUE(pristine()) << backend.name() << ": written by a call that breaks '" << b.says << "'";
      }
    }
  }
  // Last of all: the valid call passes and is seen to write, so the above was no accident.
  void expect_good() const {
    for (const Backend& backend : host_backends()) EXPECT_NO_THROW(run(backend, good)) << backend.name();
    EXPECT_FALSE(pristine());
  }
};

template <class T>
bool all_equal(const std::vector<T>& v, T x) {
  return std::all_of(v.begin(), v.end(), [&](T y) { return std::memcmp(&x, &y, sizeof x) == 0; });
}

TEST(IndexerArguments, RopeStyleNames) {
  EXPECT_EQ(name_of(RopeStyle::unset), "unset");
  EXPECT_EQ(name_of(RopeStyle::half_split), "half_split");
  EXPECT_EQ(name_of(RopeStyle::interleaved), "interleaved");
  EXPECT_EQ(name_of(RopeStyle::none), "none");
}

TEST(IndexerArguments, WriteIndexKeys) {
  const std::vector<float> k(3 * kIndexDim, 1.f), norm(kIndexDim, 1.f), table(10 * kIndexRope, 0.5f);
  const std::int32_t positions[] = {0, 9, 4};
  const std::int64_t slots[] = {7, 0, 3}, past[] = {7, 8, 3};
  const std::int32_t position_past[] = {0, 10, 4}, position_before[] = {0, -1, 4};
  std::vector<std::uint8_t> cache(8 * kIndexKeyBytes, 0xA5);
  using Args = WriteIndexKeysArgs;
  Call<Args> call;
  Args& good = call.good;
  good.k = tensor(k.data(), {3, kIndexDim});
  good.norm_weight = good.norm_bias = tensor(norm.data(), {kIndexDim});
  good.rope = {RopeStyle::interleaved, tensor(positions, {3}), tensor(table.data(), {10, kIndexRope})};
  good.slots = tensor(slots, {3});
  good.cache.pages = tensor(cache.data(), {2, 4, kIndexKeyBytes});
  call.run = [](const Backend& b, const Args& a) { write_index_keys(b, a); };
  call.pristine = [&] { return all_equal<std::uint8_t>(cache, 0xA5); };
  call.expect_refused<InvalidArgument>({
      {"must be [*, 128]: got [3, 127]", [](Args& a) { a.k.shape[1] = 127; }},
      {"dtype must be f32 or bf16", [](Args& a) { a.k.dtype = DType::i32; }},
      {"must have data", [](Args& a) { a.k.data = nullptr; }},
      {"device", [](Args& a) { a.k.device = {DeviceType::cuda, 0}; }},
      {"norm_weight", [](Args& a) { a.norm_weight = {}; }},
      {"norm_bias", [](Args& a) { a.norm_bias = {}; }},
      {"norm_bias", [](Args& a) { a.norm_bias.shape[0] = 64; }},
      {"eps must be positive", [](Args& a) { a.norm_eps = 0; }},
      {"eps must be positive", [](Args& a) { a.norm_eps = kNan; }},
      {"eps must be positive and finite", [](Args& a) { a.norm_eps = kInf; }},
      {"half_split (DeepSeek-V3.2), interleaved (GLM-5, 5.1, 5.2) or none (GLM-5.3-Flash): got unset",
       [](Args& a) { a.rope.style = RopeStyle::unset; }},
      {"rope style must be said", [](Args& a) { a.rope = {}; }},
      {"rope style must be said", [](Args& a) { a.rope.style = static_cast<RopeStyle>(9); }},
      {"rope.positions", [](Args& a) { a.rope.positions = {}; }},
      {"rope.positions", [](Args& a) { a.rope.positions.shape[0] = 2; }},
      {"rope.positions", [](Args& a) { a.rope.positions.dtype = DType::f32; }},
      {"rope.cos_sin", [](Args& a) { a.rope.cos_sin.shape[1] = 32; }},
      {"position must be in [0, max_position): got 10",
       [&](Args& a) { a.rope.positions = tensor(position_past, {3}); }},
      {"position must be in [0, max_position): got -1",
       [&](Args& a) { a.rope.positions = tensor(position_before, {3}); }},
      {"slots", [](Args& a) { a.slots.shape[0] = 2; }},
      {"slots", [](Args& a) { a.slots.dtype = DType::f32; }},
      {"a slot must be below 8", [&](Args& a) { a.slots = tensor(past, {3}); }},
      {"cache", [](Args& a) { a.cache.format = IndexFormat::bf16; }},
      {"cache", [](Args& a) { a.cache.pages = {}; }},
  });
  call.expect_refused<Unsupported>({{"--dtype bfloat16", [](Args& a) { a.k.dtype = DType::f16; }}});
  call.expect_good();
}

TEST(IndexerArguments, IndexQueries) {
  const std::vector<float> q(2 * 3 * kIndexDim, 1.f), weights(2 * 3, 1.f), table(10 * kIndexRope, 0.5f);
  const std::int64_t positions[] = {0, 9}, past[] = {std::int64_t{1} << 40, 0};
  std::vector<std::uint8_t> out_q(2 * 3 * kIndexDim, 0xA5);
  std::vector<float> out_weights(2 * 3, kUntouched);
  using Args = IndexQueryArgs;
  Call<Args> call;
  Args& good = call.good;
  good.q = tensor(q.data(), {2, 3, kIndexDim});
  good.weights = tensor(weights.data(), {2, 3});
  good.weight_scale = 1;
  good.rope = {RopeStyle::half_split, tensor(positions, {2}), tensor(table.data(), {10, kIndexRope})};
  good.out_q = tensor(out_q.data(), {2, 3, kIndexDim});
  good.out_weights = tensor(out_weights.data(), {2, 3});
  call.run = [](const Backend& b, const Args& a) { index_queries(b, a); };
  call.pristine = [&] { return all_equal<std::uint8_t>(out_q, 0xA5) && all_equal(out_weights, kUntouched); };
  call.expect_refused<InvalidArgument>({
      {"index_queries: q", [](Args& a) { a.q.shape[2] = 64; }},
      {"index_queries: q", [](Args& a) { a.q.dtype = DType::u8; }},
      {"there must be a head", [](Args& a) { a.q.shape[1] = 0; }},
      {"index_queries: weights", [](Args& a) { a.weights.shape[1] = 2; }},
      {"index_queries: weights", [](Args& a) { a.weights.dtype = DType::u8; }},
      {"got unset (index_queries: rope.style)", [](Args& a) { a.rope.style = RopeStyle::unset; }},
      {"rope.positions", [](Args& a) { a.rope.positions.shape[0] = 3; }},
      {"rope.cos_sin", [](Args& a) { a.rope.cos_sin = {}; }},
      {"position must be in [0, max_position): got 1099511627776",
       [&](Args& a) { a.rope.positions = tensor(past, {2}); }},
      {"index_queries: out_q", [](Args& a) { a.out_q.shape[0] = 1; }},
      {"index_queries: out_q", [](Args& a) { a.out_q.dtype = DType::i32; }},
      {"last dimension must be contiguous", [](Args& a) { a.out_q.stride = {768, 256, 2}; }},
      {"must not overlap", [](Args& a) { a.out_q.stride[0] = 0; }},
      {"index_queries: weight_scale", [](Args& a) { a.weight_scale = 0; }},
      {"index_queries: weight_scale", [](Args& a) { a.weight_scale = kNan; }},
      {"index_queries: scale", [](Args& a) { a.scale = static_cast<ScaleRule>(9); }},
      {"index_queries: out_weights", [](Args& a) { a.out_weights.shape[1] = 2; }},
      {"index_queries: out_weights", [](Args& a) { a.out_weights.dtype = DType::bf16; }},
  });
  call.expect_refused<Unsupported>({{"--dtype bfloat16", [](Args& a) { a.q.dtype = DType::f16; }}});
  call.expect_good();
}

// Two rows of 2 heads over fp8 keys; `keys` says how they are given.
struct ScoreCall {
  ScoreProblem problem{{.lengths = {20, 30}, .requests = 2, .heads = 2, .page_size = 16}};
  std::vector<float> logits = std::vector<float>(2 * 30, kUntouched), scales = std::vector<float>(40, 1.f);
  std::vector<std::uint8_t> keys = std::vector<std::uint8_t>(40 * kIndexDim, 0x38);
  std::vector<std::int32_t> starts{20, 10}, row_request{1, 1};
  Call<IndexScoreArgs> call;

  ScoreCall() {
    call.good = problem.args();
    call.good.logits = tensor(logits.data(), {2, 30});
    call.run = [](const Backend& b, const IndexScoreArgs& a) {
      index_scores(b, a, PoisonedWorkspace(index_scores_workspace_bytes(b, {2, 2, 30})));
    };
    call.pristine = [this] { return all_equal(logits, kUntouched); };
  }
  void make_contiguous() {
    call.good.paged = {};
    call.good.contiguous = {tensor(keys.data(), {40, kIndexDim}), tensor(scales.data(), {40}),
                            tensor(starts.data(), {2})};
  }
};
using Scores = IndexScoreArgs;

TEST(IndexerArguments, IndexScores) {
  ScoreCall c;
  const std::int32_t too_long[] = {20, 31};
  const std::vector<bf16> plain(40 * kIndexDim, bf16{0});
  c.call.expect_refused<InvalidArgument>({
      {"index_scores: q", [](Scores& a) { a.q.rank = 2; }},
      {"index_scores: q", [](Scores& a) { a.q.shape[2] = 64; }},
      {"index_scores: q", [](Scores& a) { a.q.dtype = DType::i32; }},
      {"last dimension must be contiguous", [](Scores& a) { a.q.stride[2] = 2; }},
      {"heads must be 1 to 4096", [](Scores& a) { a.q.shape[1] = 0; }},
      {"heads must be 1 to 4096", [](Scores& a) { a.q.shape[1] = 4097; }},
      {"rank 5", [](Scores& a) { a.q.rank = 5; }},
      {"index_scores: weights", [](Scores& a) { a.weights.shape[0] = 1; }},
      {"index_scores: weights", [](Scores& a) { a.weights.dtype = DType::bf16; }},
      {"exactly one of paged and contiguous keys must be given: got neither", [](Scores& a) { a.paged = {}; }},
      {"got both", [&](Scores& a) { a.contiguous.keys = tensor(plain.data(), {40, kIndexDim}); }},
      {"a u8 (e4m3) q goes with fp8 keys: got keys of bf16",
       [&](Scores& a) { a.paged.cache = {IndexFormat::bf16, tensor(plain.data(), {2, 16, kIndexDim})}; }},
      {"index_scores: lengths", [](Scores& a) { a.lengths = {}; }},
      {"index_scores: lengths", [](Scores& a) { a.lengths.shape[0] = 1; }},
      {"index_scores: lengths", [](Scores& a) { a.lengths.dtype = DType::i64; }},
      {"a length must not exceed the width of logits: got 31 in row 1, width 30",
       [&](Scores& a) { a.lengths = tensor(too_long, {2}); }},
      {"index_scores: logits", [](Scores& a) { a.logits.shape[0] = 3; }},
      {"index_scores: logits", [](Scores& a) { a.logits.dtype = DType::bf16; }},
      {"last dimension must be contiguous", [](Scores& a) { a.logits.stride = {60, 2}; }},
      {"must not overlap", [](Scores& a) { a.logits.stride[0] = 29; }},
  });
  c.call.expect_refused<Unsupported>({{"--dtype bfloat16", [](Scores& a) { a.q.dtype = DType::f16; }}});
  c.call.expect_good();
}

TEST(IndexerArguments, PagedKeys) {
  ScoreCall c;
  const std::int32_t past[] = {0, 2}, before[] = {-1, 0};
  c.call.expect_refused<InvalidArgument>({
      {"paged.cache", [](Scores& a) { a.paged.cache.format = IndexFormat::f32; }},
      {"index format is f32, bf16 or fp8: got 9",
       [](Scores& a) { a.paged.cache.format = static_cast<IndexFormat>(9); }},
      {"must not overlap", [](Scores& a) { a.paged.cache.pages.stride[0] = 16 * kIndexKeyBytes - 1; }},
      {"paged.cache", [](Scores& a) { a.paged.cache.pages.shape[1] = 0; }},
      {"paged.cache", [](Scores& a) { a.paged.cache.pages.stride[1] = 140; }},
      {"paged.block_table", [](Scores& a) { a.paged.block_table = {}; }},
      {"paged.block_table", [](Scores& a) { a.paged.block_table.dtype = DType::i64; }},
      {"last dimension must be contiguous", [](Scores& a) { a.paged.block_table.stride[1] = 2; }},
      {"divide evenly", [](Scores& a) { a.paged.block_table.shape[0] = 3; }},
      {"divide evenly", [](Scores& a) { a.paged.block_table.shape[0] = 0; }},
      {"paged.row_request", [&](Scores& a) { a.paged.row_request = tensor(past, {1}); }},
      {"a row's request must be one of the block table's: got 2",
       [&](Scores& a) { a.paged.row_request = tensor(past, {2}); }},
      {"a row's request must be one of the block table's: got -1",
       [&](Scores& a) { a.paged.row_request = tensor(before, {2}); }},
  });
  c.call.expect_good();
}

TEST(IndexerArguments, ContiguousKeys) {
  ScoreCall c;
  c.make_contiguous();
  const std::int32_t past[] = {21, 10}, before[] = {20, -1};
  c.call.expect_refused<InvalidArgument>({
      {"contiguous.keys", [](Scores& a) { a.contiguous.keys.shape[1] = 132; }},
      {"contiguous.keys", [](Scores& a) { a.contiguous.keys.dtype = DType::i32; }},
      {"last dimension must be contiguous", [](Scores& a) { a.contiguous.keys.stride[1] = 2; }},
      {"contiguous.scales", [](Scores& a) { a.contiguous.scales = {}; }},
      {"contiguous.scales", [](Scores& a) { a.contiguous.scales.shape[0] = 39; }},
      {"scales go with u8 keys only", [](Scores& a) { a.contiguous.keys.dtype = DType::bf16; }},
      {"contiguous.starts", [](Scores& a) { a.contiguous.starts.shape[0] = 1; }},
      {"0 <= start, start + length <= n: got start 21, length 20 in row 0, n 40",
       [&](Scores& a) { a.contiguous.starts = tensor(past, {2}); }},
      {"0 <= start, start + length <= n: got start -1", [&](Scores& a) { a.contiguous.starts = tensor(before, {2}); }},
  });
  c.call.expect_good();
}

TEST(IndexerArguments, Workspace) {
  const ScoreCall c;
  for (const Backend& backend : host_backends()) {
    const std::int64_t needed = index_scores_workspace_bytes(backend, {2, 2, 30});
    ASSERT_GT(needed, 0);
    PoisonedWorkspace enough(needed + 8);
    Workspace bad[] = {enough, enough, {nullptr, needed}};
    bad[0].bytes = needed - 1;
    bad[1].data = static_cast<std::byte*>(bad[1].data) + 8;
    for (const Workspace& workspace : bad) EXPECT_THROW(index_scores(backend, c.call.good, workspace), InvalidArgument);
    EXPECT_TRUE(c.call.pristine());
    EXPECT_THROW(index_scores_workspace_bytes(backend, {-1, 2, 30}), InvalidArgument);
    EXPECT_THROW(index_scores_workspace_bytes(backend, {2, -1, 30}), InvalidArgument);
    EXPECT_THROW(index_scores_workspace_bytes(backend, {2, 2, -1}), InvalidArgument);
  }
}

}  // namespace
}  // namespace sievemla::test
