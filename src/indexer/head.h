// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/head.h -- one indexer head (or key) of 128 values: normalise, rotate, store. Host backends share it: the
// reference computes in double, cpu in float.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/fault.h"
#include "base/view.h"
#include "kv/index_page.h"
#include "sievemla/indexer.h"

namespace sievemla::stage::indexer {

// A NaN stays a NaN.
template <class Real>
Real relu(Real x) {
  if (base::fault(base::Fault::no_relu)) return x;
  return x < 0 ? Real{0} : x;
}

// Of 128 terms, in eight sums: a single one would wait for itself.
template <class Real, class Term>
Real sum_of(Term&& term) {
  Real part[8] = {};
  for (int i = 0; i < kIndexDim; i += 8)
    for (int j = 0; j < 8; ++j) part[j] += term(i + j);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

template <class Real>
void layer_norm(Real* x, const TensorView& weight, const TensorView& bias, float eps) {
  const Real mean =
      base::fault(base::Fault::k_norm_without_mean) ? Real{0} : sum_of<Real>([x](int i) { return x[i]; }) / kIndexDim;
  const Real variance = sum_of<Real>([x, mean](int i) { return (x[i] - mean) * (x[i] - mean); });
  const Real scale = 1 / std::sqrt(variance / kIndexDim + static_cast<Real>(eps));
  for (int i = 0; i < kIndexDim; ++i) {
    const float offset = base::fault(base::Fault::k_norm_without_bias) ? 0.f : base::load_f32(bias, i);
    x[i] = (x[i] - mean) * scale * static_cast<Real>(base::load_f32(weight, i)) + static_cast<Real>(offset);
  }
}

// Rotates x[0, 2 * pairs) in place; pair i is (2i, 2i + 1) if interleaved, (i, i + pairs) if half-split.
template <class Real>
void rotate(RopeStyle style, int pairs, const Real* cos, const Real* sin, Real* x) {
  const bool interleaved = style == RopeStyle::interleaved;
  const std::ptrdiff_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : pairs;
  for (std::ptrdiff_t i = 0; i < pairs; ++i) {
    Real &a = x[i * step], &b = x[i * step + partner];
    const Real turned = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = turned;
  }
}

// Adds and subtracts in the order of bits, as the CUDA kernels do.
template <class Real>
void hadamard(Real* x) {
  for (int bit = 1; bit < kIndexDim; bit *= 2)
    for (int i = 0; i < kIndexDim; ++i) {
      if (i & bit) continue;
      const Real a = x[i], b = x[i + bit];
      x[i] = a + b, x[i + bit] = a - b;
    }
  for (int i = 0; i < kIndexDim; ++i) x[i] *= static_cast<Real>(kHadamardScale);
}

// To bf16 by way of f32, which is what kernels that compute in f32 store.
template <class Real>
void round_to_bf16(Real* x) {
  for (int i = 0; i < kIndexDim; ++i) x[i] = static_cast<Real>(base::to_f32(base::to_bf16(static_cast<float>(x[i]))));
}

// The rotation of one token's heads.
template <class Real>
class TokenRope {
 public:
  TokenRope(const Rope& rope, std::int64_t token) : style_(rope.style) {
    if (style_ == RopeStyle::none) return;
    const std::int64_t position = base::load_int(rope.positions, token);
    for (int i = 0; i < kPairs; ++i) {
      cos_[i] = static_cast<Real>(base::load_f32(rope.cos_sin, position, i));
      sin_[i] = static_cast<Real>(base::load_f32(rope.cos_sin, position, kPairs + i));
    }
  }
  void operator()(Real* head) const {
    turn(head + (base::fault(base::Fault::indexer_rope_last_64) ? kIndexDim - kIndexRope : 0));
  }
  // kIndexRope values.
  void turn(Real* x) const {
    if (style_ != RopeStyle::none) rotate(style_, kPairs, cos_, sin_, x);
  }

 private:
  static constexpr int kPairs = kIndexRope / 2;
  RopeStyle style_;
  Real cos_[kPairs], sin_[kPairs];  // unset where nothing is rotated
};

// ---- what the two writers do for one key, one head --------------------------------------------------

// `store` is kv::store_index_values<Real> or does the same.
// The slot may be negative: skipped, and then nothing of the token is read.
template <class Real, class Store>
void write_key(const WriteIndexKeysArgs& args, std::int64_t token, Store&& store) {
  const std::int64_t slot = base::load_int(args.slots, token);
  if (slot < 0) return;
  Real key[kIndexDim];
  for (int i = 0; i < kIndexDim; ++i) key[i] = static_cast<Real>(base::load_f32(args.k, token, i));
  layer_norm(key, args.norm_weight, args.norm_bias, args.norm_eps);
  if (args.round_bf16) round_to_bf16(key);
  TokenRope<Real>(args.rope, token)(key);
  if (args.round_bf16) round_to_bf16(key);
  if (args.hadamard) {
    hadamard(key);
    if (args.round_bf16) round_to_bf16(key);
  }
  kv::store_index_key(args.cache, slot, key, args.scale, store);
}

template <class Real, class Store>
void write_query(const IndexQueryArgs& args, const TokenRope<Real>& rope, std::int64_t token, std::int64_t head,
                 Store&& store) {
  Real q[kIndexDim];
  for (int i = 0; i < kIndexDim; ++i) q[i] = static_cast<Real>(base::load_f32(args.q, token, head, i));
  rope(q);
  if (args.round_bf16) round_to_bf16(q);
  if (args.hadamard) {
    hadamard(q);
    if (args.round_bf16) round_to_bf16(q);
  }
  std::byte* out =
      static_cast<std::byte*>(args.out_q.data) + base::offset(args.out_q, token, head) * size_of(args.out_q.dtype);
  const float scale = store(q, args.out_q.dtype, args.scale, kv::kIndexQueryFloor, out);
  const Real weight = static_cast<Real>(base::load_f32(args.weights, token, head));
  *base::at<float>(args.out_weights, token, head) =
      static_cast<float>(weight * static_cast<Real>(args.weight_scale) * static_cast<Real>(scale));
}

}  // namespace sievemla::stage::indexer
