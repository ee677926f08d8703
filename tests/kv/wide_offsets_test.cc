// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/wide_offsets_test.cc -- slots whose byte or element offset does not fit 32 bits.
#include <gtest/gtest.h>

#include <cstring>

#include "kv/cache.h"
#include "kv/index_page.h"
#include "support/lazy_memory.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

constexpr std::int64_t kWrap = std::int64_t{1} << 32;

// Where an offset that lost its upper half would point to: 64 bytes around it, filled, must stay as they are. An offset
// that went through a signed 32-bit product would leave the memory altogether.
class Alias {
 public:
  Alias(std::byte* memory, std::int64_t offset) : at_(memory + offset % kWrap), active_(offset >= kWrap) {
    if (active_) std::memset(at_, static_cast<int>(kUntouched), kBytes);
  }
  bool untouched() const {
    for (std::size_t i = 0; active_ && i < kBytes; ++i)
      if (at_[i] != kUntouched) return false;
    return true;
  }

 private:
  static constexpr std::size_t kBytes = 64;
  std::byte* at_;
  bool active_;
};

void round_trip(KvFormat format, std::int64_t page_size, std::int64_t least_slots, std::vector<std::int64_t> slots) {
  SCOPED_TRACE(std::string(info(format).name) + ", page " + std::to_string(page_size));
  const DType storage = info(format).storage;
  const std::int64_t pages = (least_slots + page_size - 1) / page_size;
  const std::int64_t row_bytes = info(format).row_bytes(512, 64), row = row_bytes / size_of(storage);
  const LazyMemory memory(pages * page_size * row_bytes);
  if (!memory) GTEST_SKIP() << "no address space for " << pages * page_size * row_bytes << " bytes";

  KvCache cache;
  cache.format = format;
  cache.pages = {memory.data(), storage, 3, {pages, page_size, row}, {page_size * row, row, 1}, {}};
  Random random(15);
  const auto n = static_cast<std::int64_t>(slots.size());
  const std::vector<bf16> x = random.bf16s(n * 576);
  LatentCache small({"small", format, 512, 64}, 1, n);
  std::vector<std::int64_t> small_slots;
  for (std::int64_t t = 0; t < n; ++t) small_slots.push_back(t);
  write_latent(Backend::reference(), write_args(x, 576, tensor(small_slots.data(), {n}), small.view));
  const std::vector<float> want = gather(Backend::reference(), small.view, small_slots);

  const std::vector<std::int32_t> narrow(slots.begin(), slots.end());
  for (const Backend& backend : {Backend::reference(), Backend::cpu({.threads = 2})})
    for (const TensorView& view : {tensor(slots.data(), {n}), tensor(narrow.data(), {n})}) {
      SCOPED_TRACE(describe(backend) + ", slots " + name_of(view.dtype));
      for (std::int64_t slot : slots)
        std::memset(memory.data() + slot * row_bytes, 0, static_cast<std::size_t>(row_bytes));
      std::vector<Alias> aliases;
      for (std::int64_t slot : slots) aliases.emplace_back(memory.data(), slot * row_bytes);

      write_latent(backend, write_args(x, 576, view, cache));
      for (std::int64_t t = 0; t < n; ++t)
        EXPECT_EQ(std::memcmp(memory.data() + slots[static_cast<std::size_t>(t)] * row_bytes, small.row(t),
                              static_cast<std::size_t>(row_bytes)),
                  0)
            << slots[static_cast<std::size_t>(t)];
      for (const Alias& alias : aliases) EXPECT_TRUE(alias.untouched());
      EXPECT_EQ(gather(backend, cache, slots), want);
    }
}

TEST(Case15, SlotsBeyond32Bit) {
  // bf16 rows of 576: element 2^31 is in slot 3,728,270, byte 2^32 too.
  round_trip(KvFormat::bf16, 16, 3'728'400, {3'728'269, 3'728'271, 3'728'399});
  round_trip(KvFormat::bf16, 480, 3'728'640, {7'767 * 480 + 479, 7'766 * 480});  // page 7,768 counted from 1
  // 656-byte rows: byte 2^31 is in slot 3,273,603, byte 2^32 in slot 6,547,206.
  round_trip(KvFormat::fp8_ds_mla, 64, 6'547'264, {3'273'603, 3'273'604, 3'273'700, 6'547'206, 6'547'208, 6'547'263});
}

TEST(Case15, IndexerSlotsBeyond32Bit) {
  // 132 bytes a key: byte 2^31 is in slot 16,268,815, byte 2^32 in slot 32,537,631 (or so: scales lie behind the keys).
  constexpr std::int64_t kPageSize = 64, kPageBytes = kPageSize * 132, kPages = 32'537'920 / kPageSize;
  const LazyMemory memory(kPages * kPageBytes);
  if (!memory) GTEST_SKIP() << "no address space for " << kPages * kPageBytes << " bytes";
  const IndexCache cache{IndexFormat::fp8,
                         tensor(reinterpret_cast<const std::uint8_t*>(memory.data()), {kPages, kPageSize, 132})};
  const std::vector<std::int64_t> slots = {16'268'815, 16'268'816, 16'268'900, 32'537'632, 32'537'700, 32'537'919};
  const auto n = static_cast<std::int64_t>(slots.size());
  Random random(15);
  const std::vector<float> x = random.f32s(n * 128);

  for (std::size_t t = 0; t < slots.size(); ++t) {
    const std::int64_t page = slots[t] / kPageSize * kPageBytes, i = slots[t] % kPageSize;
    const Alias key(memory.data(), page + i * 128), scale(memory.data(), page + kPageSize * 128 + i * 4);
    kv::store_index_key(cache, slots[t], x.data() + t * 128, ScaleRule::power_of_two);
    EXPECT_TRUE(key.untouched() && scale.untouched()) << slots[t];
  }
  for (const Backend& backend : {Backend::reference(), Backend::cpu({.threads = 2})}) {
    std::vector<std::uint8_t> keys(slots.size() * 128);
    std::vector<float> scales(slots.size());
    gather_index_keys(backend,
                      {cache, tensor(slots.data(), {n}), tensor(keys.data(), {n, 128}), tensor(scales.data(), {n})});
    for (std::size_t t = 0; t < slots.size(); ++t) {
      const std::int64_t page = slots[t] / kPageSize * kPageBytes, i = slots[t] % kPageSize;
      EXPECT_EQ(std::memcmp(&keys[t * 128], memory.data() + page + i * 128, 128), 0) << slots[t];
      EXPECT_EQ(std::memcmp(&scales[t], memory.data() + page + kPageSize * 128 + i * 4, 4), 0) << slots[t];
      for (std::size_t d = 0; d < 128; ++d)  // power-of-two scale <= 2^-8: half a step of the top codes is 2^-4
        ASSERT_NEAR(kv::from_e4m3(keys[t * 128 + d]) * scales[t], x[t * 128 + d], 0x1p-4);
    }
  }
}

}  // namespace
}  // namespace sievemla::test
