// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/ops.cc -- a weight row is widened to f32 once and meets every token.
#include "model/ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/view.h"
#include "cpu/threads.h"

namespace sievemla::model {
namespace {

constexpr std::int64_t kLanes = 16;  // independent sums, so that the compiler may use vectors
constexpr std::int64_t kRowsPerTask = 32;
constexpr std::int64_t kSerialWork = 1 << 19;  // multiply-adds below which waking threads costs more than it saves

// Row `o` as f32: in place, or widened into `scratch`.
const float* widened_row(const TensorView& w, std::int64_t o, std::vector<float>& scratch) {
  if (w.dtype == DType::f32) return base::at<float>(w, o);
  const std::size_t n = static_cast<std::size_t>(w.dim(1));
  scratch.resize(n);
  if (w.dtype == DType::bf16) {
    const bf16* row = base::at<bf16>(w, o);
    for (std::size_t i = 0; i < n; ++i) scratch[i] = base::to_f32(row[i]);
  } else {
    const f16* row = base::at<f16>(w, o);
    for (std::size_t i = 0; i < n; ++i) scratch[i] = base::to_f32(row[i]);
  }
  return scratch.data();
}

template <class Real>
Real dot(const float* a, const float* b, std::int64_t n) {
  Real sum[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::int64_t l = 0; l < kLanes; ++l) sum[l] += static_cast<Real>(a[i + l]) * static_cast<Real>(b[i + l]);
  for (; i < n; ++i) sum[i % kLanes] += static_cast<Real>(a[i]) * static_cast<Real>(b[i]);
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
    for (std::int64_t l = 0; l < width; ++l) sum[l] += sum[l + width];
  return sum[0];
}

// body(begin, end) over [0, n) in tasks, in one go if there is little work.
template <class F>
void in_tasks(const Backend& backend, std::int64_t n, std::int64_t per_task, std::int64_t work, F&& body) {
  if (work < kSerialWork) return body(std::int64_t{0}, n);
  cpu::parallel_for(backend, (n + per_task - 1) / per_task,
                    [&](std::int64_t task, int) { body(task * per_task, std::min(n, (task + 1) * per_task)); });
}

template <class Real>
void linear_as(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y) {
  const std::int64_t out = w.dim(0), in = w.dim(1), tokens = x.dim(0);
  in_tasks(backend, out, kRowsPerTask, out * in * tokens, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch;
    for (std::int64_t o = begin; o < end; ++o) {
      const float* row = widened_row(w, o, scratch);
      for (std::int64_t t = 0; t < tokens; ++t)
        *base::at<float>(y, t, o) = static_cast<float>(dot<Real>(base::at<float>(x, t), row, in));
    }
  });
}

template <class Real>
void linear_transposed_as(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y) {
  const std::int64_t rows = w.dim(0), columns = w.dim(1), tokens = x.dim(0);
  constexpr std::int64_t kTokensPerTask = 8;
  in_tasks(backend, tokens, kTokensPerTask, rows * columns * tokens, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch;
    std::vector<Real> sums(static_cast<std::size_t>((end - begin) * columns));
    for (std::int64_t o = 0; o < rows; ++o) {
      const float* row = widened_row(w, o, scratch);
      for (std::int64_t t = begin; t < end; ++t) {
        const Real a = static_cast<Real>(*base::at<float>(x, t, o));
        Real* sum = sums.data() + (t - begin) * columns;
        for (std::int64_t i = 0; i < columns; ++i) sum[i] += a * static_cast<Real>(row[i]);
      }
    }
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t i = 0; i < columns; ++i)
        *base::at<float>(y, t, i) = static_cast<float>(sums[static_cast<std::size_t>((t - begin) * columns + i)]);
  });
}

}  // namespace

void linear(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y) {
  backend.kind() == BackendKind::reference ? linear_as<double>(backend, w, x, y) : linear_as<float>(backend, w, x, y);
}

void linear_transposed(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y) {
  backend.kind() == BackendKind::reference ? linear_transposed_as<double>(backend, w, x, y)
                                           : linear_transposed_as<float>(backend, w, x, y);
}

void rms_norm(std::span<const float> weight, double eps, const TensorView& x, const TensorView& y) {
  const std::int64_t n = static_cast<std::int64_t>(weight.size());
  for (std::int64_t t = 0; t < x.dim(0); ++t) {
    const float* in = base::at<float>(x, t);
    float* out = base::at<float>(y, t);
    const double scale = 1 / std::sqrt(dot<double>(in, in, n) / static_cast<double>(n) + eps);
    for (std::int64_t i = 0; i < n; ++i)
      out[i] = static_cast<float>(in[i] * scale * weight[static_cast<std::size_t>(i)]);
  }
}

TensorView rows_of(TensorView matrix, std::int64_t begin, std::int64_t count) {
  matrix.data = static_cast<std::byte*>(matrix.data) + begin * matrix.step(0) * size_of(matrix.dtype);
  matrix.shape[0] = count;
  return matrix;
}

TensorView columns_of(TensorView matrix, std::int64_t begin, std::int64_t count) {
  matrix.data = static_cast<std::byte*>(matrix.data) + begin * matrix.step(1) * size_of(matrix.dtype);
  matrix.shape[1] = count;
  return matrix;
}

}  // namespace sievemla::model
