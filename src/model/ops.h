// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/ops.h -- what stands between the stages: linear layers and norms. Activations are f32; sums are double on the
// reference backend and f32 elsewhere. Results do not depend on the thread count, nor a row's result on other rows.
#pragma once
#include <cstdint>
#include <span>

#include "sievemla/backend.h"

namespace sievemla::model {

// y[t, o] = sum_i x[t, i] * w[o, i]. w [out, in] f32, bf16 or f16; x [tokens, in] and y [tokens, out] f32. Rows are
// contiguous, row strides free.
void linear(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y);

// y[t, i] = sum_o x[t, o] * w[o, i]: the same weights, used the other way round.
void linear_transposed(const Backend& backend, const TensorView& w, const TensorView& x, const TensorView& y);

// y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, in double. x and y [tokens, n]; they may be the same rows.
void rms_norm(std::span<const float> weight, double eps, const TensorView& x, const TensorView& y);

// Rows [begin, begin + count) and columns [begin, begin + count) of a matrix.
TensorView rows_of(TensorView matrix, std::int64_t begin, std::int64_t count);
TensorView columns_of(TensorView matrix, std::int64_t begin, std::int64_t count);

}  // namespace sievemla::model
