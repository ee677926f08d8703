// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/cuda_test.cc -- stage 3 on a CUDA device, against the definition in double, within the bounds that
// hold for bf16 arithmetic: |error| <= 8e-3 |ref| + 2e-3 max(1, sum p |v|), lse 1e-3.
#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "sievemla/error.h"
#include "support/attention_problem.h"
#include "support/on_cuda.h"

namespace sievemla::test {
namespace {

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
    cuda_good(cudaMemcpy(view.data, lengths_.data(), lengths_.size() * 4, cudaMemcpyHostToDevice));
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

class Graph {
 public:
  template <class F>
  explicit Graph(cudaStream_t stream, F&& launches) {
    cudaGraph_t graph = nullptr;
    cuda_good(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));  // allocating or waiting would fail
    launches();
    cuda_good(cudaStreamEndCapture(stream, &graph));
    cuda_good(cudaGraphInstantiate(&run_, graph, 0));
    cuda_good(cudaGraphDestroy(graph));
  }
  Graph(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(run_); }
  void replay(cudaStream_t stream) const { cuda_good(cudaGraphLaunch(run_, stream)); }

 private:
  cudaGraphExec_t run_ = nullptr;
};

struct OwnStream {
  cudaStream_t handle = nullptr;
  OwnStream() { cuda_good(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  OwnStream(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(handle); }
  void wait() const { cuda_good(cudaStreamSynchronize(handle)); }
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

TEST_F(OnCuda, GraphReplayedWithNewLengths) {
  const Backend cuda = backend();
  for (const std::int64_t heads : {16, 64}) {
    Resident call(cuda, heads == 16 ? KvFormat::bf16 : KvFormat::fp8_ds_mla, 3, heads, 2048);
    const OwnStream stream;
    const Graph graph(stream.handle, [&] { call.launch(stream.handle); });
    for (std::uint64_t i = 0; i < 1000; ++i) {
      call.lengths(i);
      graph.replay(stream.handle), stream.wait();
      const std::vector<bf16> replayed = call.result();
      call.launch(stream.handle), stream.wait();
      ASSERT_TRUE(same_bytes(replayed, call.result())) << i;
    }
  }
}

TEST_F(OnCuda, TwentyThousandLaunchesOnTwoStreams) {
  const Backend cuda = backend();
  std::vector<std::unique_ptr<Resident>> calls;
  for (const KvFormat format : {KvFormat::fp8_ds_mla, KvFormat::bf16, KvFormat::fp8_nope})
    for (const auto& [tokens, heads, topk] :
         {std::array{1, 64, 2048}, std::array{16, 64, 512}, std::array{70, 16, 300}, std::array{3, 128, 2000}})
      calls.push_back(std::make_unique<Resident>(cuda, format, tokens, heads, topk));
  const OwnStream streams[2];
  std::vector<std::vector<bf16>> first;
  for (const auto& call : calls) {
    call->launch(streams[0].handle), streams[0].wait();
    first.push_back(call->result());
  }
  Random random(9);
  for (int round = 0; round < 20; ++round) {  // a call stays on its stream: it has one workspace
    for (int i = 0; i < 1000; ++i) {
      const auto which = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(calls.size())));
      calls[which]->launch(streams[which % 2].handle);
    }
    streams[0].wait(), streams[1].wait();
    for (std::size_t i = 0; i < calls.size(); ++i) ASSERT_TRUE(same_bytes(first[i], calls[i]->result())) << i;
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
