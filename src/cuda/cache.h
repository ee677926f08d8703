// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/cache.h -- a list of slots and a paged cache, as kernels are told. Plain C++.
#pragma once
#include <cstdint>

namespace sievemla::cuda {

// [n] i32 or i64.
struct SlotList {
  const void* slots;
  bool wide;
  std::int64_t step;  // in elements
};

// Pages of latent rows, or of indexer keys. Strides in bytes.
struct Pages {
  unsigned char* pages;
  std::int64_t page_bytes, row_bytes, slots;
  int page_size;
};

}  // namespace sievemla::cuda
