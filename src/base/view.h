// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/view.h -- elements of a TensorView, for host code. Offsets are 64-bit.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/number.h"
#include "sievemla/tensor.h"

namespace sievemla::base {

// Offset in elements of view[i, j, k, l]; missing indices are 0.
inline std::int64_t offset(const TensorView& v, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0,
                           std::int64_t l = 0) {
  return i * v.stride[0] + j * v.stride[1] + k * v.stride[2] + l * v.stride[3];
}

// The caller knows the dtype.
template <class T>
T* at(const TensorView& v, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0, std::int64_t l = 0) {
  return static_cast<T*>(v.data) + offset(v, i, j, k, l);
}

// f(T{}) with T the element type of a view that is f32 or bf16.
template <class F>
decltype(auto) visit_real(DType dtype, F&& f) {
  return dtype == DType::bf16 ? f(bf16{}) : f(float{});
}

// f32, bf16 or f16 element as f32.
inline float load_f32(const TensorView& v, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0, std::int64_t l = 0) {
  switch (v.dtype) {
    case DType::bf16: return to_f32(*at<bf16>(v, i, j, k, l));
    case DType::f16: return to_f32(*at<f16>(v, i, j, k, l));
    default: return *at<float>(v, i, j, k, l);
  }
}

// i32 or i64 element.
inline std::int64_t load_int(const TensorView& v, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0) {
  return v.dtype == DType::i64 ? *at<std::int64_t>(v, i, j, k) : *at<std::int32_t>(v, i, j, k);
}
inline void store_int(const TensorView& v, std::int64_t x, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0) {
  if (v.dtype == DType::i64) *at<std::int64_t>(v, i, j, k) = x;
  else *at<std::int32_t>(v, i, j, k) = static_cast<std::int32_t>(x);
}

// Rounds once, to f32 or bf16.
inline void store_f32(const TensorView& v, float x, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0,
                      std::int64_t l = 0) {
  if (v.dtype == DType::bf16) *at<bf16>(v, i, j, k, l) = to_bf16(x);
  else *at<float>(v, i, j, k, l) = x;
}

// a / b and a % b, for a >= 0 and b > 0. Where both have 32 bits, at a fraction of the time.
struct Quotient {
  std::int64_t whole, rest;
};
inline Quotient divide(std::int64_t a, std::int64_t b) {
  if ((a | b) >> 32 != 0) return {a / b, a % b};
  const std::uint32_t x = static_cast<std::uint32_t>(a), y = static_cast<std::uint32_t>(b);
  return {x / y, x % y};
}

// Which request row t of `rows` belongs to: by the tensor, or dealt evenly.
inline std::int64_t request_of(const TensorView& row_request, std::int64_t t, std::int64_t rows,
                               std::int64_t requests) {
  return row_request ? load_int(row_request, t) : t / (rows / requests);
}

}  // namespace sievemla::base
