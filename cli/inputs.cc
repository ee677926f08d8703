// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/inputs.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/view.h"
#include "kv/e4m3.h"
#include "kv/index_page.h"
#include "sievemla/kv_cache.h"

namespace sievemla::cli {
namespace {

constexpr std::size_t kDrawn = 4096;  // rows of a cache that differ; drawing all of a large one would take minutes

}  // namespace

void poison(const TensorView& contiguous) {
  if (contiguous.elements() > 0)
    std::memset(contiguous.data, static_cast<int>(kPoison),
                static_cast<std::size_t>(contiguous.elements() * size_of(contiguous.dtype)));
}

void* Inputs::memory(std::int64_t bytes) {
  void* const data = memory_.emplace_back(cuda::Memory::shared(device_, bytes)).data();
  std::memset(data, static_cast<int>(kPoison), static_cast<std::size_t>(bytes));
  return data;
}

TensorView Inputs::poisoned(DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view = tensor(static_cast<const std::uint8_t*>(nullptr), shape);
  view.dtype = dtype;
  view.data = memory(view.elements() * size_of(dtype));
  return view;
}

TensorView Inputs::normal(DType dtype, std::initializer_list<std::int64_t> shape, float deviation) {
  const TensorView view = poisoned(dtype, shape);
  for (std::int64_t i = 0; i < view.elements(); ++i) {
    const float x = normal_(random_) * deviation;
    if (dtype == DType::u8) static_cast<std::uint8_t*>(view.data)[i] = kv::to_e4m3(x);
    else if (dtype == DType::bf16) static_cast<bf16*>(view.data)[i] = base::to_bf16(x);
    else static_cast<float*>(view.data)[i] = x;
  }
  return view;
}

TensorView Inputs::ints(std::span<const std::int64_t> values, std::initializer_list<std::int64_t> shape, DType dtype) {
  const TensorView view = poisoned(dtype, shape);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::i64) static_cast<std::int64_t*>(view.data)[i] = values[i];
    else static_cast<std::int32_t*>(view.data)[i] = static_cast<std::int32_t>(values[i]);
  }
  return view;
}

std::vector<std::int64_t> Inputs::distinct(std::int64_t n, std::int64_t limit) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(limit));
  std::iota(all.begin(), all.end(), 0);
  for (std::int64_t i = 0; i < n; ++i)
    std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(i + below(limit - i))]);
  all.resize(static_cast<std::size_t>(n));
  return all;
}

TensorView Inputs::block_table(std::span<const std::int64_t> lengths, std::int64_t page_size) {
  const auto pages_of = [&](std::int64_t length) {
    return (std::max<std::int64_t>(length, 0) + page_size - 1) / page_size;
  };
  std::int64_t widest = 1, total = 0;
  for (const std::int64_t length : lengths) {
    widest = std::max(widest, pages_of(length));
    total += pages_of(length);
  }
  const std::vector<std::int64_t> physical = distinct(total, total);
  const TensorView table = poisoned(DType::i32, {static_cast<std::int64_t>(lengths.size()), widest});
  std::size_t next = 0;
  for (std::size_t r = 0; r < lengths.size(); ++r)
    for (std::int64_t page = 0; page < pages_of(lengths[r]); ++page)
      base::store_int(table, physical[next++], static_cast<std::int64_t>(r), page);
  return table;
}

KvCache Inputs::kv_cache(KvFormat format, int latent, int rope, std::int64_t pages, std::int64_t page_size,
                         std::span<const std::int64_t> slots) {
  const KvFormatInfo& f = info(format);
  KvCache cache{format, latent, rope,
                poisoned(f.storage, {pages, page_size, f.row_bytes(latent, rope) / size_of(f.storage)})};
  Inputs rows(random_());
  const auto drawn = static_cast<std::int64_t>(std::min(kDrawn, slots.size()));
  const TensorView latents = rows.normal(DType::f32, {drawn, latent}, 1.f / 3);
  const TensorView ropes = rope > 0 ? rows.normal(DType::f32, {drawn, rope}, 1.f / 3) : TensorView{};
  for (std::size_t first = 0; first < slots.size(); first += kDrawn) {
    const auto some = slots.subspan(first, std::min(kDrawn, slots.size() - first));
    const auto n = static_cast<std::int64_t>(some.size());
    WriteLatentArgs write;
    write.latent = narrow(latents, 0, n);
    write.rope = narrow(ropes, 0, n);
    write.slots = rows.ints(some, {n}, DType::i64);
    write.cache = cache;
    write_latent(Backend::reference(), write);
  }
  return cache;
}

IndexCache Inputs::index_cache(IndexFormat format, std::int64_t pages, std::int64_t page_size,
                               std::span<const std::int64_t> slots) {
  const bool fp8 = format == IndexFormat::fp8;
  const IndexCache cache{format, poisoned(storage_of(format), {pages, page_size, fp8 ? kIndexKeyBytes : kIndexDim})};
  const std::int64_t key_bytes = kIndexDim * size_of(cache.pages.dtype);
  for (std::size_t n = 0; n < slots.size(); ++n) {
    const kv::IndexKeyAddress at = kv::index_key_address(cache, slots[n]);
    if (n >= kDrawn) {
      const kv::IndexKeyAddress from = kv::index_key_address(cache, slots[n - kDrawn]);
      std::memcpy(at.key, from.key, static_cast<std::size_t>(key_bytes));
      if (fp8) std::memcpy(at.scale, from.scale, sizeof(float));
      continue;
    }
    for (int i = 0; i < kIndexDim; ++i) {
      const float x = normal_(random_);
      if (fp8) at.key[i] = std::byte{kv::to_e4m3(x)};
      else if (format == IndexFormat::bf16) reinterpret_cast<bf16*>(at.key)[i] = base::to_bf16(x);
      else reinterpret_cast<float*>(at.key)[i] = x;
    }
    const float scale = 0.01f * static_cast<float>(1 + below(100));
    if (fp8) std::memcpy(at.scale, &scale, sizeof scale);
  }
  return cache;
}

std::vector<std::int64_t> slots_of(const TensorView& block_table, std::span<const std::int64_t> lengths,
                                   std::int64_t page_size) {
  std::vector<std::int64_t> slots;
  for (std::size_t r = 0; r < lengths.size(); ++r)
    for (std::int64_t p = 0; p < lengths[r]; ++p)
      slots.push_back(base::load_int(block_table, static_cast<std::int64_t>(r), p / page_size) * page_size +
                      p % page_size);
  return slots;
}

TensorView narrow(TensorView view, std::int64_t first, std::int64_t count) {
  if (!view) return view;
  view.data = static_cast<std::byte*>(view.data) + first * view.stride[0] * size_of(view.dtype);
  view.shape[0] = count;
  return view;
}

}  // namespace sievemla::cli
