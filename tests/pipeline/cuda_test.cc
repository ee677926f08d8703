// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/pipeline/cuda_test.cc -- whole layers on a CUDA device, captured in graphs; all stages at once on two streams.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>

#include "base/shortlist.h"
#include "kv/formats.h"
#include "pipeline/layer_problem.h"
#include "sievemla/error.h"
#include "support/allocations.h"
#include "support/cuda_stream.h"
#include "support/deadline.h"
#include "support/on_cuda.h"

namespace sievemla::test {
namespace {

using PipelineOnCuda = OnCuda;

// A layer's call with its tensors on the device. Queries are bf16, which is what the device takes.
class DeviceLayer {
 public:
  DeviceLayer(const Backend& cuda, const LayerProblem& problem) : call(problem), device_(cuda.device()) {
    for (float x : problem.q) q_.push_back(base::to_bf16(x));
    host = call.args;
    host.attention.q = tensor(q_.data(), {problem.s.tokens(), problem.s.heads, 576});
    args = host;
    args.latent = device_.put(host.latent);
    SparseLayerArgs::Indexer& indexer = *args.indexer;
    indexer.keys = device_.put(host.indexer->keys);
    indexer.queries = device_.put(host.indexer->queries);
    SelectArgs& select = indexer.select;
    select.score.q = indexer.queries.out_q, select.score.weights = indexer.queries.out_weights;
    select.score.paged.cache = indexer.keys.cache;
    select.score.paged.block_table = select.map.block_table = device_.put(select.map.block_table);
    select.score.lengths = device_.put(select.score.lengths);
    select.slots = device_.put(select.slots);
    args.attention.kv = args.latent.cache;
    args.attention.rows = Slots{select.slots, {}};
    args.attention.q = device_.put(args.attention.q);
    args.attention.out = device_.put(args.attention.out), args.attention.lse = device_.put(args.attention.lse);
  }
  LayerProblem::Result result() {
    cuda_good(cudaDeviceSynchronize());
    for (const TensorView& view : {host.latent.cache.pages, host.indexer->keys.cache.pages, host.indexer->select.slots,
                                   host.attention.out, host.attention.lse})
      device_.take_back(view);
    return call.result();
  }
  TensorView put(const TensorView& view) { return device_.put(view); }

  LayerCall call;
  SparseLayerArgs host, args;

 private:
  std::vector<bf16> q_;
  OnDevice device_;
};

LayerShape shape_of(KvFormat format, std::int64_t page_size) {
  LayerShape shape{.page_size = page_size};
  shape.heads = 16, shape.index_heads = 32;
  shape.kv_format = format, shape.index_format = IndexFormat::fp8;
  return shape;
}

// First in this program: no other test has prepared the device yet.
TEST_F(PipelineOnCuda, FirstLaunchEverInACapture) {
  const Backend cuda = Backend::cuda(0);
  const LayerProblem problem(shape_of(KvFormat::fp8_ds_mla, 64));
  DeviceLayer layer(cuda, problem);
  const CudaWorkspace workspace(cuda, layer.call.workspace_bytes(cuda));
  const OwnStream stream;
  const Stream on{stream.handle};
  const SparseLayerArgs& args = layer.args;
  EXPECT_THROW(write_latent(cuda, args.latent, on), InvalidArgument);
  EXPECT_THROW(write_index_keys(cuda, args.indexer->keys, on), InvalidArgument);
  EXPECT_THROW(sparse_layer(cuda, args, workspace, on), InvalidArgument);
  cuda.prepare();
  const Graph graph(stream.handle, [&] { sparse_layer(cuda, args, workspace, on); });
  graph.replay(stream.handle), stream.wait();
  const LayerProblem::Result replayed = layer.result();
  for (float x : replayed.out) ASSERT_TRUE(std::isfinite(x));
  sparse_layer(cuda, args, workspace, on), stream.wait();
  EXPECT_TRUE(layer.result() == replayed);
}

TEST_F(PipelineOnCuda, EveryFunctionHasAKernelHere) {
  for (const std::string function :
       {"write_latent", "gather_latent", "gather_index_keys", "write_index_keys", "write_layer", "index_queries",
        "index_scores", "topk", "positions_to_slots", "expand_pools", "topk_candidates", "merge_topk", "shard_slots",
        "attention", "combine"}) {
    bool found = false;
    for (const KernelInfo& kernel : kernels())
      found |= kernel.backend == BackendKind::cuda && kernel.runs_here && kernel.name.starts_with(function + "_cuda");
    EXPECT_TRUE(found) << function;
  }
}

TEST_F(PipelineOnCuda, AutoIsTheGpu) {
  if (std::getenv("SIEVEMLA_BACKEND")) GTEST_SKIP() << "SIEVEMLA_BACKEND says otherwise";
  EXPECT_EQ(Backend::best().kind(), BackendKind::cuda);
}

TEST_F(PipelineOnCuda, ALayerIsItsStagesInOrder) {
  const Backend cuda = backend();
  for (const KvFormat format : {KvFormat::bf16, KvFormat::fp8_ds_mla})
    for (const std::int64_t page : {16, 48, 64, 176}) {
      const LayerProblem problem(shape_of(format, page));
      DeviceLayer hand(cuda, problem);
      const SparseLayerArgs& a = hand.args;
      const LayerShape& s = problem.s;
      write_latent(cuda, a.latent);
      write_index_keys(cuda, a.indexer->keys);
      index_queries(cuda, a.indexer->queries);
      std::vector<float> logits(static_cast<std::size_t>(s.tokens() * s.context), kNan);
      IndexScoreArgs score = a.indexer->select.score;
      score.logits = hand.put(tensor(logits.data(), {s.tokens(), s.context}));
      index_scores(cuda, score, {});
      const CudaWorkspace topk_room(cuda, topk_workspace_bytes(cuda, {s.tokens(), s.context, s.topk}));
      TopkArgs select;
      select.scores = score.logits, select.lengths = score.lengths;
      select.slots = a.indexer->select.slots, select.map = a.indexer->select.map;
      topk(cuda, select, topk_room);
      const CudaWorkspace room(cuda, attention_workspace_bytes(cuda, {s.tokens(), s.heads, s.topk}));
      attention(cuda, a.attention, room);
      const LayerProblem::Result want = hand.result();

      LayerCall reference(problem);  // caches are the same bytes wherever they were written
      reference.run(Backend::reference());
      EXPECT_EQ(want.kv, reference.kv);
      EXPECT_EQ(want.index, reference.index);
      for (const std::int64_t budget : {std::int64_t{0}, 4 * s.context * 4, kScoreBudgetBytes}) {
        DeviceLayer layer(cuda, problem);
        layer.args.indexer->select.score_budget_bytes = budget;
        const CudaWorkspace workspace(cuda, layer.call.workspace_bytes(cuda));
        sparse_layer(cuda, layer.args, workspace);
        EXPECT_TRUE(layer.result() == want) << info(format).name << ", page " << page << ", budget " << budget;
      }
    }
}

TEST_F(PipelineOnCuda, GraphReplayedWithNewLengths) {
  const Backend cuda = backend();
  const LayerProblem problem(shape_of(KvFormat::fp8_ds_mla, 64));
  DeviceLayer layer(cuda, problem);
  const CudaWorkspace workspace(cuda, layer.call.workspace_bytes(cuda));
  const OwnStream stream;
  const Stream on{stream.handle};
  const Graph graph(stream.handle, [&] { sparse_layer(cuda, layer.args, workspace, on); });
  const TensorView& lengths = layer.args.indexer->select.score.lengths;
  Random random(12);
  for (int i = 0; i < 1000; ++i) {
    Ids now = problem.lengths;
    for (std::int32_t& n : now) n = static_cast<std::int32_t>(random.below(n + 2)) - 1;
    cuda_copy(lengths.data, now.data(), std::ssize(now) * 4);
    graph.replay(stream.handle), stream.wait();
    const LayerProblem::Result replayed = layer.result();
    sparse_layer(cuda, layer.args, workspace, on), stream.wait();
    ASSERT_TRUE(layer.result() == replayed) << i;
  }
}

std::int64_t free_bytes() {
  std::size_t free = 0, total = 0;
  cuda_good(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(free);
}

// Enough keys for many chunks: the selection does not depend on the budget, and all that it takes beside its inputs is
// at most the budget (or a row, if that is more) and as much as the outputs.
TEST_F(PipelineOnCuda, SelectionAmongAMillionKeys) {
  const Backend cuda = backend();
  constexpr std::int64_t kKeys = 1 << 20, kRows = 4096, kHeads = 32, kTopk = 2048, kPage = 64;
  Random random(13);
  std::vector<std::uint8_t> keys(kKeys * kIndexKeyBytes), q(kRows * kHeads * kIndexDim);
  for (std::int64_t page = 0; page < kKeys / kPage; ++page) {
    std::uint8_t* const at = keys.data() + page * kPage * kIndexKeyBytes;
    for (std::int64_t i = 0; i < kPage * kIndexDim; i += 8) {
      const std::uint64_t bits = random.bits() & 0xBFBFBFBFBFBFBFBFu;  // no NaN
      std::memcpy(at + i, &bits, 8);
    }
    for (std::int64_t i = 0; i < kPage; ++i) {
      const float scale = 1 + random.uniform_f32() / 2;
      std::memcpy(at + kPage * kIndexDim + 4 * i, &scale, 4);
    }
  }
  for (std::uint8_t& code : q) code = static_cast<std::uint8_t>(random.bits() & 0xBF);
  const std::vector<float> weights = random.f32s(kRows * kHeads);
  Ids table(kKeys / kPage), lengths;
  std::iota(table.begin(), table.end(), 0);
  for (std::int64_t t = 0; t < kRows; ++t) lengths.push_back(static_cast<std::int32_t>(kKeys - t * 200));
  OnDevice device(cuda.device());
  SelectArgs args;
  args.score.q = device.put(tensor(q.data(), {kRows, kHeads, kIndexDim}));
  args.score.weights = device.put(tensor(weights.data(), {kRows, kHeads}));
  args.score.paged.cache.pages = device.put(tensor(keys.data(), {kKeys / kPage, kPage, kIndexKeyBytes}));
  args.score.paged.block_table = device.put(tensor(table.data(), {1, kKeys / kPage}));
  args.score.lengths = device.put(tensor(lengths.data(), {kRows}));
  args.width = kKeys;
  std::optional<Ids> want;
  for (const std::int64_t budget : {std::int64_t{256} << 20, kScoreBudgetBytes, std::int64_t{1} << 20}) {
    args.score_budget_bytes = budget;
    Ids positions(kRows * kTopk, kUnwritten);
    const TensorView out = tensor(positions.data(), {kRows, kTopk});
    args.positions = device.put(out);
    const std::int64_t bytes = select_workspace_bytes(cuda, {kRows, kHeads, kKeys, kTopk, budget});
    const CudaWorkspace workspace(cuda, bytes);
    std::int64_t least_taken = INT64_MAX;  // of three calls: others may share the device, but not each time
    for (int i = 0; i < 3; ++i) {
      const std::int64_t before = free_bytes();
      select(cuda, args, workspace);
      least_taken = std::min(least_taken, before - free_bytes());
    }
    device.take_back(out);
    EXPECT_LE(least_taken, 0) << budget;
    EXPECT_LE(bytes, std::max(budget, kKeys * 4) + kRows * kTopk * 4) << budget;
    for (std::int64_t t = 0; t < kRows; ++t) {
      const auto row = positions.begin() + t * kTopk;
      EXPECT_TRUE(*row >= 0 && std::adjacent_find(row, row + kTopk, std::greater_equal<>()) == row + kTopk);
    }
    EXPECT_EQ(positions, want.value_or(positions)) << budget;
    want = positions;
  }
}

// Long rows in many, of which the device keeps shortlists alone where it can.
struct LongRows {
  static constexpr std::int64_t kKeys = 65600, kRows = 700, kTopk = 2048, kPage = 64, kPages = kKeys / kPage;
  static_assert(kKeys > 8 * base::kShortlist, "shorter rows are chosen from all their scores");
  enum Kind { fair, sample_low, sample_high, equal, rising, odd };
  Kind kind = fair;
  std::int64_t heads = 32, requests = 1;  // more than one: each row names its own
  bool contiguous = false, slots = false;
};

// Of key `key` of a request.
float scale_of(LongRows::Kind kind, std::int64_t key, bool sampled) {
  switch (kind) {
    case LongRows::sample_low: return sampled ? 1e-3f : 1.f;
    case LongRows::sample_high: return sampled ? 1e3f : 1.f;
    case LongRows::rising: return 1 + static_cast<float>(key);
    case LongRows::odd: return key % 5 == 0 ? kNan : key % 61 == 0 ? (key % 2 ? HUGE_VALF : -HUGE_VALF) : 1.f;
    default: return 1.f;
  }
}

// The ids are those of all the scores, however well the sample of the keys tells of the others.
void expect_one_selection(const Backend& cuda, const LongRows& shape) {
  constexpr std::int64_t kKeys = LongRows::kKeys, kRows = LongRows::kRows, kTopk = LongRows::kTopk,
                         kPage = LongRows::kPage, kPages = LongRows::kPages, kMostStart = 100;
  const int stride = static_cast<int>(base::sample_stride(kKeys));
  std::vector<bool> sampled(kKeys + 16 * static_cast<std::size_t>(stride));
  for (int column = 0; column < base::samples_of(kKeys, stride); ++column)
    sampled[static_cast<std::size_t>(base::sample_key(column, stride) + column % base::kSampleKeys)] = true;
  Random random(14);
  const auto codes = [&](std::int64_t n) {
    std::vector<std::uint8_t> out(static_cast<std::size_t>(n));
    for (std::uint8_t& code : out) code = static_cast<std::uint8_t>(random.bits() & 0xBF);  // no NaN
    return out;
  };
  const std::vector<std::uint8_t> q = codes(kRows * shape.heads * kIndexDim);
  std::vector<float> weights = random.f32s(kRows * shape.heads);
  for (float& weight : weights) weight = std::abs(weight) + 0.01f;
  Ids lengths(kRows, kKeys);
  const std::int64_t some[] = {0, 1, 15, 2047, 2048, 2049, base::kShortlist, base::kShortlist + 1, 9000, 20000, 65599};
  for (std::size_t i = 0; i < std::size(some); ++i) lengths[64 * i + 3] = static_cast<std::int32_t>(some[i]);
  OnDevice device(cuda.device());
  SelectArgs args;
  args.score.q = device.put(tensor(q.data(), {kRows, shape.heads, kIndexDim}));
  args.score.weights = device.put(tensor(weights.data(), {kRows, shape.heads}));
  args.score.lengths = device.put(tensor(lengths.data(), {kRows}));
  args.width = kKeys;

  std::vector<std::uint8_t> keys;
  std::vector<float> scales;
  Ids starts, table, row_request;
  if (shape.contiguous) {
    keys = codes((kKeys + kMostStart) * kIndexDim);
    for (std::int64_t key = 0; key < kKeys + kMostStart; ++key) scales.push_back(scale_of(shape.kind, key, false));
    for (std::int64_t t = 0; t < kRows; ++t) starts.push_back(static_cast<std::int32_t>(random.below(kMostStart + 1)));
    args.score.contiguous = {device.put(tensor(keys.data(), {kKeys + kMostStart, kIndexDim})),
                             device.put(tensor(scales.data(), {kKeys + kMostStart})),
                             device.put(tensor(starts.data(), {kRows}))};
  } else {
    keys = codes(kKeys * kIndexKeyBytes);
    if (shape.kind == LongRows::equal) std::fill(keys.begin(), keys.end(), std::uint8_t{0x38});
    for (std::int64_t key = 0; key < kKeys; ++key) {
      const float scale = scale_of(shape.kind, key, sampled[static_cast<std::size_t>(key)]);
      std::memcpy(keys.data() + key / kPage * kPage * kIndexKeyBytes + kPage * kIndexDim + 4 * (key % kPage), &scale,
                  4);
    }
    for (std::int64_t i = 0; i < shape.requests * kPages; ++i)  // each begins with another page
      table.push_back(static_cast<std::int32_t>((i + i / kPages * 333) % kPages));
    table[7] = table[300] = -1;
    args.score.paged.cache.pages = device.put(tensor(keys.data(), {kPages, kPage, kIndexKeyBytes}));
    args.score.paged.block_table = device.put(tensor(table.data(), {shape.requests, kPages}));
    if (shape.requests > 1) {
      for (std::int64_t t = 0; t < kRows; ++t) row_request.push_back(static_cast<std::int32_t>(t * 5 % shape.requests));
      args.score.paged.row_request = device.put(tensor(row_request.data(), {kRows}));
    }
  }
  if (shape.slots)
    args.map = {
        .block_table = args.score.paged.block_table, .row_request = args.score.paged.row_request, .page_size = kPage};

  constexpr std::int64_t kBudget = std::int64_t{300} << 16, kWhole = kRows * kKeys * 4;
  std::optional<Ids> want;
  for (const std::int64_t budget : {kWhole, kBudget, 2 * kBudget}) {
    args.score_budget_bytes = budget;
    Ids ids(kRows * kTopk, kUnwritten);
    const TensorView out = tensor(ids.data(), {kRows, kTopk});
    (shape.slots ? args.slots : args.positions) = device.put(out);
    const CudaWorkspace workspace(cuda, select_workspace_bytes(cuda, {kRows, shape.heads, kKeys, kTopk, budget}));
    select(cuda, args, workspace);
    select(cuda, args, workspace);  // and again, on what the first left
    device.take_back(out);
    EXPECT_TRUE(ids == want.value_or(ids)) << budget;
    want = ids;
  }
}

TEST_F(PipelineOnCuda, SelectionWhateverTheSampleSays) {
  for (const LongRows::Kind kind : {LongRows::fair, LongRows::sample_low, LongRows::sample_high, LongRows::equal,
                                    LongRows::rising, LongRows::odd}) {
    SCOPED_TRACE(kind);
    expect_one_selection(backend(), {.kind = kind});
  }
}

TEST_F(PipelineOnCuda, SelectionOfLongRowsInEveryForm) {
  const Backend cuda = backend();
  for (const LongRows& shape :
       {LongRows{.heads = 64}, LongRows{.kind = LongRows::odd, .heads = 64, .slots = true}, LongRows{.requests = 3},
        LongRows{.heads = 64, .requests = 3, .slots = true}, LongRows{.contiguous = true},
        LongRows{.kind = LongRows::odd, .heads = 64, .contiguous = true}}) {
    SCOPED_TRACE(testing::Message() << shape.heads << " heads, keys " << shape.kind << ", " << shape.requests
                                    << " requests, slots " << shape.slots << ", contiguous " << shape.contiguous);
    const Deadline deadline(std::chrono::seconds(60), "a selection of long rows");
    expect_one_selection(cuda, shape);
  }
}

// ---- all stages, over and over ----------------------------------------------------------------------

// Calls that can be launched any number of times, and what each of them writes.
class Standing {
 public:
  explicit Standing(const Backend& cuda) : cuda_(cuda), device_(cuda.device()), random_(21) {
    q_ = random_.bf16s(kMostTokens * 64 * 576);
    q_there_ = device_.put(tensor(q_.data(), {kMostTokens * 64 * 576}));
    for (const KvFormat format : {KvFormat::bf16, KvFormat::fp8_ds_mla, KvFormat::fp8_nope}) {
      const KvCache cache = latent_cache(format);
      for (const auto& [tokens, heads] : {std::pair{1, 64}, {3, 8}, {16, 64}, {63, 16}, {64, 8}, {65, 64}, {130, 16}})
        add_attention(cache, tokens, heads);
    }
    add_attention(latent_cache(KvFormat::fp8_ds_mla), kMostTokens, 64);
    for (const auto& [rows, each] : {std::pair{4, 1}, {6, 3}, {60, 20}}) add_scores(rows, each);
    for (const auto& [rows, width] : {std::pair{1, 131072}, {3, 40000}, {300, 3000}, {150, 12000}})
      add_topk(rows, width);
    add_writer();
  }

  struct Call {
    std::function<void(Stream)> launch;
    TensorView out;  // on the device
    std::vector<std::byte> first{};
  };
  std::vector<Call> calls;

  std::vector<std::byte> result(const Call& call) const {
    std::vector<std::byte> bytes(static_cast<std::size_t>(call.out.elements() * size_of(call.out.dtype)));
    cuda_copy(bytes.data(), call.out.data, std::ssize(bytes));
    return bytes;
  }

 private:
  static constexpr std::int64_t kMostTokens = 512, kSlots = 4096;

  template <class T>
  TensorView keep(std::vector<T> values, std::initializer_list<std::int64_t> shape) {
    return device_.put(tensor(values.data(), shape));
  }
  TensorView output(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view = tensor(static_cast<const std::uint8_t*>(nullptr), shape, cuda_.device());
    view.dtype = dtype;
    memory_.push_back(cuda::Memory::on(cuda_.device(), view.elements() * size_of(dtype)));
    view.data = memory_.back().data();
    return view;
  }
  Workspace room(std::int64_t bytes) {
    rooms_.push_back(std::make_unique<CudaWorkspace>(cuda_, bytes));
    return *rooms_.back();
  }
  Ids some(std::int64_t n, std::int64_t limit) {
    Ids ids;
    for (std::int64_t i = 0; i < n; ++i) ids.push_back(static_cast<std::int32_t>(random_.below(limit)));
    return ids;
  }

  KvCache latent_cache(KvFormat format) {
    KvCache cache{format, 512, format == KvFormat::fp8_nope ? 0 : 64, {}};
    const DType storage = info(format).storage;
    const std::int64_t row = info(format).row_bytes(512, cache.rope);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(kSlots * row));
    cache.pages = tensor(bytes.data(), {kSlots / 64, 64, row});
    cache.pages.dtype = storage;
    cache.pages.shape[2] /= size_of(storage);
    cache.pages.stride = {64 * cache.pages.dim(2), cache.pages.dim(2), 1};
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      const std::vector<float> x = random_.f32s(576);
      kv::store_row(cache, slot, x.data(), x.data() + 512, ScaleRule::arbitrary);
    }
    cache.pages = device_.put(cache.pages);
    return cache;
  }

  void add_attention(const KvCache& cache, std::int64_t tokens, std::int64_t heads) {
    const std::int64_t topk = tokens > 64 ? 300 : 2048, width = 512 + cache.rope;
    AttentionArgs args;
    args.q = q_there_;
    args.q.rank = 3, args.q.shape = {tokens, heads, width}, args.q.stride = {heads * width, width, 1};
    args.kv = cache;
    args.rows = Slots{keep(some(tokens * topk, kSlots), {tokens, topk}), keep(some(tokens, topk + 1), {tokens})};
    args.scale = 0.1f;
    args.out = output(DType::bf16, {tokens, heads, 512});
    const Workspace workspace = room(attention_workspace_bytes(cuda_, {tokens, heads, topk, 512, cache.rope}));
    calls.push_back({[=, this](Stream stream) { attention(cuda_, args, workspace, stream); }, args.out});
  }

  void add_scores(std::int64_t rows, std::int64_t each) {
    constexpr std::int64_t kHeads = 32, kContext = 4000, kPages = (kContext + 63) / 64;
    std::vector<std::uint8_t> keys(static_cast<std::size_t>(rows / each * kPages * 64 * kIndexKeyBytes));
    for (auto& code : keys) code = static_cast<std::uint8_t>(random_.bits() & 0xBF);
    std::vector<std::uint8_t> q(static_cast<std::size_t>(rows * kHeads * kIndexDim));
    for (auto& code : q) code = static_cast<std::uint8_t>(random_.bits() & 0xBF);
    Ids table(static_cast<std::size_t>(rows / each * kPages));
    std::iota(table.begin(), table.end(), 0);
    IndexScoreArgs args;
    args.q = keep(q, {rows, kHeads, kIndexDim});
    args.weights = keep(random_.f32s(rows * kHeads), {rows, kHeads});
    args.paged.cache.pages = keep(keys, {rows / each * kPages, 64, kIndexKeyBytes});
    args.paged.block_table = keep(table, {rows / each, kPages});
    args.lengths = keep(some(rows, kContext + 1), {rows});
    args.logits = output(DType::f32, {rows, kContext});
    const Workspace workspace = room(index_scores_workspace_bytes(cuda_, {rows, kHeads, kContext}));
    calls.push_back({[=, this](Stream stream) { index_scores(cuda_, args, workspace, stream); }, args.logits});
  }

  void add_topk(std::int64_t rows, std::int64_t width) {
    TopkArgs args;
    args.scores = keep(random_.f32s(rows * width), {rows, width});
    Ids lengths = some(rows, width + 1);
    lengths[0] = static_cast<std::int32_t>(width);
    args.lengths = keep(lengths, {rows});
    args.positions = output(DType::i32, {rows, 2048});
    const Workspace workspace = room(topk_workspace_bytes(cuda_, {rows, width, 2048}));
    calls.push_back({[=, this](Stream stream) { topk(cuda_, args, workspace, stream); }, args.positions});
  }

  void add_writer() {
    constexpr std::int64_t kTokens = 100;
    std::vector<std::int32_t> slots;
    for (const std::int64_t slot : random_.distinct(kTokens, 2 * kTokens))
      slots.push_back(static_cast<std::int32_t>(slot));
    WriteLatentArgs args;
    args.latent = keep(random_.f32s(kTokens * 512), {kTokens, 512});
    args.rope = keep(random_.f32s(kTokens * 64), {kTokens, 64});
    args.slots = keep(slots, {kTokens});
    args.cache = {KvFormat::fp8_ds_mla, 512, 64, output(DType::u8, {4, 64, 656})};
    cuda_good(cudaMemset(args.cache.pages.data, 0, 4 * 64 * 656));
    calls.push_back({[=, this](Stream stream) { write_latent(cuda_, args, stream); }, args.cache.pages});
  }

  const Backend cuda_;
  OnDevice device_;
  Random random_;
  std::vector<bf16> q_;
  TensorView q_there_;
  std::vector<cuda::Memory> memory_;
  std::vector<std::unique_ptr<CudaWorkspace>> rooms_;
};

// A call stays on its stream: it has one workspace.
TEST_F(PipelineOnCuda, Case24TwentyThousandLaunchesOnTwoStreams) {
  const Backend cuda = backend();
  Standing standing(cuda);
  const OwnStream streams[2];
  cuda_good(cudaDeviceSynchronize());
  for (Standing::Call& call : standing.calls) {
    const Deadline deadline(std::chrono::seconds(10), "a first launch");
    call.launch(Stream{streams[0].handle}), streams[0].wait();
    call.first = standing.result(call);
  }
  Random random(9);
  long made = 0;
  for (int round = 0; round < 20; ++round) {
    const Deadline deadline(std::chrono::seconds(10), "round " + std::to_string(round));
    const long before = allocations();
    for (int i = 0; i < 1000; ++i) {
      const auto which = static_cast<std::size_t>(random.below(std::ssize(standing.calls)));
      standing.calls[which].launch(Stream{streams[which % 2].handle});
    }
    made += allocations() - before;
    streams[0].wait(), streams[1].wait();
    for (std::size_t i = 0; i < standing.calls.size(); ++i)
      ASSERT_TRUE(standing.result(standing.calls[i]) == standing.calls[i].first) << "call " << i;
  }
  EXPECT_EQ(made, 0) << "operator new";
}

}  // namespace
}  // namespace sievemla::test
