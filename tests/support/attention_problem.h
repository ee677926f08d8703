// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/attention_problem.h -- a seeded attention call, its answer worked out here, and how far rounding may
// take a result from it.
//
// Everything that nobody may read is poison: cache rows that no live lane names and all padding are 0xFF bytes (a NaN
// in every row type), the workspace is full of NaN and just large enough, the outputs are NaN between guards. A query
// is a function of (seed, token, head) and a row of (seed, slot), so that problems of other sizes share their
// contents.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "cpu/isa/isa.h"
#include "kv/formats.h"
#include "sievemla/attention.h"
#include "support/guard.h"
#include "support/random.h"
#include "support/workspace.h"
#if SIEVEMLA_WITH_CUDA
#include "support/cuda_memory.h"
#endif

namespace sievemla::test {

struct Result {
  std::vector<float> out, lse;  // [tokens, heads, latent] and [tokens, heads]
  std::span<const float> row(std::int64_t i, std::int64_t latent) const {
    return std::span(out).subspan(static_cast<std::size_t>(i * latent), static_cast<std::size_t>(latent));
  }
};

// Same bits, the sign of zeros and the NaNs included.
inline testing::AssertionResult same_bits(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << "sizes " << a.size() << " and " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0)
      return testing::AssertionFailure() << "element " << i << ": " << a[i] << " and " << b[i];
  return testing::AssertionSuccess();
}
inline testing::AssertionResult same_bits(const Result& a, const Result& b) {
  if (auto out = same_bits(a.out, b.out); !out) return out << " of out";
  return same_bits(a.lse, b.lse) << " of lse";
}

struct Problem {
  std::int64_t tokens = 1, heads = 8;
  KvFormat format = KvFormat::bf16;
  int latent = 512, rope = 64;
  std::int64_t pages = 2, page_size = 64;
  std::int64_t row_padding = 0, page_padding = 0;  // in elements of the storage dtype
  DType q_dtype = DType::bf16, out_dtype = DType::f32;
  bool split_q = false;  // q as (nope, rope), the nope part a transposed view
  bool sinks = false;
  float scale = 1.f / 16;
  std::uint64_t seed = 1;
  bool exact = false;  // small whole numbers: with scale = ln 2 every weight is a power of two, which bf16 holds

  // Sparse: what stands in the lanes, topk of them a token; lane counts are optional.
  std::int64_t topk = 0;
  std::vector<std::int64_t> indices{};
  std::vector<std::int32_t> topk_length{};
  bool wide = false;  // i64
  // Dense, if there are lengths.
  std::int64_t table_width = 0, table_stride = 0;  // 0: the width
  std::vector<std::int32_t> table{}, lengths{};

  std::int64_t slots() const { return pages * page_size; }
  std::int64_t width() const { return latent + rope; }

  // ---- rows ----

  Problem& list(std::vector<std::vector<std::int64_t>> lanes) {  // shorter lists end in -1
    tokens = static_cast<std::int64_t>(lanes.size());
    topk = 0;
    for (const auto& l : lanes) topk = std::max(topk, static_cast<std::int64_t>(l.size()));
    indices.clear();
    for (auto& l : lanes) {
      l.resize(static_cast<std::size_t>(topk), -1);
      indices.insert(indices.end(), l.begin(), l.end());
    }
    return *this;
  }
  // `live` different slots a token among k lanes, in random order and places.
  Problem& random_list(std::int64_t k, std::int64_t live) {
    Random random(seed * 77 + 5);
    std::vector<std::vector<std::int64_t>> lanes;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::int64_t> l(static_cast<std::size_t>(k), -1);
      const auto chosen = random.distinct(live, slots()), places = random.distinct(live, k);
      for (std::size_t i = 0; i < chosen.size(); ++i) l[static_cast<std::size_t>(places[i])] = chosen[i];
      lanes.push_back(std::move(l));
    }
    return list(std::move(lanes));
  }

  // The slots that token t attends to, in order: the definition, written without the code under test.
  std::vector<std::int64_t> live(std::int64_t t) const {
    std::vector<std::int64_t> found;
    if (lengths.empty()) {
      const std::int64_t n = topk_length.empty() ? topk : std::min<std::int64_t>(topk, topk_length[at(t)]);
      for (std::int64_t i = 0; i < n; ++i)
        if (const std::int64_t s = indices[at(t * topk + i)]; s >= 0 && s < slots()) found.push_back(s);
      return found;
    }
    const std::int64_t requests = static_cast<std::int64_t>(lengths.size()), q_len = tokens / requests;
    const std::int64_t request = t / q_len, visible = lengths[at(request)] - q_len + 1 + t % q_len;
    for (std::int64_t j = 0; j < visible && j / page_size < table_width; ++j)
      if (const std::int64_t page = table[at(request * stride_of_table() + j / page_size)]; page >= 0 && page < pages)
        found.push_back(page * page_size + j % page_size);
    return found;
  }

  // ---- contents ----

  // Heads of four loudnesses, from nearly flat to peaked softmax.
  std::vector<float> query(std::int64_t t, std::int64_t h) const {
    if (exact) {
      std::vector<float> q(at(width()));
      q[at(h % 32)] = 1;
      if (rope > 0) q[at(latent + h % rope)] = -1;
      return q;
    }
    constexpr float kLoudness[] = {1.f, 4.f, 2.f, 32.f};
    return Random(seed * 1'000'003 + static_cast<std::uint64_t>(t * 128 + h)).f32s(width(), kLoudness[h % 4]);
  }
  std::vector<float> row(std::int64_t slot) const {  // before the row type rounds it
    Random random(seed * 7'000'003 + 1'000'000 + static_cast<std::uint64_t>(slot));
    if (!exact) return random.f32s(width(), 0.25f);
    std::vector<float> x;  // the 7 of each group makes its scale 7 / 448, a power of two
    for (std::int64_t d = 0; d < width(); ++d)
      x.push_back(d % 128 == 127 ? 7.f : static_cast<float>(random.below(d < latent ? 8 : 2)));
    return x;
  }
  float sink(std::int64_t h) const { return static_cast<float>(h % 5) - 2.f; }

  // ---- run ----

  using Tweak = std::function<void(AttentionArgs&)>;

  Result run(const Backend& backend, const Tweak& tweak = {}) const {
    return run(backend, Cache(*this).fill(*this), tweak);
  }

  struct Cache {
    std::vector<std::byte> bytes;
    KvCache view;
    std::vector<bool> filled;
    explicit Cache(const Problem& p) : filled(static_cast<std::size_t>(p.slots())) {
      const DType storage = info(p.format).storage;
      const std::int64_t row = info(p.format).row_bytes(p.latent, p.rope) / size_of(storage) + p.row_padding;
      const std::int64_t page = row * p.page_size + p.page_padding;
      bytes.assign(static_cast<std::size_t>(page * p.pages * size_of(storage)), std::byte{0xFF});
      view.format = p.format;
      view.latent = p.latent;
      view.rope = p.rope;
      view.pages = tensor(reinterpret_cast<const std::uint8_t*>(bytes.data()), {p.pages, p.page_size, row});
      view.pages.dtype = storage;
      view.pages.stride = {page, row, 1};
    }
    Cache(const Cache&) = delete;  // the view points into the bytes
    void fill(const Problem& p, std::int64_t slot) {
      if (filled[at(slot)]) return;
      filled[at(slot)] = true;
      const std::vector<float> x = p.row(slot);
      kv::store_row(view, slot, x.data(), x.data() + p.latent, ScaleRule::arbitrary);
    }
    const Cache& fill(const Problem& p) {  // what is attended to
      for (std::int64_t t = 0; t < p.tokens; ++t)
        for (std::int64_t s : p.live(t)) fill(p, s);
      return *this;
    }
  };

  // `shared`: a CUDA workspace that others use too; else it has its own.
  Result run(const Backend& backend, const Cache& cache, const Tweak& tweak = {},
             [[maybe_unused]] Workspace shared = {}) const {
    const std::int64_t cells = tokens * heads;
    std::vector<float> q32(at(cells * width()));  // [tokens, heads, width], or [heads, tokens, latent] then the ropes
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::vector<float> x = query(t, h);
        float* first = q32.data() + (split_q ? (h * tokens + t) * latent : (t * heads + h) * width());
        float* rest = split_q ? q32.data() + cells * latent + (t * heads + h) * rope : first + latent;
        std::copy_n(x.data(), latent, first);
        std::copy_n(x.data() + latent, rope, rest);
      }
    std::vector<bf16> q16;
    for (float x : q32) q16.push_back(base::to_bf16(x));
    const auto q_view = [&](std::int64_t offset, std::initializer_list<std::int64_t> shape) {
      return q_dtype == DType::bf16 ? tensor(q16.data() + offset, shape) : tensor(q32.data() + offset, shape);
    };

    std::vector<std::int32_t> narrow;
    for (std::int64_t i : indices) narrow.push_back(static_cast<std::int32_t>(i));
    std::vector<float> sink_values;
    for (std::int64_t h = 0; h < heads; ++h) sink_values.push_back(sink(h));
    Guarded<float> out32(out_dtype == DType::f32 ? cells * latent : 0, kNan), lse(cells, kNan);
    Guarded<bf16> out16(out_dtype == DType::bf16 ? cells * latent : 0, bf16{0xFFFF});

    AttentionArgs args;
    args.q = q_view(0, {tokens, heads, split_q ? latent : width()});
    if (split_q) {
      args.q.stride = {latent, tokens * latent, 1};
      args.q_rope = q_view(cells * latent, {tokens, heads, rope});
    }
    args.kv = cache.view;
    if (lengths.empty()) {
      Slots rows;
      rows.indices = wide ? tensor(indices.data(), {tokens, topk}) : tensor(narrow.data(), {tokens, topk});
      if (!topk_length.empty()) rows.topk_length = tensor(topk_length.data(), {tokens});
      args.rows = rows;
    } else {
      BlockTable rows;
      rows.table = tensor(table.data(), {static_cast<std::int64_t>(lengths.size()), table_width});
      rows.table.stride[0] = stride_of_table();
      rows.lengths = tensor(lengths.data(), {static_cast<std::int64_t>(lengths.size())});
      args.rows = rows;
    }
    args.scale = scale;
    if (sinks) args.sink = tensor(sink_values.data(), {heads});
    args.out = out_dtype == DType::bf16 ? tensor(out16.data(), {tokens, heads, latent})
                                        : tensor(out32.data(), {tokens, heads, latent});
    args.lse = tensor(lse.data(), {tokens, heads});
    if (tweak) tweak(args);

    std::int64_t lanes = topk;
    for (std::int32_t n : lengths) lanes = std::max(lanes, std::min<std::int64_t>(n, table_width * page_size));
    if (backend.kind() == BackendKind::cuda) {
#if SIEVEMLA_WITH_CUDA
      if (!lengths.empty()) lanes = table_width * page_size;
      const CudaWorkspace own(
          backend, shared.data ? 0 : attention_workspace_bytes(backend, {tokens, heads, lanes, latent, rope}));
      const Workspace workspace = shared.data ? shared : Workspace(own);
      OnDevice device(backend.device());
      const AttentionArgs there = device.put(args);
      attention(backend, there, workspace);
      const Result first = [&] {
        device.take_back(args.out), device.take_back(args.lse);
        return Result{{out32.begin(), out32.end()}, {lse.begin(), lse.end()}};
      }();
      attention(backend, there, workspace);  // on a used workspace
      device.take_back(args.out), device.take_back(args.lse);
      EXPECT_TRUE(same_bits(first, Result{{out32.begin(), out32.end()}, {lse.begin(), lse.end()}}));
#endif
    } else {
      const PoisonedWorkspace workspace(attention_workspace_bytes(backend, {tokens, heads, lanes, latent, rope}));
      attention(backend, args, workspace);
    }

    EXPECT_TRUE(out32.intact());
    EXPECT_TRUE(out16.intact());
    EXPECT_TRUE(lse.intact());
    Result result{{out32.begin(), out32.end()}, {lse.begin(), lse.end()}};
    for (bf16 x : out16) result.out.push_back(base::to_f32(x));
    return result;
  }

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  std::int64_t stride_of_table() const { return table_stride ? table_stride : table_width; }
};

// ---- the answer, and its bounds ---------------------------------------------------------------------

// How a backend adds. u is its rounding unit. With n terms in a sum a term passes through at most n + 4 roundings. The
// tiers whose operands are bf16 round each weight to `weight` before they multiply; they divide by the sum of the
// rounded weights, which is off by as much.
struct Arithmetic {
  double u, weight;
};
inline bool computes_in_bf16(const Backend& backend, const Problem& p) {
  return backend.kind() == BackendKind::cpu && cpu::isa() >= cpu::Isa::avx512bf16 && p.q_dtype == DType::bf16 &&
         p.format != KvFormat::f32;
}
inline Arithmetic arithmetic_of(const Backend& backend, const Problem& p) {
  if (backend.kind() == BackendKind::reference) return {0x1p-53, 0};
  return {0x1p-24, computes_in_bf16(backend, p) ? 0x1p-8 : 0};
}

struct Answer {
  std::vector<double> out, mass;  // [latent]; mass = sum of p * |v|
  double lse;                     // without sink
  double size;                    // the largest scale * sum |q| |k| of a row
  double spread;                  // peak - lowest score
  double rows;
};

// Softmax attention of one query over rows that lie in the cache, straight from the definition, in double.
inline Answer answer(const Problem& p, const Problem::Cache& cache, const std::vector<std::int64_t>& slots,
                     std::int64_t t, std::int64_t h) {
  const std::vector<float> q = p.query(t, h);
  std::vector<std::vector<double>> rows;
  std::vector<double> score;
  Answer a{std::vector<double>(Problem::at(p.latent)), std::vector<double>(Problem::at(p.latent)), -INFINITY, 0, 0,
           static_cast<double>(slots.size())};
  for (std::int64_t slot : slots) {
    std::vector<double> row(q.size());
    kv::load_row(cache.view, slot, row.data());
    double dot = 0, size = 0;
    for (std::size_t d = 0; d < q.size(); ++d) {
      dot += static_cast<double>(q[d]) * row[d];
      size += std::abs(static_cast<double>(q[d]) * row[d]);
    }
    score.push_back(dot * static_cast<double>(p.scale));
    a.size = std::max(a.size, size * std::abs(static_cast<double>(p.scale)));
    rows.push_back(std::move(row));
  }
  if (slots.empty()) return a;
  const double peak = *std::max_element(score.begin(), score.end());
  a.spread = peak - *std::min_element(score.begin(), score.end());
  double sum = 0;
  for (double s : score) sum += std::exp(s - peak);
  a.lse = peak + std::log(sum);
  const double total = p.sinks ? sum + std::exp(static_cast<double>(p.sink(h)) - peak) : sum;
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (std::size_t d = 0; d < a.out.size(); ++d) {
      const double share = std::exp(score[i] - peak) / total * rows[i][d];
      a.out[d] += share;
      a.mass[d] += std::abs(share);
    }
  return a;
}

// Bounds to first order (all factors are below 1e-2, so the rest is below 1 %, which the 1.02 covers):
//   a score          |error| <= e = (width + 4 + 2) u * size             dot product, dequantised row, scale
//   a weight         relative <= e + 2 u spread + 3 u (blocks + 2)       difference to the peak; exp; the peak moves at
//                                                                        most once a block, and chunks are merged
//   the sum          relative <= a weight's + (rows + blocks + 4) u
//   out              relative to the mass: a weight's + the sum's + (rows + blocks + 4) u + 2 roundings of weights
// blocks = rows / 64 + 33 chunks, since the 64-row blocks of the CPU end at chunks, of which there are at most 32.
struct Bounds {
  double out_relative_to_mass, lse;
};
inline Bounds bounds(const Problem& p, const Answer& a, Arithmetic arithmetic) {
  if (a.rows == 0) return {0, 0};
  const auto [u, weight_rounding] = arithmetic;
  const double blocks = a.rows / 64 + 33;
  const double score = (static_cast<double>(p.width()) + 6) * u * a.size;
  const double weight = score + 2 * u * a.spread + 3 * u * (blocks + 2);
  const double sum = weight + (a.rows + blocks + 4) * u;
  return {1.02 * (weight + sum + (a.rows + blocks + 4) * u + 2 * weight_rounding),
          1.02 * (sum + 2 * u * (a.size + std::abs(a.lse)))};
}

// The result of (token, head) against the answer. Outputs are rounded once more, to f32 or bf16 (half an ulp).
inline testing::AssertionResult agrees(const Problem& p, const Result& result, const Answer& want, std::int64_t t,
                                       std::int64_t h, Arithmetic arithmetic) {
  const Bounds b = bounds(p, want, arithmetic);
  const double store = p.out_dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
  const auto where = [&] { return testing::AssertionFailure() << "token " << t << ", head " << h << ": "; };
  const double lse = static_cast<double>(result.lse[Problem::at(t * p.heads + h)]);
  if (std::isinf(want.lse) ? lse != want.lse : !(std::abs(lse - want.lse) <= b.lse + 0x1p-24 * std::abs(want.lse)))
    return where() << "lse " << lse << ", want " << want.lse << ", bound " << b.lse;
  const auto out = result.row(t * p.heads + h, p.latent);
  for (std::size_t d = 0; d < out.size(); ++d) {
    const double bound = b.out_relative_to_mass * want.mass[d] + store * std::abs(want.out[d]) * 1.02;
    if (!(std::abs(static_cast<double>(out[d]) - want.out[d]) <= bound) || (want.rows == 0 && std::signbit(out[d])))
      return where() << "column " << d << ": " << out[d] << ", want " << want.out[d] << ", bound " << bound;
  }
  return testing::AssertionSuccess();
}

// The whole problem, or every step-th (token, head) cell of it, on one backend.
inline testing::AssertionResult solved(const Problem& p, const Backend& backend, std::int64_t step = 1) {
  Problem::Cache cache(p);
  const Result result = p.run(backend, cache.fill(p));
  for (std::int64_t i = 0; i < p.tokens * p.heads; i += step) {
    const std::int64_t t = i / p.heads, h = i % p.heads;
    const auto ok = agrees(p, result, answer(p, cache, p.live(t), t, h), t, h, arithmetic_of(backend, p));
    if (!ok) return testing::AssertionFailure() << backend.name() << ": " << ok.message();
  }
  return testing::AssertionSuccess();
}

}  // namespace sievemla::test
