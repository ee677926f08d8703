// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bench/attention_cuda.cu -- checks and times the CUDA attention kernels alone: no library, no dependency.
//
//   attention_cuda test [small [NAME]]   random and hostile inputs against double precision; exit 1 on an error
//   attention_cuda bench [--json FILE] [--tile N] [--parts N] [--merge-kernel] [--beside UNITS PARTS] KEY...
//                        keys as in the peer benchmark
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "attention/cuda/kernels.cuh"
#include "cuda/arch/sm120.h"
#include "cuda/arch/sm90.h"
#include "cuda/context.cuh"
#include "cuda_timer.cuh"
#include "kv/fp8_rows.h"
#include "kv/plain.h"

#ifndef BENCH_ARCH
#define BENCH_ARCH Sm90
#endif

namespace {
using namespace sievemla;
namespace at = sievemla::stage::attention;
using Arch = cuda::BENCH_ARCH;

const at::ConfigKernels kConfig = at::make_kernels<Arch>();

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
float uniform(Random& random) { return static_cast<float>(2 * random.uniform() - 1); }

void prepare() {
  for (const auto& rows : kConfig.rows)
    for (int i = 0; i < rows.count; ++i)
      GOOD(cudaFuncSetAttribute(rows.tile[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                rows.tile[i].smem_bytes));
}

const at::RowKernels& kernels_of(KvFormat format, int rope) {
  for (const auto& rows : kConfig.rows)
    if (rows.format == format && rows.rope == rope) return rows;
  std::printf("no kernels for this row type\n");
  std::exit(2);
}

bool g_merge_kernel = false;           // whatever the choice says
int g_beside = 0, g_beside_parts = 0;  // of forced parts: units of a second launch, and the parts of each

// The chosen or a forced tile (the how manieth of its list, from 1) and number of parts.
at::Choice choice_of(const at::RowKernels& rows, at::Workload problem, int force_tile, int force_parts) {
  std::vector<at::TileShape> shapes;
  for (int i = 0; i < rows.count; ++i)
    if (force_tile == 0 || i + 1 == force_tile) shapes.push_back(rows.tile[i].shape);
  at::Choice c = at::choose(shapes, problem);
  if (force_tile > 0) c.tile = static_cast<std::size_t>(force_tile - 1);
  if (force_parts > 0) {
    c.beside = g_beside > 0 && g_beside < problem.units ? g_beside : 0, c.beside_parts = g_beside_parts;
    c.parts = force_parts, c.items = (problem.units - c.beside) * force_parts;
    const at::TileShape& shape = rows.tile[c.tile].shape;
    c.merge = force_parts == 1                                                       ? at::Merge::last
              : g_merge_kernel                                                       ? at::Merge::kernel
              : at::merges(shape, problem.clusters, force_parts, at::Merge::cluster) ? at::Merge::cluster
              : at::merges(shape, problem.clusters, force_parts, at::Merge::last)    ? at::Merge::last
                                                                                     : at::Merge::kernel;
  }
  return c;
}

int multiprocessors() {
  static const int n = [] {
    int x = 0;
    GOOD(cudaDeviceGetAttribute(&x, cudaDevAttrMultiProcessorCount, 0));
    return x;
  }();
  return n;
}

cudaError_t launch(const at::TileKernel& kernel, at::CudaParams p, const at::Choice& choice, cudaStream_t stream) {
  p.parts = choice.parts, p.target = choice.target, p.merge = choice.merge;
  int groups = static_cast<int>(choice.groups), heads = kernel.shape.heads;
  void* args[] = {&p, &groups, &heads};
  const bool early = Arch::kSm >= 90;
  const int cluster = choice.merge == at::Merge::cluster ? p.parts : 1;
  if (choice.beside > 0) p.launch = at::Launch::first;
  cudaError_t e =
      cuda::launch(kernel.kernel, {choice.items * choice.groups, kernel.threads, kernel.smem_bytes, 1, cluster, early},
                   stream, args);
  if (e == cudaSuccess && choice.beside > 0) {
    p.launch = at::Launch::second, p.first_unit = p.units - static_cast<int>(choice.beside);
    p.parts = choice.beside_parts, p.merge = at::Merge::together;
    e = cuda::launch(kernel.kernel,
                     {choice.beside * p.parts * choice.groups, kernel.threads, kernel.smem_bytes, 1, 1, early}, stream,
                     args);
  }
  if (e == cudaSuccess && choice.merge == at::Merge::kernel) {
    const std::int64_t all_heads = std::int64_t{p.units} * p.fold * p.heads;
    e = cuda::launch(kConfig.merge,
                     {all_heads, at::kMergeThreads, 0, at::merge_rows(all_heads, multiprocessors()), 1, early}, stream,
                     args);
  }
  return e;
}

template <class T>
T* device_copy(const std::vector<T>& host) {
  T* d = nullptr;
  GOOD(cudaMalloc(&d, std::max<std::size_t>(1, host.size() * sizeof(T))));
  GOOD(cudaMemcpy(d, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return d;
}

// ---- test -------------------------------------------------------------------------------------------

struct Case {
  std::string name;
  KvFormat format = KvFormat::fp8_ds_mla;
  int rope = 64, heads = 64, requests = 2, q_len = 1, topk = 64;
  bool dense = false, shared = false;             // shared: q_len stride 0
  int page_size = 64, page_pad = 0, row_pad = 0;  // bytes
  int pages = 40;
  bool wide = false, lengths = false, sink = false, out_f32 = false, pair = false, hostile = false, far = false,
       invariant = false;
  int tile = 0, parts = 0, beside = 0, beside_parts = 0;
  bool nan_row = false;
  bool nan_tail = false;  // in the last row of the token of the first request that sees most
};

struct Failure {
  int count = 0;
};

bool run_case(const Case& x, std::uint64_t seed) {
  Random random{seed * 1000003};
  const at::RowKernels& rows = kernels_of(x.format, x.rope);
  const int row_bytes = x.format == KvFormat::bf16 ? static_cast<int>(kv::Bf16Row::row_bytes(512, x.rope))
                        : x.rope                   ? kv::Fp8DsMlaRow::kRowBytes
                                                   : kv::Fp8NopeRow::kRowBytes;
  const std::int64_t row_step = row_bytes + x.row_pad, page_step = x.page_size * row_step + x.page_pad;
  const std::int64_t slots = std::int64_t{x.pages} * x.page_size;
  const int tokens = x.requests * x.q_len, width = 512 + x.rope;

  // Which lanes name which slots.
  std::vector<std::int64_t> slot(static_cast<std::size_t>(tokens) * std::max(1, x.topk), -1);
  std::vector<int> limit(static_cast<std::size_t>(tokens), x.topk), lengths(static_cast<std::size_t>(x.requests), 0);
  const int table_pages = (x.topk + x.page_size - 1) / x.page_size;
  std::vector<int> table(static_cast<std::size_t>(x.requests) * std::max(1, table_pages + 3), -1);
  const int table_step = table_pages + 3;
  const auto far_slot = [&](int i) { return slots - 1 - i * 7; };
  if (x.dense) {
    for (int r = 0; r < x.requests; ++r) {
      lengths[r] = x.lengths ? random.below(x.topk + 1) : x.topk;
      if (x.lengths && r == 1) lengths[r] = 0;
      if (x.lengths && r == 2) lengths[r] = -1;
      if (x.lengths && r == 3) lengths[r] = x.topk + 500;
      for (int j = 0; j < table_pages; ++j)
        table[r * table_step + j] =
            x.hostile && random.below(5) == 0 ? (random.below(2) ? x.pages + 3 : -1) : random.below(x.pages);
    }
    for (int t = 0; t < tokens; ++t) {
      const int r = t / x.q_len, seen = lengths[r] - x.q_len + 1 + t % x.q_len;
      limit[t] = std::clamp(seen, 0, x.topk);
      for (int j = 0; j < x.topk; ++j) {
        const std::int64_t page = table[r * table_step + j / x.page_size];
        slot[static_cast<std::size_t>(t) * x.topk + j] =
            page < 0 || page >= x.pages ? -1 : page * x.page_size + j % x.page_size;
      }
    }
  } else {
    for (int t = 0; t < tokens; ++t) {
      if (x.lengths) limit[t] = t % 4 == 1 ? 0 : t % 4 == 2 ? -5 : random.below(x.topk + 1);
      for (int j = 0; j < x.topk; ++j) {
        std::int64_t v = x.far ? far_slot(random.below(64))
                               : static_cast<std::int64_t>(random.next() % static_cast<std::uint64_t>(slots));
        if (x.hostile) {
          const int kind = random.below(8);
          if (kind == 0 || (j < 40 && t % 2 == 0)) v = -1;
          if (kind == 1) v = slots;
          if (kind == 2) v = x.wide ? (std::int64_t{1} << 40) : INT32_MAX;
          if (kind == 3) v = INT32_MIN;
          if (t == tokens - 1) v = -1;  // an empty row
        }
        slot[static_cast<std::size_t>(t) * x.topk + j] = v;
      }
    }
    if (x.shared)
      for (int t = 0; t < tokens; ++t)
        for (int j = 0; j < x.topk; ++j)
          slot[static_cast<std::size_t>(t) * x.topk + j] =
              slot[static_cast<std::size_t>(t / x.q_len * x.q_len) * x.topk + j];
  }
  const auto live = [&](int t, int j) {
    const std::int64_t v = slot[static_cast<std::size_t>(t) * x.topk + j];
    return j < limit[t] && v >= 0 && v < slots;
  };

  // Rows: those that are read are random, all other bytes are NaN.
  std::map<std::int64_t, std::vector<std::byte>> row_of;
  for (int t = 0; t < tokens; ++t)
    for (int j = 0; j < x.topk; ++j)
      if (live(t, j)) row_of[slot[static_cast<std::size_t>(t) * x.topk + j]];
  for (auto& [s, bytes] : row_of) {
    Random r{mix(static_cast<std::uint64_t>(s)) ^ seed};
    float v[576];
    for (float& y : v) y = uniform(r) * (r.below(9) == 0 ? 4.f : .7f);
    bytes.resize(static_cast<std::size_t>(row_bytes));
    if (x.format == KvFormat::bf16)
      kv::Bf16Row::store<float>(bytes.data(), {v, 512}, {v + 512, static_cast<std::size_t>(x.rope)},
                                ScaleRule::arbitrary);
    else if (x.rope)
      kv::Fp8DsMlaRow::store<float>(bytes.data(), {v, 512}, {v + 512, static_cast<std::size_t>(x.rope)},
                                    ScaleRule::arbitrary);
    else
      kv::Fp8NopeRow::store<float>(bytes.data(), {v, 512}, {v + 512, static_cast<std::size_t>(x.rope)},
                                   ScaleRule::arbitrary);
  }
  std::int64_t nan_slot = -1;
  if (x.nan_row && live(0, 0)) {
    nan_slot = slot[0];
    const float nan = NAN;
    std::memcpy(row_of[nan_slot].data() + 512 + 4, &nan, 4);
  }
  if (x.nan_tail) {
    const int t = static_cast<int>(std::max_element(limit.begin(), limit.begin() + x.q_len) - limit.begin());
    nan_slot = slot[static_cast<std::size_t>(t) * x.topk + limit[t] - 1];
    std::memset(row_of.at(nan_slot).data(), 0xFF, row_of.at(nan_slot).size());
  }
  unsigned char* d_rows = nullptr;
  const std::size_t cache_bytes = static_cast<std::size_t>(x.pages) * page_step;
  GOOD(cudaMalloc(&d_rows, cache_bytes));
  GOOD(cudaMemset(d_rows, 0xFF, cache_bytes));
  const auto at_slot = [&](std::int64_t s) { return s / x.page_size * page_step + s % x.page_size * row_step; };
  if (x.far) {
    for (auto& [s, bytes] : row_of)
      GOOD(cudaMemcpy(d_rows + at_slot(s), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  } else {
    std::vector<std::byte> cache(cache_bytes, std::byte{0xFF});
    for (auto& [s, bytes] : row_of) std::memcpy(cache.data() + at_slot(s), bytes.data(), bytes.size());
    GOOD(cudaMemcpy(d_rows, cache.data(), cache_bytes, cudaMemcpyHostToDevice));
  }

  // Query: one tensor, or latent and rope apart, the latent transposed ([heads, tokens, 512]).
  std::vector<bf16> q(static_cast<std::size_t>(tokens) * x.heads * width);
  std::vector<float> qf(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = base::to_bf16(uniform(random)), qf[i] = base::to_f32(q[i]);
  std::vector<bf16> latent, rope;
  if (x.pair) {
    latent.resize(static_cast<std::size_t>(tokens) * x.heads * 512),
        rope.resize(static_cast<std::size_t>(tokens) * x.heads * 64);
    for (int t = 0; t < tokens; ++t)
      for (int h = 0; h < x.heads; ++h)
        for (int i = 0; i < width; ++i) {
          const bf16 v = q[(static_cast<std::size_t>(t) * x.heads + h) * width + i];
          if (i < 512) latent[(static_cast<std::size_t>(h) * tokens + t) * 512 + i] = v;
          else rope[(static_cast<std::size_t>(t) * x.heads + h) * 64 + i - 512] = v;
        }
  }
  std::vector<float> sink(static_cast<std::size_t>(x.heads));
  for (float& y : sink) y = 3.f * uniform(random);
  if (x.sink && x.heads > 1) sink[0] = -INFINITY, sink[1] = 300.f;

  // Outputs with guards.
  constexpr std::size_t kGuard = 4096;
  const std::size_t out_bytes = static_cast<std::size_t>(tokens) * x.heads * 512 * (x.out_f32 ? 4 : 2);
  const std::size_t lse_bytes = static_cast<std::size_t>(tokens) * x.heads * 4;
  unsigned char *d_out = nullptr, *d_lse = nullptr;
  std::vector<unsigned char> poison(out_bytes + 2 * kGuard, 0xFF), lse_poison(lse_bytes + 2 * kGuard, 0xFF);
  std::fill_n(poison.begin(), kGuard, 0xA5), std::fill(poison.end() - kGuard, poison.end(), 0xA5);
  std::fill_n(lse_poison.begin(), kGuard, 0xA5), std::fill(lse_poison.end() - kGuard, lse_poison.end(), 0xA5);
  d_out = device_copy(poison), d_lse = device_copy(lse_poison);

  at::CudaParams p{};
  bf16* d_q = device_copy(x.pair ? latent : q);
  bf16* d_rope = device_copy(rope);
  p.q = d_q, p.q_token = x.pair ? 512 : std::int64_t{x.heads} * width,
  p.q_head = x.pair ? std::int64_t{tokens} * 512 : width;
  p.q_rope = x.pair ? d_rope : d_q + 512, p.q_rope_token = x.pair ? std::int64_t{x.heads} * 64 : p.q_token;
  p.q_rope_head = x.pair ? 64 : width;
  p.rows = d_rows, p.page_bytes = page_step, p.row_bytes = row_step, p.slots = slots, p.pages = x.pages;
  if (x.page_pad != 0) p.page = at::divider(x.page_size);
  std::vector<int> narrow(slot.size());
  for (std::size_t i = 0; i < slot.size(); ++i) narrow[i] = static_cast<int>(slot[i]);
  int* d_narrow = device_copy(narrow);
  std::int64_t* d_wide = device_copy(slot);
  int *d_table = device_copy(table), *d_lengths = device_copy(lengths), *d_limit = device_copy(limit);
  float* d_sink = device_copy(sink);
  const bool fold = x.dense || x.shared;
  p.units = fold ? x.requests : tokens, p.fold = fold ? x.q_len : 1, p.heads = x.heads;
  if (x.dense) {
    p.table = d_table, p.table_request = table_step, p.table_pages = table_pages,
    p.table_page = at::divider(x.page_size), p.lengths = d_lengths;
  } else {
    p.indices = x.wide ? static_cast<void*>(d_wide) : d_narrow, p.wide_indices = x.wide;
    p.unit_tokens = fold ? 1 : x.q_len, p.index_request = std::int64_t{x.q_len} * x.topk, p.index_token = x.topk,
    p.index_lane = 1;
    if (x.lengths) p.topk_length = d_limit;
  }
  p.slack = 8.f, p.heavy = 16.f;
  p.lanes = x.topk, p.scale_log2 = 0.0625f * at::kLog2e, p.sink = x.sink ? d_sink : nullptr;
  p.out = d_out + kGuard, p.out_f32 = x.out_f32, p.out_token = std::int64_t{x.heads} * 512, p.out_head = 512;
  p.lse = reinterpret_cast<float*>(d_lse + kGuard), p.lse_token = x.heads, p.lse_head = 1;

  p.read_once = std::int64_t{p.units} * p.lanes <= slots;
  const at::Workload problem{p.units, p.fold * p.heads, p.lanes, x.dense, x.invariant, multiprocessors()};
  g_beside = x.beside, g_beside_parts = x.beside_parts;
  const at::Choice choice = choice_of(rows, problem, x.tile, x.parts);
  const std::int64_t group_heads = rows.tile[choice.tile].shape.heads,
                     partial_rows = std::max(choice.items, at::partial_items(choice)) * choice.groups * group_heads;
  GOOD(cudaMalloc(&p.partial, static_cast<std::size_t>(partial_rows) * 512 * 4));
  GOOD(cudaMemset(p.partial, 0xFF, static_cast<std::size_t>(partial_rows) * 512 * 4));
  GOOD(cudaMalloc(&p.partial_log2, static_cast<std::size_t>(partial_rows) * 4));
  GOOD(cudaMemset(p.partial_log2, 0xFF, static_cast<std::size_t>(partial_rows) * 4));
  GOOD(cudaMalloc(&p.unit_parts, at::kUnevenUnits * sizeof(at::UnitParts)));
  GOOD(cudaMalloc(&p.tickets, cuda::kTicketBytes));
  GOOD(cudaMemset(p.tickets, 0, cuda::kTicketBytes));

  std::vector<unsigned char> out(poison.size()), lse(lse_poison.size()), again(poison.size());
  bool same = true;
  for (int round = 0; round < 3; ++round) {
    GOOD(cudaMemcpy(d_out, poison.data(), poison.size(), cudaMemcpyHostToDevice));
    GOOD(cudaMemcpy(d_lse, lse_poison.data(), lse_poison.size(), cudaMemcpyHostToDevice));
    GOOD(launch(rows.tile[choice.tile], p, choice, nullptr));
    const cudaError_t e = cudaDeviceSynchronize();
    if (e != cudaSuccess) {
      std::printf("FAIL %s: %s\n", x.name.c_str(), cudaGetErrorString(e));
      std::exit(1);
    }
    GOOD(cudaMemcpy(again.data(), d_out, again.size(), cudaMemcpyDeviceToHost));
    if (round == 0) out = again;
    else same &= out == again;
  }
  GOOD(cudaMemcpy(lse.data(), d_lse, lse.size(), cudaMemcpyDeviceToHost));
  for (void* d : {(void*)d_rows, (void*)d_q, (void*)d_rope, (void*)d_narrow, (void*)d_wide, (void*)d_table,
                  (void*)d_lengths, (void*)d_limit, (void*)d_sink, (void*)d_out, (void*)d_lse, (void*)p.partial,
                  (void*)p.partial_log2, (void*)p.tickets, (void*)p.unit_parts})
    GOOD(cudaFree(d));

  bool ok = same;
  if (!same) std::printf("FAIL %s: repeated calls differ\n", x.name.c_str());
  for (std::size_t i = 0; i < kGuard; ++i)
    if (out[i] != 0xA5 || out[out.size() - 1 - i] != 0xA5 || lse[i] != 0xA5 || lse[lse.size() - 1 - i] != 0xA5) {
      std::printf("FAIL %s: guard overwritten\n", x.name.c_str());
      ok = false;
      break;
    }

  // Sampled (token, head) pairs against double.
  std::vector<std::pair<int, int>> pairs;
  for (int i = 0; i < 20; ++i) pairs.push_back({random.below(tokens), random.below(x.heads)});
  pairs.push_back({tokens - 1, x.heads - 1}), pairs.push_back({0, 0});
  for (int t = 0; t < x.q_len; ++t) pairs.push_back({t, x.heads / 2});
  std::atomic<int> bad{0};
  std::atomic<bool> told{false};
  const auto check = [&](int t, int h) {
    std::vector<double> score, weight;
    std::vector<std::vector<double>> value;
    double peak = -INFINITY;
    bool nan = false;
    for (int j = 0; j < x.topk; ++j) {
      if (!live(t, j)) continue;
      const std::int64_t s = slot[static_cast<std::size_t>(t) * x.topk + j];
      std::vector<double> v(576);
      const std::byte* row = row_of.at(s).data();
      if (x.format == KvFormat::bf16) kv::Bf16Row::load(row, 512, x.rope, v.data());
      else if (x.rope) kv::Fp8DsMlaRow::load(row, 512, 64, v.data());
      else kv::Fp8NopeRow::load(row, 512, 0, v.data());
      nan |= s == nan_slot;
      double dot = 0;
      for (int i = 0; i < width; ++i) dot += v[i] * qf[(static_cast<std::size_t>(t) * x.heads + h) * width + i];
      score.push_back(dot * 0.0625), value.push_back(std::move(v));
      peak = std::max(peak, score.back());
    }
    double sum = 0;
    for (double s : score) weight.push_back(std::exp(s - peak)), sum += weight.back();
    const double norm = sum + (x.sink && !score.empty() ? std::exp(static_cast<double>(sink[h]) - peak) : 0.0);
    float got_lse;
    std::memcpy(&got_lse, lse.data() + kGuard + (static_cast<std::size_t>(t) * x.heads + h) * 4, 4);
    const double want_lse = score.empty() ? -INFINITY : peak + std::log(sum);
    bool wrong = nan ? !std::isnan(got_lse) : !(got_lse == want_lse || std::fabs(got_lse - want_lse) <= 1e-3);
    double worst = 0;
    int column = -1;
    for (int i = 0; i < 512; ++i) {
      double want = 0, size = 0;
      for (std::size_t j = 0; j < weight.size(); ++j)
        want += weight[j] / norm * value[j][i], size += weight[j] / norm * std::fabs(value[j][i]);
      const std::size_t at_i = (static_cast<std::size_t>(t) * x.heads + h) * 512 + i;
      float got;
      if (x.out_f32) std::memcpy(&got, out.data() + kGuard + at_i * 4, 4);
      else {
        bf16 b;
        std::memcpy(&b, out.data() + kGuard + at_i * 2, 2);
        got = base::to_f32(b);
      }
      if (nan) {
        wrong |= !std::isnan(got);
        continue;
      }
      if (score.empty()) {
        wrong |= std::bit_cast<std::uint32_t>(got) != 0;
        continue;
      }
      const double bound = 8e-3 * std::fabs(want) + 2e-3 * std::max(1.0, size);
      const double ratio = std::fabs(got - want) / bound;
      if (!(ratio <= worst)) worst = std::isnan(ratio) ? 1e9 : ratio, column = i;
    }
    wrong |= worst > 1;
    if (wrong) {
      ++bad;
      if (!told.exchange(true))
        std::printf("FAIL %s: token %d head %d: error / bound %.3g at column %d, lse %g want %g\n", x.name.c_str(), t,
                    h, worst, column, got_lse, want_lse);
    }
  };
  std::vector<std::thread> workers;
  std::atomic<std::size_t> next{0};
  for (int i = 0; i < 12; ++i)
    workers.emplace_back([&] {
      for (std::size_t j; (j = next++) < pairs.size();) check(pairs[j].first, pairs[j].second);
    });
  for (auto& w : workers) w.join();
  if (bad) std::printf("     %d of %zu sampled rows are wrong\n", bad.load(), pairs.size());
  return ok && !bad;
}

int test(bool small, const std::string& only) {
  std::vector<Case> cases;
  struct Format {
    KvFormat format;
    int rope;
    const char* name;
  };
  std::vector<Format> formats;
  for (const auto& k : kConfig.rows) formats.push_back({k.format, k.rope, k.rows});
  for (const Format& f : formats) {
    Case base;
    base.format = f.format, base.rope = f.rope;
    const auto add = [&](const std::string& name, auto&& change) {
      Case c = base;
      change(c);
      c.name = std::string(f.name) + "/" + name;
      cases.push_back(c);
    };
    for (int h : {1, 2, 4, 5, 7, 8, 12, 16, 20, 31, 32, 33, 64, 96, 127, 128})
      add("heads" + std::to_string(h), [&](Case& c) { c.heads = h, c.topk = 64; });
    for (int k : {0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 192, 1000, 2048, 2051, 2176})
      if (!small || k < 200) add("topk" + std::to_string(k), [&](Case& c) { c.heads = k % 2 ? 16 : 64, c.topk = k; });
    const at::RowKernels& rows = kernels_of(f.format, f.rope);
    for (int tile = 1; tile <= rows.count; ++tile)
      for (int parts : {1, 2, 3, 4, 7}) {
        add("tile" + std::to_string(tile) + "_parts" + std::to_string(parts), [&](Case& c) {
          c.tile = tile, c.parts = parts, c.heads = tile == 1 ? 20 : 72, c.topk = 300, c.hostile = true, c.requests = 3;
        });
        add("tile" + std::to_string(tile) + "_parts" + std::to_string(parts) + "_lengths_sink", [&](Case& c) {
          c.tile = tile, c.parts = parts, c.heads = 64, c.topk = 257, c.lengths = true, c.sink = true, c.requests = 5,
          c.out_f32 = true;
        });
      }
    for (int heads : {6, 16, 21})
      add("tile2_parts2_long_heads" + std::to_string(heads), [&](Case& c) {
        c.tile = c.parts = 2, c.heads = heads, c.topk = 2048 - 7 * heads, c.hostile = c.sink = true, c.requests = 3;
      });
    add("hostile", [](Case& c) { c.topk = 200, c.hostile = true, c.requests = 5; });
    add("hostile_wide", [](Case& c) { c.topk = 200, c.hostile = true, c.wide = true, c.requests = 5; });
    add("lengths", [](Case& c) { c.topk = 130, c.lengths = true, c.requests = 9, c.heads = 16; });
    add("sink", [](Case& c) { c.topk = 130, c.sink = true, c.hostile = true, c.heads = 24; });
    add("pair_strided_pages",
        [](Case& c) { c.topk = 130, c.pair = c.rope > 0, c.page_pad = 6400, c.row_pad = 128, c.page_size = 48; });
    add("page_size_176", [](Case& c) { c.topk = 130, c.page_pad = 64, c.page_size = 176, c.heads = 8; });
    add("out_f32", [](Case& c) { c.topk = 100, c.out_f32 = true; });
    add("mtp_own_lists", [](Case& c) { c.topk = 100, c.q_len = 3, c.heads = 16; });
    add("mtp_shared_list", [](Case& c) { c.topk = 100, c.q_len = 3, c.heads = 16, c.shared = true; });
    add("mtp_shared_list_lengths",
        [](Case& c) { c.topk = 100, c.q_len = 4, c.heads = 5, c.shared = true, c.lengths = true; });
    add("tokens129", [](Case& c) { c.topk = 65, c.requests = 129, c.heads = 8; });
    for (int q : {1, 2, 5, 8})
      for (int len : {1, 50, 64, 333})
        add("dense_q" + std::to_string(q) + "_len" + std::to_string(len),
            [&](Case& c) { c.dense = true, c.q_len = q, c.topk = len, c.heads = 16, c.page_size = 16; });
    add("dense_ragged", [](Case& c) { c.dense = true, c.topk = 900, c.lengths = true, c.requests = 70, c.heads = 16; });
    add("dense_ragged_invariant", [](Case& c) {
      c.dense = true, c.topk = 1900, c.lengths = true, c.requests = 9, c.heads = 64, c.invariant = true;
    });
    add("dense_holes",
        [](Case& c) { c.dense = true, c.topk = 400, c.hostile = true, c.requests = 6, c.heads = 128, c.sink = true; });
    if (f.format != KvFormat::bf16) add("nan_row", [](Case& c) { c.topk = 70, c.nan_row = true; });
    for (int tile = 1; tile <= rows.count; ++tile)
      for (int parts : {1, 2}) {
        const std::string of = "tile" + std::to_string(tile) + "_parts" + std::to_string(parts);
        const auto tail = [&](Case& c) {
          c.tile = tile, c.parts = parts, c.q_len = 4, c.heads = 16, c.nan_tail = true;
        };
        add("nan_tail_dense_" + of, [&](Case& c) { tail(c), c.dense = true, c.topk = 200, c.page_size = 16; });
        add("nan_tail_shared_" + of, [&](Case& c) { tail(c), c.shared = c.lengths = true, c.topk = 300; });
      }
    for (const auto& [beside, parts] : {std::pair{1, 12}, {1, 1}, {2, 6}, {3, 20}}) {
      if (rows.tile[rows.count - 1].shape.meeting == 0) break;  // parts of this tile cannot merge together
      const std::string of = "beside" + std::to_string(beside) + "_parts" + std::to_string(parts);
      const auto split = [&](Case& c) {
        c.tile = rows.count, c.parts = 8, c.requests = 7, c.beside = beside, c.beside_parts = parts, c.pages = 70;
      };
      add(of, [&](Case& c) { split(c), c.topk = 2048; });
      add(of + "_hostile", [&](Case& c) { split(c), c.topk = 1300, c.hostile = c.sink = true, c.heads = 72; });
      add(of + "_lengths", [&](Case& c) { split(c), c.topk = 1300, c.lengths = c.sink = c.out_f32 = true; });
      add(of + "_mtp_own", [&](Case& c) { split(c), c.topk = 700, c.requests = 3, c.q_len = 3; });
      add(of + "_mtp_shared",
          [&](Case& c) { split(c), c.topk = 700, c.q_len = 3, c.heads = 20, c.shared = c.lengths = c.sink = true; });
    }
    if (!small && f.rope) {
      add("beyond_2_31_elements",
          [](Case& c) { c.far = true, c.page_size = 48, c.pages = c.format == KvFormat::bf16 ? 77800 : 136800; });
      add("beyond_2_31_pages", [](Case& c) {
        c.far = true, c.page_size = 48, c.page_pad = 16, c.pages = c.format == KvFormat::bf16 ? 77800 : 136800;
      });
    }
  }
  std::erase_if(cases, [&](const Case& c) { return c.name.find(only) == std::string::npos; });
  int failed = 0;
  std::uint64_t seed = 1;
  for (const Case& c : cases) failed += !run_case(c, ++seed);
  std::printf("%zu cases, %d failed\n", cases.size(), failed);
  return failed ? 1 : 0;
}

// ---- bench ------------------------------------------------------------------------------------------

__device__ std::uint64_t mix_device(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
__device__ float normal(std::uint64_t i) {
  const std::uint64_t r = mix_device(i);
  const float u = (static_cast<float>(static_cast<unsigned>(r) >> 8) + 1.f) * 0x1p-24f,
              v = static_cast<float>(static_cast<unsigned>(r >> 40)) * 0x1p-24f;
  return sqrtf(-2.f * logf(u)) * cospif(2.f * v);
}
// One warp a row: normal values / 3.
__global__ void fill_rows(unsigned char* rows, std::int64_t count, bool fp8) {
  const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= count) return;
  if (!fp8) {
    auto* to = reinterpret_cast<__nv_bfloat16*>(rows + row * 1152);
    for (int i = lane; i < 576; i += 32) to[i] = __float2bfloat16(normal(row * 576 + i) / 3.f);
    return;
  }
  unsigned char* to = rows + row * 656;
  for (int group = 0; group < 4; ++group) {
    float x[4], most = 0;
    for (int i = 0; i < 4; ++i)
      x[i] = normal(row * 576 + group * 128 + i * 32 + lane) / 3.f, most = fmaxf(most, fabsf(x[i]));
    for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    const float scale = most / 448.f;
    for (int i = 0; i < 4; ++i) {
      unsigned short pair;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x[i] / scale));
      to[group * 128 + i * 32 + lane] = static_cast<unsigned char>(pair);
    }
    if (lane == 0) *reinterpret_cast<float*>(to + 512 + 4 * group) = scale;
  }
  for (int i = lane; i < 64; i += 32)
    reinterpret_cast<__nv_bfloat16*>(to + 528)[i] = __float2bfloat16(normal(row * 576 + 512 + i) / 3.f);
}

// Rows shared by the cases.
unsigned char* bench_rows(bool fp8, std::int64_t count) {
  static unsigned char* rows[2] = {};
  static std::int64_t held[2] = {};
  if (held[fp8] < count) {
    if (rows[fp8]) GOOD(cudaFree(rows[fp8]));
    GOOD(cudaMalloc(&rows[fp8], static_cast<std::size_t>(count) * (fp8 ? 656 : 1152)));
    fill_rows<<<static_cast<unsigned>((count + 7) / 8), 256>>>(rows[fp8], count, fp8);
    GOOD(cudaDeviceSynchronize());
    held[fp8] = count;
  }
  return rows[fp8];
}

// The least time that a loop of mma.sync can take here by its design: shared memory at 128 bytes a clock and
// multiprocessor, 6.1 clocks of a scheduler for a product of 16 x 8 x 16, and random rows from memory; both measured on
// an H200.
struct Floor {
  double us;
  const char* by;
};
Floor floor_of(const at::TileKernel& kernel, bool fp8, double lanes, std::int64_t groups) {
  const double row = fp8 ? 656 : 1152, heads = kernel.shape.heads;
  int khz = 0;
  GOOD(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  const double us = lanes * static_cast<double>(groups) / (multiprocessors() * khz * 1e-3);  // of a clock a lane
  const Floor floors[] = {{us * kernel.lane_bytes / 128, "shared memory"},
                          {us * heads / 8 * (1088 / 16) / 16 * 6.1 / 4, "products"},
                          {lanes * row / (fp8 ? 3.72e6 : 4.39e6), "gather"}};
  return *std::max_element(std::begin(floors), std::end(floors), [](Floor x, Floor y) { return x.us < y.us; });
}

int bench(const std::vector<std::string>& keys, const char* json, int tile, int force_parts) {
  Timer timer;
  cudaDeviceProp device;
  GOOD(cudaGetDeviceProperties(&device, 0));
  std::string text;
  for (const std::string& key : keys) {
    int heads = 0, batch = 0, tokens = 0, keys_n = 0, ctx = 0, topk = 2048;
    const bool prefill = key.find("prefill") != std::string::npos, dense = key.find("dense") != std::string::npos;
    const bool graph = key.ends_with(".graph"), fp8 = key.find("fp8_ds_mla") != std::string::npos;
    const auto number = [&](const char* mark) {
      const std::size_t i = key.find(mark);
      return i == std::string::npos ? 0 : std::atoi(key.c_str() + i + std::strlen(mark));
    };
    heads = number(".h"), batch = number(".b") ? number(".b") : 0, tokens = number(".s"), keys_n = number(".kv"),
    ctx = number(".ctx");
    if (key.find(".bf16.b") != std::string::npos) batch = 0;
    {  // ".b64" and not ".bf16"
      std::size_t i = 0;
      while ((i = key.find(".b", i)) != std::string::npos) {
        if (std::isdigit(static_cast<unsigned char>(key[i + 2]))) batch = std::atoi(key.c_str() + i + 2);
        i += 2;
      }
    }
    const bool mixed = key.find(".mixed") != std::string::npos, even = key.find(".even") != std::string::npos;
    const int units = prefill ? tokens : batch;
    const std::int64_t span = 32768;
    const std::int64_t count = prefill ? keys_n : dense ? std::int64_t{batch} * std::max(ctx, 8192) : batch * span;
    std::vector<int> lengths;
    if (dense) {
      lengths.assign(static_cast<std::size_t>(batch), ctx);
      if (mixed || even) lengths.assign(static_cast<std::size_t>(batch), even ? (131072 + 63 * 2048) / 64 : 2048);
      if (mixed) lengths[0] = 131072;
      if (mixed || even) ctx = 131072;
    }
    const int lanes = dense ? ctx : topk;
    unsigned char* rows = bench_rows(fp8, count);
    Random random{7};
    std::vector<int> slots, table;
    const int page = 64, table_pages = (lanes + page - 1) / page;
    if (dense) {
      std::vector<int> order(static_cast<std::size_t>(count / page));
      std::iota(order.begin(), order.end(), 0);
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.next() % i]);
      table.assign(static_cast<std::size_t>(units) * table_pages, -1);
      std::size_t from = 0;
      for (int r = 0; r < units; ++r)
        for (int j = 0; j * page < lengths[r]; ++j)
          table[static_cast<std::size_t>(r) * table_pages + j] = order[from++ % order.size()];
    } else {
      slots.resize(static_cast<std::size_t>(units) * topk);
      const int pool = prefill ? keys_n : static_cast<int>(span);
      std::vector<int> order(static_cast<std::size_t>(pool));
      std::iota(order.begin(), order.end(), 0);
      for (int u = 0; u < units; ++u)
        for (int j = 0; j < topk; ++j) {
          std::swap(order[j], order[j + random.below(pool - j)]);
          slots[static_cast<std::size_t>(u) * topk + j] = order[j] + (prefill ? 0 : u * static_cast<int>(span));
        }
    }
    std::vector<bf16> q(static_cast<std::size_t>(units) * heads * 576);
    for (auto& y : q) {
      float sum = 0;
      for (int i = 0; i < 3; ++i) sum += uniform(random);
      y = base::to_bf16(sum / 3.f);
    }
    at::CudaParams p{};
    bf16* d_q = device_copy(q);
    int *d_slots = device_copy(slots), *d_table = device_copy(table), *d_lengths = device_copy(lengths);
    unsigned char* d_out = nullptr;
    float* d_lse = nullptr;
    const std::size_t out_bytes = static_cast<std::size_t>(units) * heads * 1024;
    GOOD(cudaMalloc(&d_out, out_bytes));
    GOOD(cudaMalloc(&d_lse, static_cast<std::size_t>(units) * heads * 4));
    GOOD(cudaMemset(d_out, 0xFF, out_bytes));
    p.q = d_q, p.q_token = heads * 576, p.q_head = 576, p.q_rope = d_q + 512, p.q_rope_token = heads * 576,
    p.q_rope_head = 576;
    p.rows = rows, p.row_bytes = fp8 ? 656 : 1152, p.page_bytes = 64 * p.row_bytes, p.slots = count,
    p.pages = count / 64;
    p.units = units, p.fold = 1, p.heads = heads, p.lanes = lanes;
    if (dense)
      p.table = d_table, p.table_request = table_pages, p.table_pages = table_pages, p.table_page = at::divider(page),
      p.lengths = d_lengths;
    else p.indices = d_slots, p.unit_tokens = 1, p.index_request = topk, p.index_lane = 1;
    p.read_once = !prefill;
    p.slack = 8.f, p.heavy = 16.f;
    p.scale_log2 = at::kLog2e / 24.f, p.out = d_out, p.out_token = heads * 512, p.out_head = 512;
    p.lse = d_lse, p.lse_token = heads, p.lse_head = 1;
    const at::RowKernels& kernels = kernels_of(fp8 ? KvFormat::fp8_ds_mla : KvFormat::bf16, 64);
    const at::Choice choice =
        choice_of(kernels, {units, heads, lanes, dense, false, multiprocessors()}, tile, force_parts);
    const at::TileKernel& kernel = kernels.tile[choice.tile];
    const std::int64_t partial_rows =
        std::max(choice.items, at::partial_items(choice)) * choice.groups * kernel.shape.heads;
    GOOD(cudaMalloc(&p.partial, static_cast<std::size_t>(partial_rows) * 2048));
    GOOD(cudaMalloc(&p.partial_log2, static_cast<std::size_t>(partial_rows) * 4));
    GOOD(cudaMalloc(&p.unit_parts, at::kUnevenUnits * sizeof(at::UnitParts)));
    GOOD(cudaMalloc(&p.tickets, cuda::kTicketBytes));
    GOOD(cudaMemset(p.tickets, 0, cuda::kTicketBytes));
    GOOD(cudaDeviceSynchronize());
    const auto call = [&](cudaStream_t stream) { GOOD(launch(kernel, p, choice, stream)); };
    const Timed timed = graph ? timer.graph(call) : timer.flushed(call);

    // The last unit's first and last head, in double.
    const int last = units - 1, length = dense ? lengths[last] : topk;
    double worst = 0, size = 0;
    std::vector<std::vector<double>> values;
    for (int j = 0; j < length; ++j) {
      const std::int64_t slot =
          dense ? std::int64_t{table[static_cast<std::size_t>(last) * table_pages + j / page]} * page + j % page
                : slots[static_cast<std::size_t>(last) * topk + j];
      std::byte row[1152];
      GOOD(cudaMemcpy(row, rows + slot * p.row_bytes, static_cast<std::size_t>(p.row_bytes), cudaMemcpyDeviceToHost));
      values.emplace_back(576);
      if (fp8) kv::Fp8DsMlaRow::load(row, 512, 64, values.back().data());
      else kv::Bf16Row::load(row, 512, 64, values.back().data());
    }
    for (int h : {0, heads - 1}) {
      const bf16* mine = &q[(static_cast<std::size_t>(last) * heads + h) * 576];
      std::vector<double> w;
      double peak = -INFINITY, sum = 0;
      for (auto& v : values) {
        double dot = 0;
        for (int i = 0; i < 576; ++i) dot += v[i] * base::to_f32(mine[i]);
        w.push_back(dot / 24), peak = std::max(peak, dot / 24);
      }
      for (double& y : w) sum += y = std::exp(y - peak);
      std::vector<bf16> out(512);
      GOOD(cudaMemcpy(out.data(), d_out + (static_cast<std::size_t>(last) * heads + h) * 1024, 1024,
                      cudaMemcpyDeviceToHost));
      for (int i = 0; i < 512; ++i) {
        double want = 0;
        for (std::size_t j = 0; j < w.size(); ++j) want += w[j] / sum * values[j][i];
        const double d = want - base::to_f32(out[i]);
        worst += d * d, size += want * want;
      }
    }
    const double error = std::sqrt(worst / size);
    for (void* d : {(void*)d_q, (void*)d_slots, (void*)d_table, (void*)d_lengths, (void*)d_out, (void*)d_lse,
                    (void*)p.partial, (void*)p.partial_log2, (void*)p.tickets, (void*)p.unit_parts})
      GOOD(cudaFree(d));
    const double pairs =
        dense ? std::accumulate(lengths.begin(), lengths.end(), 0.0) : static_cast<double>(units) * topk;
    const double tflops = 2.0 * heads * pairs * 1088 / timed.us / 1e6,
                 tbps = pairs * static_cast<double>(p.row_bytes) / timed.us / 1e6;
    std::printf(
        "%-52s %9.2f us (%.2f .. %.2f) %7.1f TFLOP/s %6.3f TB/s  err %.1e  [tile %d: %d heads, parts %d, items %lld x "
        "%d]%s\n",
        key.c_str(), timed.us, timed.p10, timed.p90, tflops, tbps, error, static_cast<int>(choice.tile) + 1,
        kernel.shape.heads, choice.parts, static_cast<long long>(choice.items), static_cast<int>(choice.groups),
        error < 8e-3 ? "" : "  WRONG");
    if (!Arch::kWarpgroupMma) {
      const Floor floor = floor_of(kernel, fp8, pairs, choice.groups);
      std::printf("  floor %.1f us (%s): %.0f %%\n", floor.us, floor.by, 100 * floor.us / timed.us);
    }
    std::fflush(stdout);
    char row[512];
    std::snprintf(row, sizeof row,
                  "%s{\"case\": \"%s\", \"us\": %.3f, \"us_p10\": %.3f, \"us_p90\": %.3f, \"tflops\": %.2f, \"tbps\": "
                  "%.3f, \"error\": %.2g, \"runs\": 50, "
                  "\"tile\": %d, \"parts\": %d}",
                  text.empty() ? "" : ",\n ", key.c_str(), timed.us, timed.p10, timed.p90, tflops, tbps, error,
                  kernel.shape.heads, choice.parts);
    if (error < 8e-3) text += row;
  }
  if (json) {
    FILE* f = std::fopen(json, "w");
    std::fprintf(f, "{\"schema\": 1, \"kind\": \"bench\", \"gpu\": \"%s\", \"cases\": [\n %s\n]}\n", device.name,
                 text.c_str());
    std::fclose(f);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string mode = argc > 1 ? argv[1] : "";
  prepare();
  if (mode == "test") return test(argc > 2, argc > 3 ? argv[3] : "");
  std::vector<std::string> keys;
  const char* json = nullptr;
  int tile = 0, parts = 0;
  for (int i = 2; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "--json") json = argv[++i];
    else if (a == "--tile") tile = std::atoi(argv[++i]);
    else if (a == "--parts") parts = std::atoi(argv[++i]);
    else if (a == "--merge-kernel") g_merge_kernel = true;
    else if (a == "--beside") g_beside = std::atoi(argv[++i]), g_beside_parts = std::atoi(argv[++i]);
    else keys.push_back(a);
  }
  if (mode == "bench") return bench(keys, json, tile, parts);
  if (mode == "clusters") {
    for (const auto& rows : kConfig.rows)
      for (int i = 0; i < rows.count; ++i)
        for (int size = 2; size <= 8; ++size) {
          cudaLaunchAttribute a{};
          a.id = cudaLaunchAttributeClusterDimension, a.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
          cudaLaunchConfig_t c{};
          c.gridDim = dim3(static_cast<unsigned>(size * 128)),
          c.blockDim = dim3(static_cast<unsigned>(rows.tile[i].threads));
          c.dynamicSmemBytes = static_cast<std::size_t>(rows.tile[i].smem_bytes), c.attrs = &a, c.numAttrs = 1;
          int n = 0;
          GOOD(cudaOccupancyMaxActiveClusters(&n, rows.tile[i].kernel, &c));
          std::printf("%s heads %d: %d clusters of %d = %d CTAs\n", rows.rows, rows.tile[i].shape.heads, n, size,
                      n * size);
        }
    return 0;
  }
  std::printf("attention_cuda test | bench KEY...\n");
  return 2;
}
