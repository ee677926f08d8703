// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bench/indexer_cuda.cu -- checks and times the CUDA score kernels alone: no library, no dependency.
//
//   indexer_cuda test                   scores against double precision, with fp8 and with f16 tensor cores; exit 1 on
//                                       an error
//   indexer_cuda bench [TILE [CASE]]    the keys of the peer benchmark, by tile; names that hold these words alone
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda/arch/sm90.h"
#include "cuda_timer.cuh"
#include "indexer/cuda/kernels.cuh"
#include "kv/e4m3.h"

namespace {
using namespace sievemla::stage::indexer;
using sievemla::kv::from_e4m3;

struct Fp8 {
  static constexpr int kSmemBytes = 99 * 1024;
  static constexpr bool kFp8Mma = true;
};
struct F16 {
  static constexpr int kSmemBytes = 99 * 1024;
  static constexpr bool kFp8Mma = false;
};
struct HeldVariant {
  const char* name;
  HeldKernel kernel[2];  // up to 32 heads, and more
};
template <class Arch, class Tile>
HeldVariant held(const char* name) {
  return {name, {held_kernel_of<Arch, Tile>(), held_kernel_of<Arch, Tile>()}};
}
template <class Tile>
HeldVariant rows(const char* name) {
  return {name,
          {rows_kernel_of<sievemla::cuda::Sm90, Tile, Columns<32, 4>>(),
           rows_kernel_of<sievemla::cuda::Sm90, Tile, Columns<64, 2>>()}};
}
struct PassVariant {
  const char* name;
  PassKernel kernel[2][2];  // one row and several; up to 32 heads, and more
};
template <class Arch, class Tile>
PassVariant pass(const char* name) {
  const PassKernel k = pass_kernel_of<Arch, Tile>();
  return {name, {{k, k}, {k, k}}};
}
template <class OneRow, class SomeRows>
PassVariant ring(const char* name) {
  using Sm90 = sievemla::cuda::Sm90;
  return {name,
          {{ring_kernel_of<Sm90, OneRow, Columns<32, 1>, 1>(), ring_kernel_of<Sm90, OneRow, Columns<64, 1>, 1>()},
           {ring_kernel_of<Sm90, SomeRows, Columns<32, 4>, 2>(), ring_kernel_of<Sm90, SomeRows, Columns<64, 2>, 4>()}}};
}
const HeldVariant kHeld[] = {rows<RowsTile<9, 4>>("wgmma 9 x 4"), rows<RowsTile<10, 3>>("wgmma 10 x 3"),
                             held<Fp8, HeldTile<Fp8, 4, 2, 4>>("fp8 4 x 2"),
                             held<F16, HeldTile<F16, 4, 2, 2>>("f16 4 x 2")};
const PassVariant kPass[] = {
    ring<RingTile<2, 2, 8>, RingTile<1, 2, 8>>("wgmma 2 x 2 x 8"),
    ring<RingTile<1, 2, 8>, RingTile<1, 1, 8>>("wgmma 1 x 2 x 8"), pass<Fp8, PassTile<Fp8, 4, 2, 4>>("fp8 4 x 2"),
    pass<F16, PassTile<F16, 4, 2, 4>>("f16 4 x 2, 64 keys"), pass<F16, PassTile<F16, 4, 3, 2>>("f16 4 x 3, 32 keys")};
const char* const kMath[] = {"wgmma", "fp8", "f16"};
bool of_math(const char* name, int math) { return std::strncmp(name, kMath[math], std::strlen(kMath[math])) == 0; }
int math_of(const char* name) { return of_math(name, 0) ? 0 : of_math(name, 1) ? 1 : 2; }
int multiprocessors = 132;
// Of an H200. TFLOP/s that scores can have, by kMath: wgmma e4m3 by the data sheet; mma.sync as this compiler makes it
// (of fp8 f16 on sm_90) and the sums of its dots, measured by measure_products. TB/s of a copy.
double products_tflops[] = {1979, 0, 0};
constexpr double kCopyTbps = 3.96;
const char *only = "", *only_case = "";  // parts of the names of the variants and cases to time

void launch(const void* kernel, int ctas, int threads, int smem, CudaScoreParams& p, int second, cudaStream_t s) {
  void* args[] = {&p, &second};
  GOOD(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(ctas)), dim3(static_cast<unsigned>(threads)), args,
                        static_cast<std::size_t>(smem), s));
}
void launch(const HeldVariant& v, CudaScoreParams p, cudaStream_t s = nullptr) {
  const HeldKernel& k = v.kernel[p.heads > 32];
  const int blocks = k.keys > 0 ? (p.width + k.keys - 1) / k.keys : 0;
  launch(k.kernel, k.keys > 0 ? blocks * ((p.rows + k.rows - 1) / k.rows) : multiprocessors, k.threads, k.smem_bytes, p,
         blocks, s);
}
void launch(const PassVariant& v, CudaScoreParams p, int fold, cudaStream_t s = nullptr) {
  const PassKernel& k = v.kernel[fold > 1][p.heads > 32];
  launch(k.kernel, k.ctas * multiprocessors, k.threads, k.smem_bytes(columns_of(p.heads, fold)), p, fold, s);
}

template <class T>
T* upload(const std::vector<T>& x) {
  T* d = make<T>(x.size());
  GOOD(cudaMemcpy(d, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
  return d;
}

constexpr int kRepeats = 3;
std::map<std::string, int> failures;  // by kernel

struct Case {
  int requests, rows_each, heads, page_size;  // page_size 0: contiguous
  int longest;
  bool fill, by_tensor, hostile;
};

bool check(const Case& c, std::uint64_t seed) {
  Random random{seed};
  const bool paged = c.page_size > 0;
  const int rows = c.requests * c.rows_each, width = c.longest + 37;
  const int page = paged ? c.page_size : 64, table_pages = c.longest / page + 2,
            pages = paged ? c.requests * table_pages + 3 : 0;
  const int page_bytes = page * 132 + 48;
  const int n = paged ? 0 : c.longest + 200;
  std::vector<unsigned char> keys(paged ? static_cast<std::size_t>(pages) * page_bytes
                                        : static_cast<std::size_t>(n) * 128);
  for (auto& k : keys) k = random.code();
  std::vector<float> scales(static_cast<std::size_t>(n));
  for (auto& s : scales) s = static_cast<float>(random.uniform()) + 0.1f;
  for (int i = 0; i < pages; ++i)
    for (int j = 0; j < page; ++j) {
      const float s = static_cast<float>(random.uniform()) + 0.1f;
      std::memcpy(&keys[static_cast<std::size_t>(i) * page_bytes + page * 128 + j * 4], &s, 4);
    }
  std::vector<int> table(static_cast<std::size_t>(c.requests) * table_pages), source(static_cast<std::size_t>(rows)),
      lengths(static_cast<std::size_t>(rows));
  for (auto& t : table)
    t = c.hostile && random.below(6) == 0 ? (random.below(2) ? -1 : pages) : random.below(std::max(pages, 1));
  const bool tensor = c.by_tensor || !paged;
  for (int t = 0; t < rows; ++t) {
    auto& l = lengths[static_cast<std::size_t>(t)];
    const int request = t / c.rows_each, base = c.hostile ? random.below(c.longest) : (request * 977 + 311) % c.longest;
    l = t == 0 ? c.longest : c.rows_each > 1 ? std::min(base + t % c.rows_each, c.longest) : base;
    if (c.hostile && random.below(9) == 0) l = random.below(2) ? 0 : -1;
    source[static_cast<std::size_t>(t)] =
        paged ? (c.by_tensor ? random.below(c.requests) : request) : (request * 61) % 190;
  }
  std::vector<unsigned char> q(static_cast<std::size_t>(rows) * c.heads * 128);
  for (auto& x : q) x = random.code();
  std::vector<float> weights(static_cast<std::size_t>(rows) * c.heads);
  for (auto& w : weights) w = random.normal();

  CudaScoreParams p{};
  p.q = upload(q), p.q_row = c.heads * 128, p.q_head = 128, p.weights = upload(weights), p.weights_row = c.heads;
  p.keys = upload(keys), p.page_bytes = paged ? page_bytes : 128, p.page_size = page, p.pages = pages;
  p.page_shift = -1;
  for (int i = 0; i < 12; ++i)
    if (1 << i == page) p.page_shift = i;
  int* d_table = upload(table);
  p.table = paged ? d_table : nullptr, p.table_row = table_pages, p.requests = c.requests, p.table_pages = table_pages;
  p.scales = upload(scales), p.n = n;
  int *d_source = upload(source), *d_lengths = upload(lengths);
  p.source = tensor ? d_source : nullptr, p.rows_per_source = c.rows_each, p.lengths = d_lengths;
  p.rows = rows, p.heads = c.heads, p.logits_row = width + 3, p.width = width, p.fill = c.fill, p.stride = 1;
  const std::size_t cells = static_cast<std::size_t>(rows) * (width + 3);
  float* logits = make<float>(cells);
  p.logits = logits;

  std::vector<float> want(cells), got(cells), first;
  unsigned poison = 0xA5A5A5A5u;
  double xx = 0, yy = 0, xy = 0, worst = 0;
  std::vector<double> magnitude(cells);
  std::vector<char> seen(cells);
  std::vector<double> ref(cells);
  for (int t = 0; t < rows; ++t)
    for (int j = 0; j < lengths[static_cast<std::size_t>(t)]; ++j) {
      const std::size_t at = static_cast<std::size_t>(t) * (width + 3) + j;
      seen[at] = 1;
      const unsigned char* key;
      float scale;
      const int from = tensor ? source[static_cast<std::size_t>(t)] : t / c.rows_each;
      if (paged) {
        const int physical = table[static_cast<std::size_t>(from) * table_pages + j / page];
        if (physical < 0 || physical >= pages) {
          ref[at] = -INFINITY;
          continue;
        }
        key = &keys[static_cast<std::size_t>(physical) * page_bytes + j % page * 128];
        std::memcpy(&scale, &keys[static_cast<std::size_t>(physical) * page_bytes + page * 128 + j % page * 4], 4);
      } else {
        key = &keys[static_cast<std::size_t>(from + j) * 128];
        scale = scales[static_cast<std::size_t>(from + j)];
      }
      float k[128];
      for (int d = 0; d < 128; ++d) k[d] = from_e4m3(key[d]);
      double sum = 0, mass = 0;
      for (int h = 0; h < c.heads; ++h) {
        double dot = 0;
        const unsigned char* qh = &q[(static_cast<std::size_t>(t) * c.heads + h) * 128];
        for (int d = 0; d < 128; ++d) dot += static_cast<double>(sievemla::kv::kE4m3Value[qh[d]]) * k[d];
        const double w = weights[static_cast<std::size_t>(t) * c.heads + h];
        sum += w * std::max(dot, 0.0), mass += std::abs(w) * std::max(dot, 0.0);
      }
      ref[at] = scale * sum, magnitude[at] = scale * mass;
    }
  bool ok = true, all_ok = true;  // this kernel, and all
  auto compare = [&](const char* name) {
    GOOD(cudaGetLastError());
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy(got.data(), logits, cells * 4, cudaMemcpyDeviceToHost));
    xx = yy = xy = worst = 0;
    for (int t = 0; t < rows && ok; ++t)
      for (int j = 0; j < width + 3 && ok; ++j) {
        const std::size_t at = static_cast<std::size_t>(t) * (width + 3) + j;
        unsigned bits;
        std::memcpy(&bits, &got[at], 4);
        if (!seen[at]) {
          const bool filled = c.fill && j < width;
          if (filled ? got[at] != -INFINITY : bits != poison) {
            std::printf("FAIL %s H %d page %d: row %d column %d (length %d) is %g, unseen\n", name, c.heads,
                        c.page_size, t, j, lengths[static_cast<std::size_t>(t)], got[at]);
            ok = false;
          }
          continue;
        }
        if (std::isinf(ref[at]) || std::isinf(got[at]) || std::isnan(got[at])) {
          if (!(ref[at] == got[at])) {
            std::printf("FAIL %s H %d page %d: row %d column %d is %g, want %g\n", name, c.heads, c.page_size, t, j,
                        got[at], ref[at]);
            ok = false;
          }
          continue;
        }
        xx += ref[at] * ref[at], yy += static_cast<double>(got[at]) * got[at], xy += ref[at] * got[at];
        worst = std::max(worst, std::abs(got[at] - ref[at]) / (magnitude[at] + 1e-30));
      }
    const double diff = xx + yy > 0 ? 1 - 2 * xy / (xx + yy) : 0;
    if (ok && !(diff < 5e-6))
      std::printf("FAIL %s H %d page %d rows %d: calc_diff %g, worst %g\n", name, c.heads, c.page_size, rows, diff,
                  worst),
          ok = false;
    return diff;
  };
  double most = 0;
  for (int arch = 0; arch < 3; ++arch) {
    first.clear();
    auto judge = [&](const char* name) {
      most = std::max(most, compare(name));
      if (ok && first.empty()) first = got;
      else if (ok && std::memcmp(first.data(), got.data(), cells * 4) != 0)
        std::printf("FAIL %s: other bits than the first kernel\n", name), ok = false;
      if (!ok) ++failures[name], all_ok = false;
      ok = true;
    };
    for (const auto& v : kHeld) {
      if (!of_math(v.name, arch)) continue;
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        GOOD(cudaMemset(logits, 0xA5, cells * 4));
        launch(v, p);
        judge(v.name);
      }
    }
    for (const auto& v : kPass) {
      if (!of_math(v.name, arch)) continue;
      for (int fold : {1, c.rows_each}) {
        if (columns_of(c.heads, fold) > v.kernel[fold > 1][c.heads > 32].most_columns) continue;
        if ((tensor && fold > 1) || fold > kMostFold) continue;
        for (int repeat = 0; repeat < kRepeats; ++repeat) {
          GOOD(cudaMemset(logits, 0xA5, cells * 4));
          launch(v, p, fold);
          judge(v.name);
        }
      }
    }
  }
  static double most_ever = 0;
  if (most > most_ever) most_ever = most, std::printf("largest calc_diff so far %.2g\n", most);
  for (const void* d :
       {static_cast<const void*>(p.q), static_cast<const void*>(p.weights), static_cast<const void*>(p.keys),
        static_cast<const void*>(d_table), static_cast<const void*>(p.scales), static_cast<const void*>(d_source),
        static_cast<const void*>(d_lengths), static_cast<const void*>(logits)})
    GOOD(cudaFree(const_cast<void*>(d)));
  return all_ok;
}

int test() {
  int failed = 0, run = 0;
  std::uint64_t seed = 1;
  const int all = multiprocessors;
  for (int heads : {1, 8, 12, 32, 64})
    for (int page : {16, 32, 64, 48, 256, 0})
      for (const Case& c :
           {Case{3, 1, heads, page, 700, true, false, false}, Case{2, 4, heads, page, 330, false, false, false},
            Case{3, 2, heads, page, 400, true, true, true}, Case{2, 70, heads, page, 150, false, false, false},
            Case{2, 3, heads, page, 300, true, false, false}})
        for (int few : {all, 2}) {  // few: many tiles a CTA, rings that go round, several units
          multiprocessors = few;
          ++run, failed += !check(c, seed++);
        }
  multiprocessors = all;
  for (const auto& [name, times] : failures) std::printf("%s: wrong %d times\n", name.c_str(), times);
  std::printf("scores: %d of %d cases failed\n", failed, run);
  return failed != 0;
}

// ---- bench ------------------------------------------------------------------------------------------

__device__ unsigned long long mix(unsigned long long z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
__device__ float normal(unsigned long long i) {
  const unsigned long long r = mix((i + 1) * 0x9E3779B97F4A7C15ull);
  const float u = (static_cast<float>(r >> 40) + 0.5f) * 0x1p-24f, w = static_cast<float>(r & 0xFFFFFF) * 0x1p-24f;
  return sqrtf(-2.f * logf(u)) * cosf(6.2831853f * w);
}
__global__ void fill_codes(unsigned char* x, std::size_t n) {  // e4m3 of normal values
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x)
    x[i] = sievemla::kv::to_e4m3(normal(i));
}
__global__ void fill_floats(float* x, std::size_t n) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x)
    x[i] = normal(i + 12345678);
}
__global__ void fill_scales(unsigned char* pages, int page_count, int page) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < page_count * page; i += gridDim.x * blockDim.x)
    reinterpret_cast<float*>(pages + static_cast<std::int64_t>(i / page) * page * 132 + page * 128)[i % page] =
        0.5f + static_cast<float>(mix(i + 99u) >> 40) * 0x1p-24f;
}

// Products of registers; with Adds their dots are added up too, by two instructions each. f16 adds to the same dots all
// along. Of fp8, which this compiler makes f16, heads change, as otherwise it would multiply once.
template <class Words, bool Adds>
__global__ __launch_bounds__(128, 2) void products_kernel(float* out, int rounds) {
  constexpr bool kFp8 = std::is_same_v<Words, Fp8Words>;
  Words a[4][2], b;
#pragma unroll
  for (int i = 0; i < 2 * Words::kSteps; ++i) {
#pragma unroll
    for (int t = 0; t < 8; ++t) a[t / 2][t % 2].w[i] = mix(threadIdx.x + 256 * i + t) & 0x37373737u;
    b.w[i] = mix(threadIdx.x + 7777 * i) & 0x37373737u;
  }
  const float weight = normal(threadIdx.x);
  float dot[4][4] = {}, sum[8] = {};
#pragma unroll 1
  for (int r = 0; r < rounds; ++r)
    [&]<int... step>(std::integer_sequence<int, step...>) {
      if constexpr (kFp8) ((b.w[2 * step] ^= static_cast<unsigned>(r) & 0x01010101u), ...);
      const auto one = [&](auto i) {
        constexpr int kStep = decltype(i)::value;
#pragma unroll
        for (int t = 0; t < 4; ++t) Words::template mma<(kFp8 || kStep > 0) ? kStep : 1>(dot[t], a[t][0], a[t][1], b);
      };
      (one(std::integral_constant<int, step>{}), ...);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float x = dot[i / 4][i % 4];
        if constexpr (Adds) sum[i / 2] = fmaf(weight, x + fabsf(x), sum[i / 2]);
        else if constexpr (kFp8) sum[i / 2] += x;
      }
    }(std::make_integer_sequence<int, Words::kSteps>{});
  float all = 0;
  for (int i = 0; i < 16; ++i) all += dot[i / 4][i % 4] + sum[i / 2];
  out[blockIdx.x * blockDim.x + threadIdx.x] = all;
}
template <class Words, bool Adds>
double measure_products(Timer& timer) {
  constexpr int kRounds = 4000;
  float* out = make<float>(static_cast<std::size_t>(2 * multiprocessors) * 128);
  auto* const kernel = &products_kernel<Words, Adds>;
  const float us = timer.flushed([&](cudaStream_t s) { kernel<<<2 * multiprocessors, 128, 0, s>>>(out, kRounds); }).us;
  GOOD(cudaFree(out));
  return 2.0 * multiprocessors * 4 * kRounds * (4 * 16 * 8 * kDim * 2) / us * 1e-6;
}

// Reads and nothing else, Loads times 16 bytes of a thread on their way.
template <int Loads>
__global__ __launch_bounds__(1024, 2) void read_kernel(const uint4* x, std::size_t n, unsigned* out) {
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  unsigned sum = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += Loads * threads) {
    uint4 part[Loads] = {};
#pragma unroll
    for (int k = 0; k < Loads; ++k)
      if (i + k * threads < n) part[k] = __ldg(x + i + k * threads);
#pragma unroll
    for (int k = 0; k < Loads; ++k) sum += part[k].x ^ part[k].y ^ part[k].z ^ part[k].w;
  }
  if (sum == 0x9E3779B9u) *out = sum;  // so that the reads stay
}
// What a kernel takes that reads these bytes, the fastest of some: start, latency and all.
float measure_read(Timer& timer, const unsigned char* bytes, std::size_t n) {
  const auto* x = reinterpret_cast<const uint4*>(bytes);
  unsigned* out = make<unsigned>(1);
  float us = 1e30f;
  for (int ctas : {1, 2}) {
    const int all = ctas * multiprocessors;
    us = std::min(us, timer.flushed([&](cudaStream_t s) { read_kernel<2><<<all, 1024, 0, s>>>(x, n / 16, out); }).us);
    us = std::min(us, timer.flushed([&](cudaStream_t s) { read_kernel<4><<<all, 1024, 0, s>>>(x, n / 16, out); }).us);
  }
  GOOD(cudaFree(out));
  return us;
}

void bench_prefill(Timer& timer, int heads, int rows, int keys) {
  const std::string name =
      "index.prefill.fp8.h" + std::to_string(heads) + ".s" + std::to_string(rows) + ".kv" + std::to_string(keys);
  if (!std::strstr(name.c_str(), only_case)) return;
  CudaScoreParams p{};
  auto* q = make<unsigned char>(static_cast<std::size_t>(rows) * heads * 128);
  auto* k = make<unsigned char>(static_cast<std::size_t>(keys) * 128);
  auto* w = make<float>(static_cast<std::size_t>(rows) * heads);
  auto* s = make<float>(static_cast<std::size_t>(keys));
  fill_codes<<<1024, 256>>>(q, static_cast<std::size_t>(rows) * heads * 128);
  fill_codes<<<1024, 256>>>(k, static_cast<std::size_t>(keys) * 128);
  fill_floats<<<1024, 256>>>(w, static_cast<std::size_t>(rows) * heads);
  fill_floats<<<1024, 256>>>(s, static_cast<std::size_t>(keys));
  std::vector<int> lengths;
  double pairs = 0;
  for (int i = 0; i < rows; ++i) lengths.push_back(keys - rows + i + 1), pairs += lengths.back();
  int* d_lengths = upload(lengths);
  p.q = q, p.q_row = heads * 128, p.q_head = 128, p.weights = w, p.weights_row = heads, p.keys = k, p.page_bytes = 128,
  p.scales = s, p.n = keys;
  p.page_size = 64, p.page_shift = 6;
  p.lengths = d_lengths, p.rows_per_source = rows, p.rows = rows, p.heads = heads, p.logits_row = keys, p.width = keys;
  p.stride = 1;
  p.logits = make<float>(static_cast<std::size_t>(rows) * keys);
  for (const auto& v : kHeld) {
    if (!std::strstr(v.name, only)) continue;
    if (!of_math(v.name, 0) && keys > 65536) continue;
    const float us = timer.flushed([&](cudaStream_t stream) { launch(v, p, stream); }).us;
    const double tflops = pairs * heads * 256 / us * 1e-6;
    std::printf("%s %s: %.0f us, %.0f TFLOP/s, %.0f %% of the rate of products and sums\n", name.c_str(), v.name, us,
                tflops, 100 * tflops / products_tflops[math_of(v.name)]);
  }
  for (const void* d :
       {static_cast<const void*>(q), static_cast<const void*>(k), static_cast<const void*>(w),
        static_cast<const void*>(s), static_cast<const void*>(d_lengths), static_cast<const void*>(p.logits)})
    GOOD(cudaFree(const_cast<void*>(d)));
}

void bench_decode(Timer& timer, int heads, const std::vector<int>& lengths, const char* shape) {
  const std::string name = "index.decode.fp8.h" + std::to_string(heads) + "." + shape;
  if (!std::strstr(name.c_str(), only_case)) return;
  CudaScoreParams p{};
  const int rows = static_cast<int>(lengths.size()), page = 64;
  int pages = 0, longest = 0;
  double bytes = 0;
  for (int l : lengths) pages += (l + page - 1) / page, longest = std::max(longest, l), bytes += 132.0 * l;
  auto* q = make<unsigned char>(static_cast<std::size_t>(rows) * heads * 128);
  auto* k = make<unsigned char>(static_cast<std::size_t>(pages) * page * 132);
  auto* w = make<float>(static_cast<std::size_t>(rows) * heads);
  fill_codes<<<1024, 256>>>(q, static_cast<std::size_t>(rows) * heads * 128);
  fill_codes<<<1024, 256>>>(k, static_cast<std::size_t>(pages) * page * 132);
  fill_scales<<<1024, 256>>>(k, pages, page);
  fill_floats<<<1024, 256>>>(w, static_cast<std::size_t>(rows) * heads);
  std::vector<int> shuffled(static_cast<std::size_t>(pages)), table;
  for (int i = 0; i < pages; ++i) shuffled[static_cast<std::size_t>(i)] = i;
  Random random{5};
  for (int i = pages - 1; i > 0; --i)
    std::swap(shuffled[static_cast<std::size_t>(i)], shuffled[static_cast<std::size_t>(random.below(i + 1))]);
  const int table_pages = (longest + page - 1) / page;
  std::size_t next = 0;
  for (int l : lengths)
    for (int j = 0; j < table_pages; ++j) table.push_back(j < (l + page - 1) / page ? shuffled[next++] : -1);
  int *d_table = upload(table), *d_lengths = upload(lengths);
  p.q = q, p.q_row = heads * 128, p.q_head = 128, p.weights = w, p.weights_row = heads, p.keys = k,
  p.page_bytes = page * 132;
  p.page_size = page, p.page_shift = 6, p.pages = pages, p.table = d_table, p.table_row = table_pages,
  p.requests = rows, p.table_pages = table_pages;
  p.rows_per_source = 1, p.lengths = d_lengths, p.rows = rows, p.heads = heads, p.logits_row = longest,
  p.width = longest;
  p.logits = make<float>(static_cast<std::size_t>(rows) * longest);
  const float read_us = measure_read(timer, k, static_cast<std::size_t>(bytes));
  for (const auto& v : kPass) {
    if (!std::strstr(v.name, only)) continue;
    const float us = timer.flushed([&](cudaStream_t stream) { launch(v, p, 1, stream); }).us;
    const double products_us = bytes / 132 * heads * 256 / products_tflops[math_of(v.name)] * 1e-6,
                 floor = std::max(bytes / kCopyTbps * 1e-6, products_us),
                 kernel_floor = std::max(static_cast<double>(read_us), products_us);
    std::printf(
        "%s %s: %.1f us, %.2f TB/s, %.0f %% of the floor's %.1f us; of a kernel that only reads, %.1f us, "
        "or multiplies: %.0f %%\n",
        name.c_str(), v.name, us, bytes / us * 1e-6, 100 * floor / us, floor, read_us, 100 * kernel_floor / us);
  }
  for (const void* d :
       {static_cast<const void*>(q), static_cast<const void*>(k), static_cast<const void*>(w),
        static_cast<const void*>(d_table), static_cast<const void*>(d_lengths), static_cast<const void*>(p.logits)})
    GOOD(cudaFree(const_cast<void*>(d)));
}

int bench() {
  Timer timer;
  products_tflops[1] = measure_products<Fp8Words, true>(timer);
  products_tflops[2] = measure_products<F16Words, true>(timer);
  std::printf("products of registers and their sums: %.0f TFLOP/s of fp8, %.0f of f16; f16 products alone %.0f\n",
              products_tflops[1], products_tflops[2], measure_products<F16Words, false>(timer));
  for (int heads : {32, 64}) {
    bench_prefill(timer, heads, 4096, 32768);
    bench_prefill(timer, heads, 2048, 131072);
  }
  for (int heads : {32, 64}) {
    bench_decode(timer, heads, std::vector<int>(1, 8192), "b1.ctx8192");
    bench_decode(timer, heads, std::vector<int>(1, 131072), "b1.ctx131072");
    bench_decode(timer, heads, std::vector<int>(16, 65536), "b16.ctx65536");
    bench_decode(timer, heads, std::vector<int>(64, 65536), "b64.ctx65536");
  }
  std::vector<int> mixed(64, 2048);
  mixed[0] = 131072;
  bench_decode(timer, 32, mixed, "mixed");
  bench_decode(timer, 32, std::vector<int>(64, 4064), "even");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  const auto allow = [](const void* kernel, int smem) {
    GOOD(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  };
  for (const auto& v : kHeld)
    for (const HeldKernel& k : v.kernel) allow(k.kernel, k.smem_bytes);
  for (const auto& v : kPass)
    for (const auto& some : v.kernel)
      for (const PassKernel& k : some) allow(k.kernel, k.smem_bytes(k.most_columns));
  const std::string what = argc > 1 ? argv[1] : "test";
  if (argc > 2) only = argv[2];
  if (argc > 3) only_case = argv[3];
  return what == "bench" ? bench() : test();
}
