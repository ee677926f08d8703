// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/view.h"
#include "kv/e4m3.h"
#include "kv/index_page.h"
#include "sievemla/kv_cache.h"

namespace sievemla::cli {
namespace {

// 256 e4m3 codes, as many of each as normal values of this deviation have: a byte of randomness gives a value.
std::array<std::byte, 256> normal_codes(float deviation) {
  constexpr double kPi = 3.14159265358979323846, kStep = 1e-3;
  std::array<std::byte, 256> codes{};
  double x = -5, below = 0;  // below: the share of values that are smaller than x
  for (std::size_t i = 0; i < codes.size(); ++i) {
    for (; below < (static_cast<double>(i) + 0.5) / 256; x += kStep)
      below += std::exp(-x * x / 2) / std::sqrt(2 * kPi) * kStep;
    codes[i] = std::byte{kv::to_e4m3(static_cast<float>(x) * deviation)};
  }
  return codes;
}

}  // namespace

void poison(const TensorView& contiguous) {
  if (contiguous.elements() > 0)
    std::memset(contiguous.data, static_cast<int>(kPoison),
                static_cast<std::size_t>(contiguous.elements() * size_of(contiguous.dtype)));
}

void* Inputs::memory(std::int64_t bytes) {
  return memory_.emplace_back(static_cast<std::size_t>(bytes), kPoison).data();
}

TensorView Inputs::poisoned(DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view = tensor(static_cast<const std::uint8_t*>(nullptr), shape);
  view.dtype = dtype;
  view.data = memory(view.elements() * size_of(dtype));
  return view;
}

TensorView Inputs::normal(DType dtype, std::initializer_list<std::int64_t> shape, float deviation) {
  const TensorView view = poisoned(dtype, shape);
  if (dtype == DType::u8) return draw_codes(view.data, view.elements(), normal_codes(deviation)), view;
  for (std::int64_t i = 0; i < view.elements(); ++i) {
    const float x = normal_(random_) * deviation;
    if (dtype == DType::bf16) static_cast<bf16*>(view.data)[i] = base::to_bf16(x);
    else static_cast<float*>(view.data)[i] = x;
  }
  return view;
}

void Inputs::draw_codes(void* to, std::int64_t n, const std::array<std::byte, 256>& codes) {
  auto* next = static_cast<std::byte*>(to);
  std::uint64_t state = random_();
  for (std::int64_t i = 0; i < n; i += 8) {  // splitmix64, as a cache may have a billion of them
    std::uint64_t bits = state += 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    for (std::int64_t j = i; j < std::min(i + 8, n); ++j, bits >>= 8) next[j] = codes[bits & 0xFF];
  }
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
  if (std::ssize(numbers_) != limit) {  // else any order of them does
    numbers_.resize(static_cast<std::size_t>(limit));
    std::iota(numbers_.begin(), numbers_.end(), 0);
  }
  for (std::int64_t i = 0; i < n; ++i)
    std::swap(numbers_[static_cast<std::size_t>(i)], numbers_[static_cast<std::size_t>(i + below(limit - i))]);
  return {numbers_.begin(), numbers_.begin() + n};
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
  const auto n = std::ssize(slots);
  WriteLatentArgs write;
  write.latent = normal(DType::f32, {n, latent}, 1.f / 3);
  if (rope > 0) write.rope = normal(DType::f32, {n, rope}, 1.f / 3);
  write.slots = ints(slots, {n}, DType::i64);
  write.cache = cache;
  write_latent(Backend::reference(), write);
  return cache;
}

IndexCache Inputs::index_cache(IndexFormat format, std::int64_t pages, std::int64_t page_size,
                               std::span<const std::int64_t> slots) {
  const bool fp8 = format == IndexFormat::fp8;
  const IndexCache cache{format, poisoned(storage_of(format), {pages, page_size, fp8 ? kIndexKeyBytes : kIndexDim})};
  const std::array<std::byte, 256> codes = normal_codes(1.f);
  for (const std::int64_t slot : slots) {
    const kv::IndexKeyAddress at = kv::index_key_address(cache, slot);
    if (fp8) {
      draw_codes(at.key, kIndexDim, codes);
      const float scale = 0.01f * static_cast<float>(1 + below(100));
      std::memcpy(at.scale, &scale, sizeof scale);
    } else {
      for (int i = 0; i < kIndexDim; ++i) {
        const float x = normal_(random_);
        if (format == IndexFormat::bf16) reinterpret_cast<bf16*>(at.key)[i] = base::to_bf16(x);
        else reinterpret_cast<float*>(at.key)[i] = x;
      }
    }
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
