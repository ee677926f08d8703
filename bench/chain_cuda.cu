// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bench/chain_cuda.cu -- times the library's decode stages one after another on a CUDA device.
//
//   chain_cuda [KEY...]   keys of the peer benchmark, chain.*, step.* and select.*; with .graph inside a CUDA graph.
//                         The selected ids are compared with the reference's first: exit 1 on a difference. Stages
//                         alone, too.
//   nvcc -std=c++20 -O3 -arch=sm_90 -Iinclude bench/chain_cuda.cu BUILD/src/libsievemla.a -lgomp -o chain_cuda
#include <memory>
#include <string>

#include "cuda_bench.cuh"
#include "cuda_timer.cuh"
#include "sievemla/attention.h"
#include "sievemla/indexer.h"
#include "sievemla/pipeline.h"
#include "sievemla/topk.h"

namespace {
using namespace sievemla;

constexpr std::int64_t kPage = 64, kRowBytes = 656, kQueryDim = 576, kLatent = 512;
constexpr Device kCuda{DeviceType::cuda, 0};

template <class T>
TensorView device_tensor(std::initializer_list<std::int64_t> shape, T* data = nullptr) {
  const TensorView view = tensor(data, shape, kCuda);
  if (data) return view;
  return tensor(make<T>(static_cast<std::size_t>(view.elements())), shape, kCuda);
}

// Bytes of `bits` that are drawn, the others being those of `rest`: e4m3 codes, small floats.
__global__ void fill(unsigned* words, std::size_t n, unsigned mask, unsigned rest, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    unsigned long long z = (i + 1) * 0x9E3779B97F4A7C15ull + seed;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    words[i] = (static_cast<unsigned>(z >> 32) & mask) | rest;
  }
}
void fill_all(const TensorView& x, unsigned mask, unsigned rest, unsigned seed) {
  fill<<<2048, 256>>>(static_cast<unsigned*>(x.data), static_cast<std::size_t>(x.elements() * size_of(x.dtype) / 4),
                      mask, rest, seed);
}
constexpr unsigned kCodes = 0xBFBFBFBFu;                         // e4m3 below 2 in magnitude
constexpr unsigned kUnit = 0x807FFFFFu, kOne = 0x3F000000u;      // f32 in +-[0.5, 1)
constexpr unsigned kBf16 = 0x807F807Fu, kBf16One = 0x3F003F00u;  // bf16, likewise

// The index cache: codes, then scales, page by page.
__global__ void fill_scales(unsigned char* pages, std::int64_t n) {
  const std::int64_t page = blockIdx.x;
  if (page >= n) return;
  auto* scales = reinterpret_cast<float*>(pages + page * kPage * kIndexKeyBytes + kPage * kIndexDim);
  if (threadIdx.x < kPage)
    scales[threadIdx.x] = 0.03f + 0.0001f * static_cast<float>((page * 64 + threadIdx.x) * 2654435761u >> 8 & 255);
}
__global__ void fill_latent_scales(unsigned char* rows, std::int64_t n) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    unsigned char* row = rows + i * kRowBytes;
    for (int g = 0; g < 4; ++g) reinterpret_cast<float*>(row + 512)[g] = 0.05f;
    for (int j = 0; j < 32; ++j)
      reinterpret_cast<unsigned*>(row + 528)[j] = (reinterpret_cast<unsigned*>(row + 528)[j] & kBf16) | kBf16One;
  }
}

struct Chain {
  Backend backend = Backend::cuda();
  std::int64_t heads, batch, ctx, k;
  IndexScoreArgs score;
  TopkArgs select;
  AttentionArgs attend;
  Workspace scoring, selecting, attending;
  std::vector<void*> owned;

  Workspace workspace(std::int64_t bytes) {
    const Workspace w{make<char>(static_cast<std::size_t>(bytes)), bytes};
    workspace_init(backend, w);
    return w;
  }
  Chain(std::int64_t h, std::int64_t attend_heads, std::int64_t b, std::int64_t c, std::int64_t topk)
      : heads(h), batch(b), ctx(c), k(topk) {
    backend.prepare();
    const std::int64_t pages = batch * ctx / kPage;
    std::vector<int> table(static_cast<std::size_t>(pages)),
        lengths(static_cast<std::size_t>(batch), static_cast<int>(ctx));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int>(i);
    Random random{5};
    for (std::size_t i = table.size(); i-- > 1;)
      std::swap(table[i], table[static_cast<std::size_t>(random.below(static_cast<int>(i + 1)))]);
    auto upload = [](const std::vector<int>& x) {
      int* d = make<int>(x.size());
      GOOD(cudaMemcpy(d, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
      return d;
    };
    score.q = device_tensor<std::uint8_t>({batch, heads, kIndexDim});
    score.weights = device_tensor<float>({batch, heads});
    score.paged.cache = {IndexFormat::fp8, device_tensor<std::uint8_t>({pages, kPage, kIndexKeyBytes})};
    score.paged.block_table = device_tensor<int>({batch, ctx / kPage}, upload(table));
    score.lengths = device_tensor<int>({batch}, upload(lengths));
    score.logits = device_tensor<float>({batch, ctx});
    score.fill = false;
    fill_all(score.q, kCodes, 0, 1), fill_all(score.weights, kUnit, kOne, 2);
    fill_all(score.paged.cache.pages, kCodes, 0, 3);
    fill_scales<<<static_cast<unsigned>(pages), 64>>>(static_cast<unsigned char*>(score.paged.cache.pages.data), pages);
    select.scores = score.logits, select.lengths = score.lengths;
    select.positions = device_tensor<int>({batch, k});
    select.map.block_table = score.paged.block_table, select.map.page_size = kPage;
    scoring = workspace(std::max<std::int64_t>(index_scores_workspace_bytes(backend, {batch, heads, ctx}), 256));
    selecting = workspace(std::max<std::int64_t>(topk_workspace_bytes(backend, {batch, ctx, k}), 256));
    if (attend_heads == 0) return;
    select.slots = device_tensor<int>({batch, k});
    attend.q = device_tensor<bf16>({batch, attend_heads, kQueryDim});
    attend.kv.format = KvFormat::fp8_ds_mla;
    attend.kv.pages = device_tensor<std::uint8_t>({pages, kPage, kRowBytes});
    attend.rows = Slots{select.slots, {}};
    attend.scale = 0.0417f;
    attend.out = device_tensor<bf16>({batch, attend_heads, kLatent});
    fill_all(attend.q, kBf16, kBf16One, 4), fill_all(attend.kv.pages, kCodes, 0, 6);
    fill_latent_scales<<<2048, 256>>>(static_cast<unsigned char*>(attend.kv.pages.data), pages * kPage);
    attending = workspace(attention_workspace_bytes(backend, {batch, attend_heads, k}));
  }
  void scores(cudaStream_t s) { index_scores(backend, score, scoring, {s}); }
  void ids(cudaStream_t s) { topk(backend, select, selecting, {s}); }
  void rows(cudaStream_t s) { attention(backend, attend, attending, {s}); }
  void call(cudaStream_t s) {
    scores(s), ids(s);
    if (attend.out) rows(s);
  }
  bool right() {
    call(nullptr);
    GOOD(cudaDeviceSynchronize());
    const std::int64_t some = std::min<std::int64_t>(batch, 4);
    std::vector<float> logits(static_cast<std::size_t>(some * ctx));
    std::vector<int> got(static_cast<std::size_t>(some * k)), want(got.size()),
        lengths(static_cast<std::size_t>(some), static_cast<int>(ctx));
    GOOD(cudaMemcpy(logits.data(), score.logits.data, logits.size() * 4, cudaMemcpyDeviceToHost));
    GOOD(cudaMemcpy(got.data(), select.positions.data, got.size() * 4, cudaMemcpyDeviceToHost));
    TopkArgs host;
    host.scores = tensor(logits.data(), {some, ctx}), host.lengths = tensor(lengths.data(), {some});
    host.positions = tensor(want.data(), {some, k});
    const Backend reference = Backend::reference();
    std::vector<char> scratch(static_cast<std::size_t>(topk_workspace_bytes(reference, {some, ctx, k})) +
                              kWorkspaceAlign);
    void* space = scratch.data();
    std::size_t bytes = scratch.size();
    std::align(kWorkspaceAlign, bytes - kWorkspaceAlign, space, bytes);
    topk(reference, host, {space, static_cast<std::int64_t>(bytes)});
    return got == want;
  }
};

// Scores and selection of many rows of one request, in the default budget; the ids are compared with those from all
// scores at once.
int run_prefill(const std::string& key, Timer& timer, std::int64_t h, std::int64_t rows, std::int64_t keys,
                std::int64_t k) {
  Chain chain(h, 0, 1, keys, k);  // for its keys
  const Backend& backend = chain.backend;
  SelectArgs args;
  args.score = chain.score, args.score.logits = {}, args.width = keys;
  args.score.q = device_tensor<std::uint8_t>({rows, h, kIndexDim});
  args.score.weights = device_tensor<float>({rows, h});
  fill_all(args.score.q, kCodes, 0, 11), fill_all(args.score.weights, kUnit, kOne, 12);
  const std::vector<int> lengths(static_cast<std::size_t>(rows), static_cast<int>(keys));
  args.score.lengths = device_tensor<int>({rows});
  GOOD(cudaMemcpy(args.score.lengths.data, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice));
  args.positions = device_tensor<int>({rows, k});
  std::vector<int> ids[2];
  Workspace workspace;
  for (const bool whole : {true, false}) {
    args.score_budget_bytes = whole ? rows * keys * 4 : kScoreBudgetBytes;
    workspace = chain.workspace(select_workspace_bytes(backend, {rows, h, keys, k, args.score_budget_bytes}));
    GOOD(cudaMemset(args.positions.data, 0x7F, static_cast<std::size_t>(rows * k * 4)));
    select(backend, args, workspace);
    ids[whole].resize(static_cast<std::size_t>(rows * k));
    GOOD(cudaMemcpy(ids[whole].data(), args.positions.data, ids[whole].size() * 4, cudaMemcpyDeviceToHost));
  }
  const bool right = ids[0] == ids[1];
  const Timed time = timer.flushed([&](cudaStream_t s) { select(backend, args, workspace, {s}); });
  std::printf("%s: %.1f us%s\n", key.c_str(), time.us, right ? "" : ", WRONG IDS");
  return right ? 0 : 1;
}

int run(const std::string& key, Timer& timer) {
  long h = 0, H = 0, b = 0, ctx = 0, k = 0;
  if (std::sscanf(key.c_str(), "select.prefill.fp8.h%ld.s%ld.kv%ld.k%ld", &h, &b, &ctx, &k) == 4)
    return run_prefill(key, timer, h, b, ctx, k);
  if (std::sscanf(key.c_str(), "chain.fp8.h%ld.b%ld.ctx%ld.k%ld", &h, &b, &ctx, &k) != 4 &&
      std::sscanf(key.c_str(), "step.fp8.h%ld.H%ld.b%ld.ctx%ld.k%ld", &h, &H, &b, &ctx, &k) != 5) {
    std::printf("no such key: %s\n", key.c_str());
    return 2;
  }
  Chain chain(h, H, b, ctx, k);
  const bool right = chain.right();
  auto time = [&](const char* what, auto&& call) {
    std::printf("  %s %.1f us flushed, %.1f in a graph\n", what, timer.flushed(call).us, timer.graph(call).us);
  };
  std::printf("%s%s\n", key.c_str(), right ? "" : ": WRONG IDS");
  time("together", [&](cudaStream_t s) { chain.call(s); });
  time("scores", [&](cudaStream_t s) { chain.scores(s); });
  time("top-k", [&](cudaStream_t s) { chain.ids(s); });
  if (H > 0) time("attention", [&](cudaStream_t s) { chain.rows(s); });
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> keys(argv + 1, argv + argc);
  if (keys.empty())
    keys = {"chain.fp8.h32.b1.ctx131072.k2048.graph", "chain.fp8.h32.b64.ctx65536.k2048",
            "step.fp8.h32.H64.b1.ctx131072.k2048.graph", "step.fp8.h32.H64.b64.ctx65536.k2048",
            "select.prefill.fp8.h32.s4096.kv131072.k2048"};
  Timer timer;
  int worst = 0;
  for (const std::string& key : keys) worst = std::max(worst, run(key, timer));
  return worst;
}
