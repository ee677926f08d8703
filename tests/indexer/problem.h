// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/indexer/problem.h -- a seeded call of index_scores with its answer, worked out here in double from the values
// that went in. Every byte of the cache that holds no visible key is 0xFF: NaN in all three formats.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kv/e4m3.h"
#include "kv/index_page.h"
#include "sievemla/indexer.h"
#include "support/backends.h"
#include "support/guard.h"
#include "support/near.h"
#include "support/random.h"
#include "support/workspace.h"

namespace sievemla::test {

inline constexpr double kU = 0x1p-24;  // half an ulp of f32: one rounding
inline constexpr float kUntouched = 12345.f;

// Bytes of n elements of a dtype.
struct Buffer {
  DType dtype;
  std::vector<std::byte> bytes;
  Buffer(DType type, std::int64_t n)
      : dtype(type), bytes(static_cast<std::size_t>(n * size_of(type)), std::byte{0xFF}) {}
  // Stores a value that the dtype holds exactly, or the nearest that it does; returns it.
  double put(std::int64_t i, double x) {
    std::byte* at = bytes.data() + i * size_of(dtype);
    if (dtype == DType::u8) {
      *reinterpret_cast<std::uint8_t*>(at) = kv::to_e4m3(static_cast<float>(x));
      return kv::from_e4m3(*reinterpret_cast<std::uint8_t*>(at));
    }
    if (dtype == DType::bf16) {
      *reinterpret_cast<bf16*>(at) = base::to_bf16(x);
      return base::to_f32(*reinterpret_cast<bf16*>(at));
    }
    *reinterpret_cast<float*>(at) = static_cast<float>(x);
    return *reinterpret_cast<float*>(at);
  }
  TensorView view(std::initializer_list<std::int64_t> shape) const {
    TensorView v = tensor(reinterpret_cast<const std::uint8_t*>(bytes.data()), shape);
    v.dtype = dtype;
    return v;
  }
};

struct Key {
  std::vector<double> value;
  float scale = 1;
};

struct ScoreShape {
  std::vector<int> lengths;  // of each row
  int requests = 1;
  int heads = 4;
  int page_size = 64;
  IndexFormat format = IndexFormat::fp8;
  DType q_dtype = DType::u8;
  std::uint64_t seed = 1;
  int rows() const { return static_cast<int>(lengths.size()); }
};

inline DType storage(IndexFormat format) {
  return format == IndexFormat::fp8 ? DType::u8 : format == IndexFormat::bf16 ? DType::bf16 : DType::f32;
}

class ScoreProblem {
 public:
  explicit ScoreProblem(ScoreShape s)
      : shape(std::move(s)),
        q(shape.q_dtype, std::int64_t{shape.rows()} * shape.heads * kIndexDim),
        width(std::max(1, *std::max_element(shape.lengths.begin(), shape.lengths.end()))),
        pages_per_request((width + shape.page_size - 1) / shape.page_size),
        pages(shape.requests * pages_per_request + 3),  // three that nobody lists
        cache(storage(shape.format), std::int64_t{pages} * shape.page_size * row_elements()),
        random_(shape.seed) {
    for (int r = 0; r < shape.rows(); ++r) row_request.push_back(r / std::max(1, shape.rows() / shape.requests));
    const std::vector<std::int64_t> order = random_.distinct(pages, pages);
    for (int i = 0; i < shape.requests * pages_per_request; ++i) table.push_back(static_cast<std::int32_t>(order[i]));
    weights = random_.f32s(std::int64_t{shape.rows()} * shape.heads);
    for (std::int64_t i = 0; i < std::int64_t{shape.rows()} * shape.heads * kIndexDim; ++i)
      q_values.push_back(q.put(i, value(shape.q_dtype)));
    keys.resize(static_cast<std::size_t>(shape.requests));
    write_visible_keys();
  }

  ScoreShape shape;
  Buffer q;
  int width, pages_per_request, pages;
  Buffer cache;
  std::vector<std::int32_t> table, row_request;
  std::vector<float> weights;
  std::vector<double> q_values;
  std::vector<std::vector<Key>> keys;  // [request][position]

  IndexScoreArgs args() const {
    IndexScoreArgs a;
    a.q = q.view({shape.rows(), shape.heads, kIndexDim});
    a.weights = tensor(weights.data(), {shape.rows(), shape.heads});
    a.paged.cache.format = shape.format;
    a.paged.cache.pages = cache.view({pages, shape.page_size, row_elements()});
    a.paged.block_table = tensor(table.data(), {shape.requests, pages_per_request});
    a.lengths = tensor(shape.lengths.data(), {shape.rows()});
    return a;
  }

  // Runs `a` and returns [rows, width]. Between rows lie three columns that must not change, nor must memory around.
  std::vector<float> run(const Backend& backend, IndexScoreArgs a) const {
    constexpr int kGap = 3;
    const std::int64_t rows = a.q.dim(0), stride = width + kGap;
    Guarded<float> logits(rows * stride, kUntouched);
    a.logits = tensor(logits.data(), {rows, width});
    a.logits.stride[0] = stride;
    index_scores(backend, a, PoisonedWorkspace(index_scores_workspace_bytes(backend, {rows, a.q.dim(1), width})));
    std::vector<float> out;
    for (std::int64_t i = 0; i < rows * stride; ++i) {
      if (i % stride < width) out.push_back(logits[static_cast<std::size_t>(i)]);
      else EXPECT_EQ(logits[static_cast<std::size_t>(i)], kUntouched) << "column past the view, row " << i / stride;
    }
    EXPECT_TRUE(logits.intact());
    return out;
  }
  std::vector<float> run(const Backend& backend) const { return run(backend, args()); }

  // The answer, and how far f32 may be from it: a dot product of n terms loses at most n roundings of sum |q k|, relu
  // does not widen that, the sum over heads adds one for each product and each addition, the scale one more.
  struct Answer {
    double score, bound;
  };
  Answer answer(int row, int j, bool f32) const {
    const Key& key = keys[static_cast<std::size_t>(row_request[row])][static_cast<std::size_t>(j)];
    double sum = 0, magnitude = 0;
    for (int h = 0; h < shape.heads; ++h) {
      double dot = 0, absolute = 0;
      for (int d = 0; d < kIndexDim; ++d) {
        const double product = q_values[(std::size_t(row) * shape.heads + h) * kIndexDim + d] * key.value[d];
        dot += product;
        absolute += std::abs(product);
      }
      const double w = static_cast<double>(weights[std::size_t(row) * shape.heads + h]);
      sum += w * std::max(dot, 0.0);
      magnitude += std::abs(w) * absolute;
    }
    const double roundings = f32 ? (kIndexDim + shape.heads + 2) * 1.001 : 0;  // 1.001: second order
    return {sum * key.scale,
            (roundings * kU + 1e-13) * magnitude * std::abs(key.scale) + kU * std::abs(sum * key.scale)};
  }

  testing::AssertionResult agrees(const std::vector<float>& got, bool f32) const {
    for (int r = 0; r < shape.rows(); ++r) {
      for (int j = 0; j < width; ++j) {
        const double x = got[std::size_t(r) * width + j];
        if (j >= shape.lengths[r]) {
          if (x != -kInf)
            return testing::AssertionFailure() << "row " << r << " column " << j << ": " << x << ", not -inf";
          continue;
        }
        const Answer want = answer(r, j, f32);
        if (!(std::abs(x - want.score) <= want.bound))
          return testing::AssertionFailure()
                 << "row " << r << " key " << j << ": got " << x << ", want " << want.score << " within " << want.bound;
      }
    }
    return testing::AssertionSuccess();
  }

  std::int64_t slot(int request, int j) const {
    return std::int64_t{table[request * pages_per_request + j / shape.page_size]} * shape.page_size +
           j % shape.page_size;
  }
  int row_elements() const { return shape.format == IndexFormat::fp8 ? kIndexKeyBytes : kIndexDim; }

 private:
  double value(DType dtype) { return random_.uniform() * (dtype == DType::u8 ? 448 : 1); }

  void write_visible_keys() {
    const IndexCache view = args().paged.cache;
    for (int r = 0; r < shape.rows(); ++r) {
      std::vector<Key>& known = keys[static_cast<std::size_t>(row_request[r])];
      while (static_cast<int>(known.size()) < shape.lengths[r]) {
        const kv::IndexKeyAddress at =
            kv::index_key_address(view, slot(row_request[r], static_cast<int>(known.size())));
        Key key;
        Buffer one(storage(shape.format), kIndexDim);
        for (int d = 0; d < kIndexDim; ++d) key.value.push_back(one.put(d, value(one.dtype)));
        std::memcpy(at.key, one.bytes.data(), one.bytes.size());
        if (at.scale) {
          key.scale = static_cast<float>(std::exp(2 * random_.uniform()) / 448);
          std::memcpy(at.scale, &key.scale, sizeof key.scale);
        }
        known.push_back(std::move(key));
      }
    }
  }

  Random random_;
};

// A page whose key j and the query are all ones, and whose scale j is j + 1: score j is 128 (j + 1).
struct GoldenPage {
  std::vector<std::uint8_t> page = std::vector<std::uint8_t>(64 * kIndexKeyBytes, 0x38);  // e4m3 1.0
  std::vector<std::uint8_t> q = std::vector<std::uint8_t>(kIndexDim, 0x38);
  float weight = 1;
  std::int32_t table = 0, length = 64;

  GoldenPage() {
    for (int j = 0; j < 64; ++j) {
      const float scale = static_cast<float>(j + 1);
      std::memcpy(page.data() + 8192 + 4 * j, &scale, 4);
    }
  }
  IndexScoreArgs args() const {
    IndexScoreArgs a;
    a.q = tensor(q.data(), {1, 1, kIndexDim});
    a.weights = tensor(&weight, {1, 1});
    a.paged.cache.pages = tensor(page.data(), {1, 64, kIndexKeyBytes});
    a.paged.block_table = tensor(&table, {1, 1});
    a.lengths = tensor(&length, {1});
    return a;
  }
};

}  // namespace sievemla::test
