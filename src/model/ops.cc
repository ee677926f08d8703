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
const float* widened_row(const TensorView& w, std::int64_t o, float* scratch) {
  if (w.dtype == DType::f32) return base::at<float>(w, o);
  const std::int64_t n = w.dim(1);
  if (w.dtype == DType::bf16) {
    const bf16* row = base::at<bf16>(w, o);
    for (std::int64_t i = 0; i < n; ++i) scratch[i] = base::to_f32(row[i]);
  } else {
    const f16* row = base::at<f16>(w, o);
    for (std::int64_t i = 0; i < n; ++i) scratch[i] = base::to_f32(row[i]);
  }
  return scratch;
}

// Memory for every worker of a parallel region, taken before it: a body must not throw.
template <class T>
class PerWorker {
 public:
  PerWorker(int workers, std::int64_t elements)
      : elements_(elements), memory_(static_cast<std::size_t>(workers * elements)) {}
  T* of(int worker) { return memory_.data() + worker * elements_; }

 private:
  std::int64_t elements_;
  std::vector<T> memory_;
};

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

int workers_for(const Backend& backend, std::int64_t work) { return work < kSerialWork ? 1 : backend.threads(); }

// body(begin, end, worker) over [0, n) in tasks.
template <class F>
void in_tasks(const Backend& backend, int workers, std::int64_t n, std::int64_t per_task, F&& body) {
  const auto run = [&](std::int64_t task, int worker) {
    body(task * per_task, std::min(n, (task + 1) * per_task), worker);
  };
  const std::int64_t tasks = (n + per_task - 1) / per_task;
  if (workers > 1) return cpu::parallel_for(backend, tasks, run);
  for (std::int64_t task = 0; task < tasks; ++task) run(task, 0);
}

template <class Real>
void linear_as(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y) {
  const std::int64_t out = w.dim(0), in = w.dim(1), tokens = x.dim(0);
  const int workers = workers_for(backend, out * in * tokens);
  PerWorker<float> scratch(workers, in);
  in_tasks(backend, workers, out, kRowsPerTask, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t o = begin; o < end; ++o) {
      const float* row = widened_row(w, o, scratch.of(worker));
      for (std::int64_t t = 0; t < tokens; ++t)
        *base::at<float>(y, t, o) = static_cast<float>(dot<Real>(base::at<float>(x, t), row, in));
    }
  });
}

template <class Real>
void linear_transposed_as(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y) {
  const std::int64_t rows = w.dim(0), columns = w.dim(1), tokens = x.dim(0);
  constexpr std::int64_t kTokensPerTask = 8;
  const int workers = workers_for(backend, rows * columns * tokens);
  PerWorker<float> scratch(workers, columns);
  PerWorker<Real> all_sums(workers, kTokensPerTask * columns);
  in_tasks(backend, workers, tokens, kTokensPerTask, [&](std::int64_t begin, std::int64_t end, int worker) {
    Real* sums = all_sums.of(worker);
    std::fill_n(sums, (end - begin) * columns, Real{0});
    for (std::int64_t o = 0; o < rows; ++o) {
      const float* row = widened_row(w, o, scratch.of(worker));
      for (std::int64_t t = begin; t < end; ++t) {
        const Real a = static_cast<Real>(*base::at<float>(x, t, o));
        Real* sum = sums + (t - begin) * columns;
        for (std::int64_t i = 0; i < columns; ++i) sum[i] += a * static_cast<Real>(row[i]);
      }
    }
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t i = 0; i < columns; ++i)
        *base::at<float>(y, t, i) = static_cast<float>(sums[(t - begin) * columns + i]);
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
