// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/index_page_test.cc -- bytes of indexer key pages, and gather_index_keys.
#include "kv/index_page.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kv/cache.h"
#include "sievemla/error.h"
#include "support/guard.h"
#include "support/random.h"
#include "support/safetensors.h"

namespace sievemla::test {
namespace {

// Page p of an fp8 cache starts at p * (page_size * 132 + padding).
struct IndexPages {
  IndexPages(std::int64_t pages, std::int64_t page_size, std::int64_t padding)
      : page(page_size * 132 + padding), bytes(static_cast<std::size_t>(pages * page), kUntouched) {
    view.format = IndexFormat::fp8;
    view.pages = tensor(reinterpret_cast<const std::uint8_t*>(bytes.data()), {pages, page_size, 132});
    view.pages.stride[0] = page;
  }
  IndexPages(IndexPages&&) = default;
  std::byte* at(std::int64_t p, std::int64_t byte) { return bytes.data() + p * page + byte; }
  std::int64_t page;
  std::vector<std::byte> bytes;
  IndexCache view;
};

template <class T>
struct Keys {
  std::vector<T> keys;
  std::vector<float> scales;
};
template <class T>
Keys<T> gather_keys(const Backend& backend, const IndexCache& cache, const std::vector<std::int64_t>& slots) {
  const auto n = static_cast<std::int64_t>(slots.size());
  Keys<T> out{std::vector<T>(slots.size() * 128), std::vector<float>(slots.size(), kNan)};
  GatherIndexKeysArgs args{cache, tensor(slots.data(), {n}), tensor(out.keys.data(), {n, 128}), {}};
  if (cache.format == IndexFormat::fp8) args.scales = tensor(out.scales.data(), {n});
  gather_index_keys(backend, args);
  return out;
}

// 64 keys of e4m3 1.0 in bytes 0 .. 8191, then 64 scales j + 1; two such pages, and bytes between them.
TEST(Case14, IndexPageBytes) {
  IndexPages cache(2, 64, 160);
  for (std::int64_t p = 0; p < 2; ++p) {
    std::memset(cache.at(p, 0), 0x38, 8192);
    for (std::int64_t j = 0; j < 64; ++j) {
      const auto scale = static_cast<float>(64 * p + j + 1);
      std::memcpy(cache.at(p, 8192 + 4 * j), &scale, sizeof scale);
    }
  }
  std::vector<std::int64_t> slots(128);
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
  for (const Backend& backend : host_backends()) {
    const auto got = gather_keys<std::uint8_t>(backend, cache.view, slots);
    for (std::uint8_t code : got.keys) ASSERT_EQ(code, 0x38);
    for (std::size_t j = 0; j < 128; ++j) EXPECT_EQ(got.scales[j], static_cast<float>(j + 1));
  }
  for (std::int64_t slot : slots) {
    float key[128];
    EXPECT_EQ(kv::load_index_key(cache.view, slot, key), static_cast<float>(slot + 1));
    for (float x : key) ASSERT_EQ(x, 1.f);
  }
}

TEST(Case14, StoredKeysLandAtTheSameBytes) {
  for (ScaleRule rule : {ScaleRule::arbitrary, ScaleRule::power_of_two})
    for (std::int64_t page_size : {1, 16, 64, 176}) {
      IndexPages got(3, page_size, 24), want(3, page_size, 24);
      for (std::int64_t slot = 0; slot < 3 * page_size; ++slot) {
        const std::int64_t p = slot / page_size, i = slot % page_size;
        // amax 448 or 240 times a scale: both rules pick that scale, if it is a power of two.
        const float scale = std::ldexp(1.f, static_cast<int>(slot % 9) - 4);
        const bool top = rule == ScaleRule::arbitrary || slot % 2 == 0;
        float key[128];
        for (int d = 0; d < 128; ++d) key[d] = (d % 3 ? 1.f : -2.f) * scale;
        key[slot % 128] = (top ? 448.f : 240.f) * scale;
        kv::store_index_key(got.view, slot, key, rule);
        for (int d = 0; d < 128; ++d) *want.at(p, 128 * i + d) = std::byte(d % 3 ? 0x38 : 0xC0);
        *want.at(p, 128 * i + slot % 128) = std::byte(top ? 0x7E : 0x77);
        std::memcpy(want.at(p, 128 * page_size + 4 * i), &scale, sizeof scale);
      }
      EXPECT_TRUE(got.bytes == want.bytes) << page_size;
    }
}

// Engines raise amax to 1e-4, so that a tiny or all-zero key has their scale.
TEST(Case14, TheScaleOfATinyKey) {
  IndexPages cache(1, 1, 0);
  float key[128] = {};
  kv::store_index_key(cache.view, 0, key, ScaleRule::arbitrary);
  EXPECT_EQ(kv::load_index_key(cache.view, 0, key), 1e-4f / 448.f);
  for (float x : key) EXPECT_EQ(x, 0.f);
  kv::store_index_key(cache.view, 0, key, ScaleRule::power_of_two);
  EXPECT_EQ(kv::load_index_key(cache.view, 0, key), 0x1p-22f);  // 1e-4 / 448 = 1.87 * 2^-23
  key[5] = kNan;
  kv::store_index_key(cache.view, 0, key, ScaleRule::power_of_two);
  EXPECT_TRUE(std::isnan(kv::load_index_key(cache.view, 0, key)));
  EXPECT_EQ(key[5], 0.f);
}

TEST(GatherIndexKeys, WhatIsNoSlotReadsAsZerosOfScaleZero) {
  const std::vector<std::int64_t> slots = {5, -1, 31, 32, INT64_MIN, INT64_MAX, 5};
  const auto n = static_cast<std::int64_t>(slots.size());
  IndexPages cache(2, 16, 8);
  std::memset(cache.bytes.data(), 0x77, cache.bytes.size());
  for (const Backend& backend : host_backends()) {
    Guarded<std::uint8_t> keys(n * 128, 0xEE);
    Guarded<float> scales(n, kNan);
    gather_index_keys(
        backend, {cache.view, tensor(slots.data(), {n}), tensor(keys.data(), {n, 128}), tensor(scales.data(), {n})});
    EXPECT_TRUE(keys.intact());
    EXPECT_TRUE(scales.intact());
    for (std::size_t r = 0; r < slots.size(); ++r) {
      const bool is_slot = slots[r] >= 0 && slots[r] < 32;
      EXPECT_EQ(scales[r] == 0.f, !is_slot) << r;
      for (std::size_t d = 0; d < 128; ++d) ASSERT_EQ(keys[r * 128 + d], is_slot ? 0x77 : 0) << r;
    }
  }
}

template <class T>
void round_trip_of_plain_keys(IndexFormat format) {
  constexpr std::int64_t kSlots = 48, kRow = 128 + 4, kPage = 16 * kRow + 12;  // padded rows, padded pages
  Random random(31);
  std::vector<T> memory(static_cast<std::size_t>(3 * kPage), base::round_to<T>(kNan));
  IndexCache cache;
  cache.format = format;
  cache.pages = tensor(memory.data(), {3, 16, 128});
  cache.pages.stride = {kPage, kRow, 1};
  const std::vector<std::int64_t> slots = random.distinct(kSlots, kSlots);
  const std::vector<float> keys = random.f32s(kSlots * 128);
  for (std::size_t t = 0; t < kSlots; ++t)
    kv::store_index_key(cache, slots[t], keys.data() + t * 128, ScaleRule::power_of_two);
  for (std::int64_t i = 0; i < 3 * kPage; ++i)
    EXPECT_EQ(std::isnan(base::to_f32(memory[static_cast<std::size_t>(i)])),
              i % kPage >= 16 * kRow || i % kPage % kRow >= 128)
        << i;
  for (const Backend& backend : host_backends()) {
    const auto got = gather_keys<T>(backend, cache, slots);
    for (std::size_t i = 0; i < keys.size(); ++i) ASSERT_EQ(base::to_f32(got.keys[i]), keys[i]);
    const auto none = gather_keys<T>(backend, cache, {-1, kSlots});
    for (T x : none.keys) EXPECT_EQ(base::to_f32(x), 0.f);
  }
}
TEST(GatherIndexKeys, UnquantisedF32) { round_trip_of_plain_keys<float>(IndexFormat::f32); }
TEST(GatherIndexKeys, UnquantisedBf16) { round_trip_of_plain_keys<bf16>(IndexFormat::bf16); }

// Bytes that independent code laid out: every stored key of trace-indexer equals what is gathered, in page order.
TEST(Golden, IndexPagesOfTheTrace) {
  const Safetensors file("trace-indexer/trace.safetensors");
  const auto bytes = file.values<std::uint8_t>("k_pages");
  const std::int64_t pages = file.shape("k_pages").at(0);
  ASSERT_EQ(file.shape("k_pages").at(1), 64 * 132);
  IndexCache cache{IndexFormat::fp8, tensor(bytes.data(), {pages, 64, 132})};
  std::vector<std::int64_t> slots(static_cast<std::size_t>(pages * 64));
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
  for (const Backend& backend : host_backends()) {
    const auto got = gather_keys<std::uint8_t>(backend, cache, slots);
    for (std::size_t s = 0; s < slots.size(); ++s) {
      const std::uint8_t* page = bytes.data() + s / 64 * 64 * 132;
      ASSERT_EQ(std::memcmp(got.keys.data() + s * 128, page + s % 64 * 128, 128), 0) << s;
      ASSERT_EQ(std::memcmp(&got.scales[s], page + 8192 + s % 64 * 4, 4), 0) << s;
    }
  }
}

TEST(GatherIndexKeys, RefusesWhatDoesNotFit) {
  IndexPages cache(1, 16, 0);
  const std::int64_t slot = 0;
  std::vector<std::uint8_t> keys(128, 0xEE);
  std::vector<float> scales(1, kNan);
  const GatherIndexKeysArgs good{cache.view, tensor(&slot, {1}), tensor(keys.data(), {1, 128}),
                                 tensor(scales.data(), {1})};
  for (const Backend& backend : host_backends()) {
    GatherIndexKeysArgs bad = good;
    bad.scales = {};
    EXPECT_THROW(gather_index_keys(backend, bad), InvalidArgument);
    bad = good;
    bad.keys.dtype = DType::bf16;
    EXPECT_THROW(gather_index_keys(backend, bad), InvalidArgument);
    bad = good;
    bad.keys.shape[0] = 2;
    EXPECT_THROW(gather_index_keys(backend, bad), InvalidArgument);
    bad = good;
    bad.cache.pages.stride[1] = 136;
    EXPECT_THROW(gather_index_keys(backend, bad), InvalidArgument);
    const std::vector<float> memory(16 * 128);
    std::vector<float> out(128);
    bad = {
        {IndexFormat::f32, tensor(memory.data(), {1, 16, 128})}, good.slots, tensor(out.data(), {1, 128}), good.scales};
    EXPECT_THROW(gather_index_keys(backend, bad), InvalidArgument);  // only fp8 keys have scales
  }
  for (std::uint8_t code : keys) EXPECT_EQ(code, 0xEE);
}

}  // namespace
}  // namespace sievemla::test
