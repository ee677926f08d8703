// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/cache.h -- latent caches that own their bytes, in every layout a caller may bring.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "sievemla/backend.h"
#include "sievemla/kv_cache.h"

namespace sievemla::test {

inline constexpr std::byte kUntouched{0xA5};

struct Layout {
  const char* name;
  KvFormat format;
  int latent, rope;
  std::int64_t row_padding = 0;  // in elements of the storage dtype
};
inline constexpr Layout kLayouts[] = {
    {"f32", KvFormat::f32, 512, 64},
    {"f32_padded", KvFormat::f32, 512, 64, 5},
    {"f32_other_widths", KvFormat::f32, 96, 16},
    {"bf16", KvFormat::bf16, 512, 64},
    {"bf16_nope", KvFormat::bf16, 512, 0},
    {"bf16_nope_in_576", KvFormat::bf16, 512, 0, 64},
    {"fp8_ds_mla", KvFormat::fp8_ds_mla, 512, 64},
    {"fp8_nope", KvFormat::fp8_nope, 512, 0},
    {"fp8_nope_in_656", KvFormat::fp8_nope, 512, 0, 128},
};

// Every byte starts as kUntouched. Addresses are computed here from their definition, not by the code under test.
struct LatentCache {
  LatentCache(const Layout& layout, std::int64_t pages, std::int64_t page_size, std::int64_t page_padding = 0) {
    const DType storage = info(layout.format).storage;
    row_bytes = info(layout.format).row_bytes(layout.latent, layout.rope);
    const std::int64_t row = row_bytes / size_of(storage) + layout.row_padding;
    const std::int64_t page = row * page_size + page_padding;
    bytes.resize(static_cast<std::size_t>(page * pages * size_of(storage)));
    std::memset(bytes.data(), static_cast<int>(kUntouched), bytes.size());
    view.format = layout.format;
    view.latent = layout.latent;
    view.rope = layout.rope;
    view.pages.data = bytes.data();
    view.pages.dtype = storage;
    view.pages.rank = 3;
    view.pages.shape = {pages, page_size, row};
    view.pages.stride = {page, row, 1};
  }
  LatentCache(LatentCache&&) = default;  // a copy's view would show the original's bytes
  std::size_t offset(std::int64_t slot) const {
    const auto& p = view.pages;
    return static_cast<std::size_t>((slot / p.shape[1] * p.stride[0] + slot % p.shape[1] * p.stride[1]) *
                                    size_of(p.dtype));
  }
  bool same_bytes(const LatentCache& other) const {
    return bytes.size() == other.bytes.size() && std::memcmp(bytes.data(), other.bytes.data(), bytes.size()) == 0;
  }
  std::byte* row(std::int64_t slot) { return bytes.data() + offset(slot); }

  KvCache view;
  std::int64_t row_bytes;  // of the row itself, without padding
  std::vector<std::byte> bytes;
};

inline std::vector<Backend> host_backends() {
  return {Backend::reference(), Backend::cpu({.threads = 1}), Backend::cpu({.threads = 7})};
}
inline std::string describe(const Backend& backend) {
  return backend.name() + ", " + std::to_string(backend.threads());
}

// [rows, width] of a tensor whose rows are `stride` elements apart.
template <class T>
TensorView rows_view(const T* data, std::int64_t rows, std::int64_t width, std::int64_t stride) {
  TensorView view = tensor(data, {rows, width});
  view.stride[0] = stride;
  return view;
}

// The tokens of a call: latent and rope side by side in rows of `stride`, as a projection leaves them.
template <class T>
WriteLatentArgs write_args(const std::vector<T>& x, std::int64_t stride, const TensorView& slots, const KvCache& cache,
                           ScaleRule rule = ScaleRule::arbitrary) {
  WriteLatentArgs args;
  args.latent = rows_view(x.data(), slots.dim(0), cache.latent, stride);
  if (cache.rope > 0) args.rope = rows_view(x.data() + cache.latent, slots.dim(0), cache.rope, stride);
  args.slots = slots;
  args.cache = cache;
  args.scale = rule;
  return args;
}

// Dequantised rows of `slots`.
template <class T = float>
std::vector<T> gather(const Backend& backend, const KvCache& cache, const std::vector<std::int64_t>& slots) {
  const auto n = static_cast<std::int64_t>(slots.size());
  std::vector<T> out(slots.size() * static_cast<std::size_t>(cache.latent + cache.rope));
  gather_latent(backend, {cache, tensor(slots.data(), {n}), tensor(out.data(), {n, cache.latent + cache.rope})});
  return out;
}

}  // namespace sievemla::test
