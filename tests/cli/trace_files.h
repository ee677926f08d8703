// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/trace_files.h -- the golden traces as maps of tensors, to be changed and written anew.
#pragma once
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "model/files.h"

namespace sievemla::test {

inline const Tensors& sparse_trace() {
  static const Tensors tensors = read_tensors(golden_dir("trace-glm5") / "trace.safetensors");
  return tensors;
}
inline const Tensors& indexer_trace() {
  static const Tensors tensors = read_tensors(golden_dir("trace-indexer") / "trace.safetensors");
  return tensors;
}

template <class T>
std::vector<T> values(const Tensor& t) {
  std::vector<T> v(t.bytes.size() / sizeof(T));
  std::memcpy(v.data(), t.bytes.data(), t.bytes.size());
  return v;
}
template <class T>
void set(Tensor& t, const std::vector<T>& v) {
  t.bytes.assign(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T));
}
template <class T>
Tensor make_tensor(const std::string& dtype, const std::vector<std::int64_t>& shape, const std::vector<T>& v) {
  Tensor t{dtype, shape, {}};
  set(t, v);
  return t;
}

// The first `rows` of a tensor's first dimension.
inline void keep_rows(Tensor& t, std::int64_t rows) {
  t.bytes.resize(t.bytes.size() / static_cast<std::size_t>(t.shape[0]) * static_cast<std::size_t>(rows));
  t.shape[0] = rows;
}
// The first `columns` of a tensor's last dimension.
inline void keep_columns(Tensor& t, std::int64_t columns) {
  std::size_t rows = 1;
  for (std::size_t i = 0; i + 1 < t.shape.size(); ++i) rows *= static_cast<std::size_t>(t.shape[i]);
  const std::size_t row = t.bytes.size() / rows;
  const std::size_t kept = row / static_cast<std::size_t>(t.shape.back()) * static_cast<std::size_t>(columns);
  std::string bytes;
  for (std::size_t r = 0; r < rows; ++r) bytes += t.bytes.substr(r * row, kept);
  t.bytes = bytes;
  t.shape.back() = columns;
}

// trace-glm5 with two query rows and one cache alone: small, for tests that want many.
inline Tensors small_sparse_trace(const std::string& cache = "fp8") {
  Tensors t = sparse_trace();
  for (const std::string name : {"bf16", "fp8", "fp8_pow2"})
    if (name != cache)
      for (const std::string part : {"kv_", "out_", "lse_"}) t.erase(part + name);
  for (const std::string& name :
       {std::string("q"), std::string("indices"), std::string("topk_length"), "out_" + cache, "lse_" + cache})
    keep_rows(t.at(name), 2);
  return t;
}

}  // namespace sievemla::test
