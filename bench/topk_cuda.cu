// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bench/topk_cuda.cu -- checks and times the CUDA top-k kernels alone: no library, no dependency.
//
//   topk_cuda test     random and hostile rows against an exact selection on the host; exit 1 on a difference
//   topk_cuda bench    the keys of the peer benchmark, by number of parts
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/context.cuh"
#include "cuda_bench.cuh"
#include "cuda_timer.cuh"
#include "topk/cuda/kernels.cuh"

namespace {
using namespace sievemla::stage::topk;

struct Arch {
  static constexpr int kSm = 90, kSmemBytes = 99 * 1024;
  static constexpr bool kWarpgroupMma = false;  // no shortlists
  static constexpr int kCluster = 8;
};
const ConfigKernels kKernels = make_kernels<Arch>();

// As the library does it, with any number of parts.
void launch(CudaParams p, cudaStream_t stream = nullptr) {
  if (p.width <= kListEntries) p.parts = 1;
  const SelectKernel& kernel = p.width <= kListEntries ? kKernels.of_list
                               : p.parts > 1           ? kKernels.shared
                                                       : kKernels.alone;
  void* args[] = {&p};
  if (p.parts == kTogether && p.width > kListEntries && p.width <= kMostTogether && !p.starts) {
    GOOD(sievemla::cuda::launch(
        kKernels.together.kernel,
        {std::int64_t{p.rows} * kTogether, kKernels.together.threads, kKernels.together.smem_bytes, 1, kTogether, true},
        stream, args));
    return;
  }
  GOOD(cudaLaunchKernel(kernel.kernel, dim3(static_cast<unsigned>(p.rows) * static_cast<unsigned>(p.parts)),
                        dim3(static_cast<unsigned>(kernel.threads)), args, static_cast<std::size_t>(kernel.smem_bytes),
                        stream));
}

int key_on_host(float x) {
  int bits;
  std::memcpy(&bits, &x, 4);
  const int magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return -0x7F800000;
  return bits < 0 ? -magnitude : magnitude;
}

std::vector<int> select_on_host(const float* scores, std::int64_t n, int k) {
  std::vector<int> ids(static_cast<std::size_t>(k), -1);
  const std::int64_t m = std::min<std::int64_t>(std::max<std::int64_t>(n, 0), k);
  if (m == 0) return ids;
  std::vector<int> keys(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) keys[static_cast<std::size_t>(i)] = key_on_host(scores[i]);
  std::vector<int> sorted = keys;
  std::nth_element(sorted.begin(), sorted.begin() + (m - 1), sorted.end(), std::greater<>());
  const int cut = sorted[static_cast<std::size_t>(m - 1)];
  std::int64_t above = 0;
  for (int key : keys) above += key > cut;
  std::int64_t need = m - above, at = 0;
  for (std::int64_t i = 0; i < n; ++i)
    if (keys[static_cast<std::size_t>(i)] > cut || (keys[static_cast<std::size_t>(i)] == cut && need-- > 0))
      ids[static_cast<std::size_t>(at++)] = static_cast<int>(i);
  return ids;
}

enum Kind {
  normal,
  ties,
  zeros,
  constant,
  near,
  nans,
  infinities,
  mostly_minus_inf,
  tiny,
  wild,
  rising,
  falling,
  cluster,
  kinds
};
const char* kNames[] = {"normal", "ties", "zeros", "constant", "near",    "nans",   "inf",
                        "-inf",   "tiny", "wild",  "rising",   "falling", "cluster"};

float score(Kind kind, Random& random, std::int64_t i, std::int64_t n) {
  auto bits = [](unsigned u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  };
  switch (kind) {
    case ties: return static_cast<float>(random.below(5) - 2) * 0.5f;
    case zeros: return random.below(10) ? (random.below(2) ? 0.f : -0.f) : random.normal();
    case constant: return 1.2345f;
    case near: return bits(0x3F9E0400u + static_cast<unsigned>(random.below(1024)));
    case nans: return random.below(3) ? random.normal() : bits(random.below(2) ? 0x7FC00000u : 0xFF800001u);
    case infinities: return random.below(20) ? random.normal() : (random.below(2) ? INFINITY : -INFINITY);
    case mostly_minus_inf: return random.below(50) ? -INFINITY : random.normal();
    case tiny: return bits(static_cast<unsigned>(random.below(1 << 20)) | (random.below(2) ? 0x80000000u : 0u));
    case wild: return bits(static_cast<unsigned>(random.next()));
    case rising: return static_cast<float>(i);
    case falling: return -static_cast<float>(i);
    case cluster: return random.normal() + (i > n - 3000 ? 3.f : 0.f);
    default: return random.normal();
  }
}

bool check(const char* what, Kind kind, std::vector<int> lengths, int k, int parts, bool ragged, int map,
           std::uint64_t seed) {
  Random random{seed};
  const int rows = static_cast<int>(lengths.size());
  std::int64_t width = 1;
  std::vector<int> starts(lengths.size(), 0);
  for (int t = 0; t < rows; ++t) {
    if (ragged) starts[static_cast<std::size_t>(t)] = random.below(9);
    width = std::max<std::int64_t>(
        width, std::int64_t{lengths[static_cast<std::size_t>(t)]} + starts[static_cast<std::size_t>(t)]);
  }
  const std::int64_t stride = (width + (ragged ? 23 : 3)) / 4 * 4;
  std::vector<float> host(static_cast<std::size_t>(stride * rows), NAN);
  for (int t = 0; t < rows; ++t) {
    float* dirty = host.data() + t * stride;
    for (std::int64_t i = 0; i < stride; ++i) dirty[i] = i % 3 ? INFINITY : NAN;
    for (std::int64_t i = 0; i < lengths[static_cast<std::size_t>(t)]; ++i)
      dirty[starts[static_cast<std::size_t>(t)] + i] = score(kind, random, i, lengths[static_cast<std::size_t>(t)]);
  }
  const int page_size = map == 2 ? 48 : 64;
  const int pages = static_cast<int>((width + page_size - 1) / page_size) + 1, requests = map == 2 ? 2 : rows;
  std::vector<int> table(static_cast<std::size_t>(requests) * static_cast<std::size_t>(pages));
  for (int& page : table) page = random.below(50) ? random.below(1 << 20) : -1;
  std::vector<int> row_request(lengths.size());
  for (int& r : row_request) r = random.below(3) - 0;

  CudaParams p{};
  float* scores = make<float>(host.size());
  GOOD(cudaMemcpy(scores, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  auto upload = [](const std::vector<int>& x) {
    int* d = make<int>(x.size());
    GOOD(cudaMemcpy(d, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
    return d;
  };
  p.scores = scores, p.scores_row = stride, p.width = width;
  int *d_starts = upload(starts), *d_lengths = upload(lengths), *d_table = upload(table),
      *d_request = upload(row_request);
  p.starts = ragged ? d_starts : nullptr, p.lengths = d_lengths;
  p.rows = rows, p.k = k, p.parts = parts, p.ahead = 2;
  const std::size_t ids = static_cast<std::size_t>(rows) * static_cast<std::size_t>(k);
  int* positions = make<int>(ids);
  void* slots = make<std::int64_t>(ids);
  p.out.positions = positions, p.out.positions_row = k;
  if (map) {
    p.out.slots = slots, p.out.slots_row = k, p.out.wide_slots = map == 2;
    p.out.map = {d_table,   pages, requests,         pages, map == 2 ? d_request : nullptr, 1,
                 page_size, 1,     map == 2 ? 3 : 1, 16};
  }
  unsigned* tickets = make<unsigned>(static_cast<std::size_t>(rows), 0);
  p.tickets = tickets;
  p.counts = make<int>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(parts));
  p.lists = make<ListEntry>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(parts) *
                            static_cast<std::size_t>(kListEntries));
  std::vector<int> got(ids), again(ids);
  std::vector<std::int64_t> got_slots(ids);
  bool ok = true;
  for (int repeat = 0; repeat < 2; ++repeat) {
    GOOD(cudaMemset(positions, 0xA5, ids * 4));
    launch(p);
    GOOD(cudaGetLastError());
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy((repeat ? again : got).data(), positions, ids * 4, cudaMemcpyDeviceToHost));
  }
  if (got != again) std::printf("FAIL %s: two runs differ\n", what), ok = false;
  GOOD(cudaMemcpy(got_slots.data(), slots, ids * 8, cudaMemcpyDeviceToHost));
  for (int t = 0; t < rows && ok; ++t) {
    const auto want = select_on_host(host.data() + t * stride + starts[static_cast<std::size_t>(t)],
                                     lengths[static_cast<std::size_t>(t)], k);
    for (int i = 0; i < k && ok; ++i) {
      const std::size_t at = static_cast<std::size_t>(t) * static_cast<std::size_t>(k) + static_cast<std::size_t>(i);
      if (got[at] != want[static_cast<std::size_t>(i)]) {
        std::printf("FAIL %s kind %s k %d parts %d length %d: row %d lane %d is %d, want %d\n", what, kNames[kind], k,
                    parts, lengths[static_cast<std::size_t>(t)], t, i, got[at], want[static_cast<std::size_t>(i)]);
        ok = false;
      }
      if (!map || !ok) continue;
      std::int64_t slot = -1, pos = want[static_cast<std::size_t>(i)];
      const int request = map == 2 ? row_request[static_cast<std::size_t>(t)] : t;
      bool mine = pos >= 0 && request < requests;
      if (mine && map == 2) mine = pos / 16 % 3 == 1, pos = pos / 48 * 16 + pos % 16;
      if (mine) {
        const int page = table[static_cast<std::size_t>(request) * static_cast<std::size_t>(pages) +
                               static_cast<std::size_t>(pos / page_size)];
        if (page >= 0) slot = std::int64_t{page} * page_size + pos % page_size;
      }
      const std::int64_t have = map == 2 ? got_slots[at] : reinterpret_cast<const int*>(got_slots.data())[at];
      if (have != slot)
        std::printf("FAIL %s slots: row %d lane %d is %lld, want %lld\n", what, t, i, static_cast<long long>(have),
                    static_cast<long long>(slot)),
            ok = false;
    }
  }
  for (void* d : {static_cast<void*>(scores), static_cast<void*>(d_starts), static_cast<void*>(d_lengths),
                  static_cast<void*>(d_table), static_cast<void*>(d_request), static_cast<void*>(positions), slots,
                  static_cast<void*>(tickets), static_cast<void*>(p.counts), static_cast<void*>(p.lists)})
    GOOD(cudaFree(d));
  return ok;
}

int test() {
  int failed = 0, run = 0;
  std::uint64_t seed = 1;
  for (int kind = 0; kind < kinds; ++kind)
    for (int k : {1, 100, 2048, 2051, 4096}) {
      const std::vector<int> some = {0, -1, 1, k - 1, k, k + 1, 8191, 8192, 8193, 9000, 20001};
      ++run, failed += !check("lengths", static_cast<Kind>(kind), some, k, 1, true, 0, seed++);
      ++run, failed += !check("lengths, parts", static_cast<Kind>(kind), some, k, 5, kind % 2 == 0, 1, seed++);
    }
  for (int kind = 0; kind < kinds; ++kind) {
    ++run, failed += !check("long", static_cast<Kind>(kind), {131072, 65536, 70001}, 2048, 1, true, 2, seed++);
    ++run, failed += !check("long, parts", static_cast<Kind>(kind), {131072, 65536, 70001}, 2048, 32, true, 2, seed++);
  }
  for (int kind = 0; kind < kinds; ++kind)
    for (int k : {1, 100, 2048, 2051, 4096, 6144, 7000}) {
      const std::vector<int> some = {131072, 131071, 130001, 100, 8193, 0, 65536, 8192, 20003};
      ++run, failed += !check("together", static_cast<Kind>(kind), some, k, kTogether, false, kind % 3, seed++);
    }
  for (int kind : {0, 2, 4, 12})
    ++run, failed += !check("1M", static_cast<Kind>(kind), {1 << 20}, 2048, 32, false, 0, seed++);
  for (int n = 1; n < 300; n += 7) ++run, failed += !check("short", ties, {n, n + 1, n + 2}, 64, 1, true, 0, seed++);
  std::printf("top-k: %d of %d cases failed\n", failed, run);
  return failed != 0;
}

// ---- bench ------------------------------------------------------------------------------------------

__global__ void fill_normal(float* x, std::size_t n, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    auto mix = [](unsigned long long z) {
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
      return z ^ (z >> 31);
    };
    const unsigned long long r = mix((i + 1) * 0x9E3779B97F4A7C15ull + seed);
    const float u = (static_cast<float>(r >> 40) + 0.5f) * 0x1p-24f, w = static_cast<float>(r & 0xFFFFFF) * 0x1p-24f;
    x[i] = sqrtf(-2.f * logf(u)) * cosf(6.2831853f * w);
  }
}

__global__ void nothing() {}

int bench() {
  Timer timer;
  std::printf("an empty kernel: %.1f us flushed, %.1f in a graph\n",
              timer.flushed([](cudaStream_t s) { nothing<<<1, 32, 0, s>>>(); }).us,
              timer.graph([](cudaStream_t s) { nothing<<<1, 32, 0, s>>>(); }).us);
  struct {
    int rows, length;
    std::vector<int> parts;
  } cases[] = {{1, 8192, {1}},        {1, 65536, {8, 32}},   {1, 131072, {8, 32}}, {1, 1 << 20, {16, 32}},
               {8, 131072, {8, 16}},  {16, 65536, {4, 8}},   {64, 8192, {1}},      {64, 65536, {1, 2}},
               {128, 131072, {1, 2}}, {256, 131072, {1, 2}}, {4096, 8192, {1}},    {4096, 32768, {1}}};
  for (const auto& c : cases) {
    CudaParams p{};
    const std::size_t n = static_cast<std::size_t>(c.rows) * static_cast<std::size_t>(c.length);
    float* scores = make<float>(n);
    fill_normal<<<1024, 256>>>(scores, n, 7);
    std::vector<int> lengths(static_cast<std::size_t>(c.rows), c.length);
    int* d_lengths = make<int>(lengths.size());
    GOOD(cudaMemcpy(d_lengths, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice));
    p.scores = scores, p.scores_row = c.length, p.width = c.length, p.lengths = d_lengths, p.rows = c.rows, p.k = 2048,
    p.ahead = 264;
    p.out.positions = make<int>(static_cast<std::size_t>(c.rows) * 2048), p.out.positions_row = 2048;
    p.tickets = make<unsigned>(static_cast<std::size_t>(c.rows), 0);
    p.counts = make<int>(static_cast<std::size_t>(c.rows) * 256);
    p.lists = make<ListEntry>(std::size_t{1024} * 8192);
    for (int parts : c.parts) {
      p.parts = parts;
      auto call = [&](cudaStream_t s) { launch(p, s); };
      const float flushed = timer.flushed(call).us, graph = timer.graph(call).us;
      GOOD(cudaDeviceSynchronize());
      std::printf("topk.f32.rows%d.len%d.k2048 parts %d: %.1f us, in a graph %.1f us\n", c.rows, c.length, parts,
                  flushed, graph);
    }
    for (void* d : {static_cast<void*>(scores), static_cast<void*>(d_lengths), static_cast<void*>(p.out.positions),
                    static_cast<void*>(p.tickets), static_cast<void*>(p.counts), static_cast<void*>(p.lists)})
      GOOD(cudaFree(d));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (const SelectKernel& k : {kKernels.of_list, kKernels.alone, kKernels.shared, kKernels.together})
    GOOD(cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, k.smem_bytes));
  const std::string what = argc > 1 ? argv[1] : "test";
  return what == "bench" ? bench() : test();
}
