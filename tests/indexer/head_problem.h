// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/head_problem.h -- seeded calls of write_index_keys and index_queries with their answers, worked out
// here in double from the values that went in, and how far a backend may be from them.
#pragma once
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "indexer/head.h"
#include "indexer/problem.h"

namespace sievemla::test {

inline constexpr int kMaxPosition = 40;

// cos and sin of position * theta^(-2i/64).
inline std::vector<float> rope_table(double theta) {
  std::vector<float> table(kMaxPosition * kIndexRope);
  for (int p = 0; p < kMaxPosition; ++p)
    for (int i = 0; i < 32; ++i) {
      const double angle = p * std::pow(theta, -2.0 * i / kIndexRope);
      table[p * kIndexRope + i] = static_cast<float>(std::cos(angle));
      table[p * kIndexRope + 32 + i] = static_cast<float>(std::sin(angle));
    }
  return table;
}

// rope(x) written out by the pairs' definition.
inline std::vector<double> roped(const std::vector<double>& x, RopeStyle style, const float* row) {
  std::vector<double> y = x;
  for (int i = 0; i < 32 && style != RopeStyle::none; ++i) {
    const int a = style == RopeStyle::interleaved ? 2 * i : i, b = style == RopeStyle::interleaved ? 2 * i + 1 : i + 32;
    const double cos = row[i], sin = row[32 + i];
    y[a] = x[a] * cos - x[b] * sin;
    y[b] = x[b] * cos + x[a] * sin;
  }
  return y;
}

// H x by the matrix's definition.
inline std::vector<double> hadamard(const std::vector<double>& x) {
  std::vector<double> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i)
    for (std::size_t j = 0; j < x.size(); ++j)
      y[i] += (std::popcount(i & j) % 2 ? -x[j] : x[j]) / std::sqrt(static_cast<double>(x.size()));
  return y;
}

// What an engine stores of a value that its kernel has in f32.
inline double stored_bf16(double x) { return double{base::to_f32(base::to_bf16(static_cast<float>(x)))}; }
inline std::vector<double> stored_bf16(std::vector<double> x) {
  for (double& value : x) value = stored_bf16(value);
  return x;
}

// How far an f32 key may be off, in roundings (2^-24). The mean of 128 values below 1.5 loses at most 128 * 1.5, which
// 1 / sqrt(variance) and the weight, together below 4, enlarge. The variance loses 130 of itself, halved by the root,
// on values below 4: 260. Four more operations on such values: 16. Rope mixes two of them by cos and sin: times 1.5.
inline constexpr double kKeyBound = 1.5 * (128 * 1.5 * 4 + 260 + 16) * kU;

struct KeyProblem {
  int tokens;
  RopeStyle style;
  DType input;
  Random random{7};
  Buffer k, weight, bias, cos_sin;
  std::vector<double> k_values, weight_values, bias_values;
  std::vector<float> table = rope_table(1e4);
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> slots;

  KeyProblem(int n, RopeStyle rope, DType dtype)
      : tokens(n),
        style(rope),
        input(dtype),
        k(dtype, n * kIndexDim),
        weight(dtype, kIndexDim),
        bias(dtype, kIndexDim),
        cos_sin(dtype, kMaxPosition * kIndexRope) {
    for (int i = 0; i < n * kIndexDim; ++i) k_values.push_back(k.put(i, 0.5 + random.uniform()));  // a mean to remove
    for (int i = 0; i < kIndexDim; ++i) weight_values.push_back(weight.put(i, 1 + 0.3 * random.uniform()));
    for (int i = 0; i < kIndexDim; ++i) bias_values.push_back(bias.put(i, 0.3 * random.uniform()));
    for (int i = 0; i < kMaxPosition * kIndexRope; ++i) table[i] = static_cast<float>(cos_sin.put(i, table[i]));
    for (int t = 0; t < n; ++t) positions.push_back(static_cast<std::int32_t>(random.below(kMaxPosition)));
    for (std::int64_t s : random.distinct(n, 2 * n)) slots.push_back(s);
  }
  // Slots 0 .. 2 * tokens - 1 lie in pages of 16.
  std::int64_t pages() const { return (2 * tokens + 15) / 16; }
  Rope rope() const {
    if (style == RopeStyle::none) return {style, {}, {}};
    return {style, tensor(positions.data(), {tokens}), cos_sin.view({kMaxPosition, kIndexRope})};
  }
  WriteIndexKeysArgs args(const Buffer& cache, IndexFormat format) const {
    WriteIndexKeysArgs a;
    a.k = k.view({tokens, kIndexDim});
    a.norm_weight = weight.view({kIndexDim});
    a.norm_bias = bias.view({kIndexDim});
    a.rope = rope();
    a.slots = tensor(slots.data(), {tokens});
    a.cache = {format, cache.view({pages(), 16, format == IndexFormat::fp8 ? kIndexKeyBytes : kIndexDim})};
    return a;
  }
  Buffer cache(IndexFormat format) const {
    return Buffer(storage(format), pages() * 16 * (format == IndexFormat::fp8 ? kIndexKeyBytes : kIndexDim));
  }
  std::vector<double> answer(int t, bool round_bf16 = false) const {
    double mean = 0, variance = 0;
    for (int i = 0; i < kIndexDim; ++i) mean += k_values[t * kIndexDim + i] / kIndexDim;
    for (int i = 0; i < kIndexDim; ++i) variance += std::pow(k_values[t * kIndexDim + i] - mean, 2) / kIndexDim;
    std::vector<double> key;
    for (int i = 0; i < kIndexDim; ++i)
      key.push_back((k_values[t * kIndexDim + i] - mean) / std::sqrt(variance + 1e-6) * weight_values[i] +
                    bias_values[i]);
    const float* row = table.data() + positions[t] * kIndexRope;
    return round_bf16 ? stored_bf16(roped(stored_bf16(key), style, row)) : roped(key, style, row);
  }
  // A cache's f32 or bf16 keys against the answer.
  testing::AssertionResult agrees(const Buffer& cache, const Backend& backend) const {
    const double bound = backend.kind() == BackendKind::cpu ? kKeyBound : 1e-12;
    const double half_step = cache.dtype == DType::f32 ? kU : 0x1p-8;
    for (int t = 0; t < tokens; ++t) {
      const std::vector<double> want = answer(t);
      double got[kIndexDim];
      kv::load_index_values(cache.dtype, cache.bytes.data() + slots[t] * kIndexDim * size_of(cache.dtype), got);
      for (int i = 0; i < kIndexDim; ++i)
        if (!(std::abs(got[i] - want[i]) <= bound + half_step * std::abs(want[i])))
          return testing::AssertionFailure() << backend.name() << " " << name_of(style) << " token " << t << " dim "
                                             << i << ": got " << got[i] << ", want " << want[i];
    }
    return testing::AssertionSuccess();
  }
};

// ---- queries ----------------------------------------------------------------------------------------

struct QueryProblem {
  static constexpr int kTokens = 3, kHeads = 19;  // more heads than a task of the cpu backend, which takes 16
  RopeStyle style;
  Random random{11};
  Buffer q, weights, cos_sin;
  std::vector<double> q_values, weight_values;
  std::vector<float> table = rope_table(1e6);
  std::vector<std::int64_t> positions{5, 0, 39};

  QueryProblem(RopeStyle rope, DType dtype)
      : style(rope),
        q(dtype, kTokens * kHeads * kIndexDim),
        weights(dtype, kTokens * kHeads),
        cos_sin(DType::f32, kMaxPosition * kIndexRope) {
    for (int i = 0; i < kTokens * kHeads * kIndexDim; ++i) q_values.push_back(q.put(i, 2 * random.uniform()));
    for (int i = 0; i < kTokens * kHeads; ++i) weight_values.push_back(weights.put(i, random.uniform()));
    for (int i = 0; i < kMaxPosition * kIndexRope; ++i) cos_sin.put(i, table[i]);
  }
  IndexQueryArgs args(const Buffer& out_q, std::vector<float>& out_weights) const {
    IndexQueryArgs a;
    a.q = q.view({kTokens, kHeads, kIndexDim});
    a.weights = weights.view({kTokens, kHeads});
    a.weight_scale = 0.125f;
    a.rope.style = style;
    if (style != RopeStyle::none) {
      a.rope.positions = tensor(positions.data(), {kTokens});
      a.rope.cos_sin = cos_sin.view({kMaxPosition, kIndexRope});
    }
    a.out_q = out_q.view({kTokens, kHeads, kIndexDim});
    a.out_weights = tensor(out_weights.data(), {kTokens, kHeads});
    return a;
  }
  std::vector<double> answer(int t, int h) const {
    const auto first = q_values.begin() + (t * kHeads + h) * kIndexDim;
    return roped({first, first + kIndexDim}, style, table.data() + positions[t] * kIndexRope);
  }
  // Outputs against the answer. Rope in f32: three roundings of products and a sum below 4. Then the output's own half
  // step.
  testing::AssertionResult agrees(const Buffer& out, const std::vector<float>& out_weights,
                                  const Backend& backend) const {
    const double half_step = out.dtype == DType::f32 ? kU : out.dtype == DType::bf16 ? 0x1p-8 : 0x1p-4;
    for (int t = 0; t < kTokens; ++t)
      for (int h = 0; h < kHeads; ++h) {
        const auto where = [&] {
          return testing::AssertionFailure()
                 << backend.name() << " " << name_of(style) << " token " << t << " head " << h;
        };
        const int at = t * kHeads + h;
        const std::vector<double> want = answer(t, h);
        double scale = 1, amax = 0;
        for (double x : want) amax = std::max(amax, std::abs(x));
        if (out.dtype == DType::u8) scale = std::exp2(std::ceil(std::log2(amax / 448)));
        const double weight = weight_values[at] * 0.125 * scale;
        if (!(std::abs(out_weights[at] - weight) <= 1e-6 * scale))
          return where() << ": weight " << out_weights[at] << ", want " << weight;
        const double least = out.dtype == DType::u8 ? 0x1p-10 * scale : 0;  // half a step of the subnormals
        double got[kIndexDim];
        kv::load_index_values(out.dtype, out.bytes.data() + at * kIndexDim * size_of(out.dtype), got);
        for (int i = 0; i < kIndexDim; ++i)
          if (!(std::abs(got[i] * scale - want[i]) <= 12 * kU + std::max(1.001 * half_step * std::abs(want[i]), least)))
            return where() << " dim " << i << ": got " << got[i] * scale << ", want " << want[i];
      }
    return testing::AssertionSuccess();
  }
};

}  // namespace sievemla::test
