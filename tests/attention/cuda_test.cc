// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/cuda_test.cc -- stage 3 on a CUDA device: shapes and layouts, and ways to launch.
#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "attention/on_cuda.h"
#include "sievemla/error.h"
#include "support/cuda_stream.h"

namespace sievemla::test {
namespace {

bool same_bytes(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
}

// A call whose tensors stay on the device: it is compared with itself, under other ways to launch it.
class Resident {
 public:
  Resident(const Backend& backend, KvFormat format, std::int64_t tokens, std::int64_t heads, std::int64_t topk)
      : device_(backend.device()), backend_(backend), topk_(topk) {
    Random random(static_cast<std::uint64_t>(tokens * 1000 + heads));
    const int rope = format == KvFormat::fp8_nope ? 0 : 64;
    const std::int64_t row = info(format).row_bytes(512, rope);
    rows_.resize(static_cast<std::size_t>(row * kSlots));
    args_.kv.format = format, args_.kv.latent = 512, args_.kv.rope = rope;
    args_.kv.pages = tensor(reinterpret_cast<const std::uint8_t*>(rows_.data()), {kSlots / 64, 64, row});
    if (info(format).storage != DType::u8) {
      args_.kv.pages.dtype = info(format).storage;
      args_.kv.pages.shape[2] /= 2, args_.kv.pages.stride = {32 * row, row / 2, 1};
    }
    std::vector<float> values(576);
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      for (float& x : values) x = random.uniform_f32();
      kv::store_row(args_.kv, slot, values.data(), values.data() + 512, ScaleRule::arbitrary);
    }
    q_ = random.bf16s(tokens * heads * (512 + rope));
    for (std::int64_t i = 0; i < tokens * topk; ++i) slots_.push_back(static_cast<std::int32_t>(random.below(kSlots)));
    lengths_.assign(static_cast<std::size_t>(tokens), static_cast<std::int32_t>(topk));
    out_.resize(static_cast<std::size_t>(tokens * heads * 512));
    args_.q = tensor(q_.data(), {tokens, heads, 512 + rope});
    args_.rows = Slots{tensor(slots_.data(), {tokens, topk}), tensor(lengths_.data(), {tokens})};
    args_.out = tensor(out_.data(), {tokens, heads, 512});
    args_.scale = 0.1f;
    there_ = device_.put(args_);
    workspace_ =
        std::make_unique<CudaWorkspace>(backend, attention_workspace_bytes(backend, {tokens, heads, topk, 512, rope}));
    cuda_good(cudaDeviceSynchronize());  // the streams of these tests do not wait for this one
  }
  void launch(cudaStream_t stream) const { attention(backend_, there_, *workspace_, Stream{stream}); }
  void lengths(std::uint64_t seed) {
    Random random(seed);
    for (std::int32_t& n : lengths_) n = static_cast<std::int32_t>(random.below(topk_ + 1));
    const TensorView& view = std::get<Slots>(there_.rows).topk_length;
    cuda_copy(view.data, lengths_.data(), std::ssize(lengths_) * 4);
  }
  const std::vector<bf16>& result() {
    device_.take_back(args_.out);
    return out_;
  }

 private:
  static constexpr std::int64_t kSlots = 4096;
  OnDevice device_;
  Backend backend_;
  std::int64_t topk_;
  std::vector<std::byte> rows_;
  std::vector<bf16> q_, out_;
  std::vector<std::int32_t> slots_, lengths_;
  AttentionArgs args_, there_;
  std::unique_ptr<CudaWorkspace> workspace_;
};

// First in this file: no other test has prepared the device yet.
TEST_F(OnCuda, FirstLaunchEverInACapture) {
  const Backend cuda = Backend::cuda(0);
  Resident call(cuda, KvFormat::fp8_ds_mla, 2, 64, 2048);
  const OwnStream stream;
  EXPECT_THROW(call.launch(stream.handle), InvalidArgument);
  cuda.prepare();
  const Graph graph(stream.handle, [&] { call.launch(stream.handle); });
  graph.replay(stream.handle), stream.wait();
  const std::vector<bf16> replayed = call.result();
  call.launch(stream.handle), stream.wait();
  EXPECT_TRUE(same_bytes(replayed, call.result()));
}

// A thousand replays, each with lengths of its own, give the bits of eager calls.
void expect_replays_as_eager(Resident& call, const Graph& graph, const OwnStream& stream) {
  for (std::uint64_t i = 0; i < 1000; ++i) {
    call.lengths(i);
    graph.replay(stream.handle), stream.wait();
    const std::vector<bf16> replayed = call.result();
    call.launch(stream.handle), stream.wait();
    ASSERT_TRUE(same_bytes(replayed, call.result())) << i;
  }
}

TEST_F(OnCuda, GraphReplayedWithNewLengths) {
  const Backend cuda = backend();
  for (const std::int64_t heads : {16, 64}) {
    Resident call(cuda, heads == 16 ? KvFormat::bf16 : KvFormat::fp8_ds_mla, 3, heads, 2048);
    const OwnStream stream;
    const Graph graph(stream.handle, [&] { call.launch(stream.handle); });
    expect_replays_as_eager(call, graph, stream);
  }
}

// Units that a wave of clusters leaves are a second launch beside the first (H200: 15 units are clusters of 8 or 7
// parts, 30 of 4, and 1 to 3 are left).
TEST_F(OnCuda, UnitsBesideAWaveOfClusters) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (const auto& [tokens, lanes] : {std::array{16, 480}, {17, 448}, {31, 512}, {33, 416}}) {
      SCOPED_TRACE(tokens);
      Problem p{.tokens = tokens, .heads = 64, .format = format, .rope = rope, .pages = 20, .sinks = true};
      p.random_list(lanes, lanes - 40);
      p.topk_length.assign(static_cast<std::size_t>(tokens), lanes);
      p.topk_length[2] = 0, p.topk_length.back() = tokens == 17 ? 0 : lanes - 99;
      if (tokens == 31) p.topk_length.back() = 100;  // fewer tiles than parts
      expect_solved(p, cuda);
    }
  Problem folded{.tokens = 8, .heads = 128, .format = KvFormat::bf16, .pages = 40};
  folded.random_list(2048, 2000);
  expect_solved(folded, cuda);
}

TEST_F(OnCuda, UnitsBesideAWaveReplayedWithNewLengths) {
  const Backend cuda = backend();
  for (const std::int64_t tokens : {16, 33}) {
    Resident call(cuda, KvFormat::fp8_ds_mla, tokens, 64, 2048);
    const OwnStream stream;
    const Graph graph(stream.handle, [&] { call.launch(stream.handle), call.launch(stream.handle); });
    expect_replays_as_eager(call, graph, stream);
  }
}

// Each has a workspace of its own; the second launches of both may wait for places that the other has.
TEST_F(OnCuda, UnitsBesideAWaveOnTwoStreams) {
  const Backend cuda = backend();
  Resident one(cuda, KvFormat::fp8_ds_mla, 16, 64, 2048), other(cuda, KvFormat::bf16, 32, 64, 2048);
  const OwnStream a, b;
  one.launch(a.handle), a.wait();
  other.launch(b.handle), b.wait();
  const std::vector<bf16> first = one.result(), second = other.result();
  for (int i = 0; i < 200; ++i) {
    for (int k = 0; k < 5; ++k) one.launch(a.handle), other.launch(b.handle);
    a.wait(), b.wait();
    ASSERT_TRUE(same_bytes(first, one.result())) << i;
    ASSERT_TRUE(same_bytes(second, other.result())) << i;
  }
}

// Where a unit is not cut, its heads alone choose the tile. Lists in which every group of a tile has a turn, most two.
TEST_F(OnCuda, EveryTileUncut) {
  const Backend cuda = backend();
  const auto uncut = [](AttentionArgs& args) { args.batch_invariant = true; };
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t heads : {7, 16, 32, 64}) {
      SCOPED_TRACE(heads);
      Problem p{.tokens = 4, .heads = heads, .format = format, .rope = rope, .pages = 12, .sinks = true};
      p.random_list(500, 430);
      p.topk_length = {500, 0, 333, 5};
      expect_solved(p, cuda, uncut);
    }
}

// So many units and rows that few heads are not left to the tile of the shortest start: equal parts, and unequal ones.
TEST_F(OnCuda, FewHeadsInParts) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t heads : {8, 16}) {
      SCOPED_TRACE(heads);
      Problem p{.tokens = 48, .heads = heads, .format = format, .rope = rope, .pages = 40, .sinks = true};
      p.random_list(1152, 1100);
      expect_solved(p, cuda);
      Problem dense{.tokens = 100, .heads = heads, .format = format, .rope = rope, .pages = 40};
      dense.table_width = 10;
      Random random(17);
      for (int i = 0; i < 100 * 10; ++i) dense.table.push_back(static_cast<std::int32_t>(random.below(41)) - 1);
      for (int i = 0; i < 100; ++i) dense.lengths.push_back(static_cast<std::int32_t>(random.below(641)));
      expect_solved(dense, cuda);
    }
}

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

// So few rows that there are fewer tiles than multiprocessors: a plan with more parts would not fit its workspace.
TEST_F(OnCuda, DenseShortTables) {
  const Backend cuda = backend();
  for (const auto& [format, rope] : kRows)
    for (std::int64_t heads : {1, 8, 16, 64, 128})
      for (std::int64_t width : {1, 3, 7}) {
        Problem p{.tokens = 2, .heads = heads, .format = format, .rope = rope, .pages = 16, .page_size = 16};
        p.table_width = width;
        for (std::int64_t i = 0; i < 2 * width; ++i) p.table.push_back(static_cast<std::int32_t>(i));
        p.lengths = {static_cast<std::int32_t>(16 * width), static_cast<std::int32_t>(16 * width - 5)};
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

// A weight rounded to bf16 is off by half a unit of its last place, 2^-8 of it at most; the sum is of exact weights.
TEST_F(OnCuda, RoundedWeights) {
  const Backend cuda = backend();
  const auto rounded = [](AttentionArgs& args) { args.round_weights = true; };
  for (const auto& [format, rope] : kRows)
    for (const std::int64_t heads : {8, 16, 32, 64})
      for (const std::int64_t rows : {1, 3, 100, 2048}) {
        SCOPED_TRACE(testing::Message() << heads << " heads, " << rows << " rows");
        Problem p{.tokens = 2, .heads = heads, .format = format, .rope = rope, .pages = 40};
        p.random_list(2048, rows);
        const Result made = expect_solved(p, cuda, rounded, 0x1p-8);
        if (rows < 100) continue;  // maybe each alone in its part, where its weight is 1
        EXPECT_FALSE(same_bits(made, p.run(cuda)));
      }
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
