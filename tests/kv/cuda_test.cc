// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/cuda_test.cc -- latent rows and indexer keys on a CUDA device: the reference's bytes, and the values back.
#include <cmath>
#include <cstring>
#include <numeric>

#include "kv/cache.h"
#include "kv/e4m3.h"
#include "kv/index_page.h"
#include "support/near.h"
#include "support/on_cuda.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

using KvOnCuda = OnCuda;

template <class T>
void expect_reference(const Backend& cuda, const Layout& layout, ScaleRule rule) {
  constexpr std::int64_t kTokens = 40;
  const Backend reference = Backend::reference();
  Random random(9);
  std::vector<T> latents, ropes;
  for (std::int64_t i = 0; i < kTokens * layout.latent; ++i)  // from far below to far above a group's usual size
    latents.push_back(
        base::round_to<T>(random.uniform_f32(1.f) * std::exp2(static_cast<float>(random.below(40)) - 30)));
  for (std::int64_t i = 0; i < kTokens * layout.rope; ++i) ropes.push_back(base::round_to<T>(random.uniform_f32(2.f)));
  for (std::int64_t i = 0; i < layout.latent; ++i) latents[static_cast<std::size_t>(i)] = base::round_to<T>(0.f);
  latents[static_cast<std::size_t>(2 * layout.latent + 130)] = base::round_to<T>(kNan);
  latents[static_cast<std::size_t>(3 * layout.latent + 500)] = base::round_to<T>(kInf);
  std::vector<std::int64_t> slots = random.distinct(kTokens, 64);
  slots[7] = -1;

  const auto in = [&](std::vector<T>& x, std::int64_t width) { return tensor(x.data(), {kTokens, width}); };
  LatentCache want(layout, 4, 16, 64), got(layout, 4, 16, 64);
  WriteLatentArgs args{in(latents, layout.latent), {}, tensor(slots.data(), {kTokens}), want.view, rule};
  if (layout.rope > 0) args.rope = in(ropes, layout.rope);
  write_latent(reference, args);

  OnDevice device(cuda.device());
  const TensorView pages = got.view.pages;
  args.cache.pages = pages;
  args = device.put(args);
  write_latent(cuda, args);

  std::vector<std::int64_t> read = slots;
  read.push_back(64), read.push_back(5);
  const std::int64_t n = static_cast<std::int64_t>(read.size()), width = layout.latent + layout.rope;
  for (int as_bf16 = 0; as_bf16 < 2; ++as_bf16) {
    std::vector<float> values(static_cast<std::size_t>(n * width)), expected = values;
    std::vector<bf16> short_values(values.size()), short_expected(values.size());
    const auto out = [&](std::vector<float>& f, std::vector<bf16>& b) {
      return as_bf16 ? tensor(b.data(), {n, width}) : tensor(f.data(), {n, width});
    };
    gather_latent(reference, {want.view, tensor(read.data(), {n}), out(expected, short_expected)});
    const TensorView result = out(values, short_values);
    gather_latent(cuda, {args.cache, device.put(tensor(read.data(), {n})), device.put(result)});
    cuda_good(cudaDeviceSynchronize());
    device.take_back(result);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float x = as_bf16 ? base::to_f32(short_values[i]) : values[i];
      const float y = as_bf16 ? base::to_f32(short_expected[i]) : expected[i];
      ASSERT_TRUE(x == y || (std::isnan(x) && std::isnan(y))) << layout.name << ": " << i << ": " << x << ", " << y;
    }
  }
  device.take_back(pages);
  EXPECT_EQ(got.bytes, want.bytes) << layout.name;
}

TEST_F(KvOnCuda, LatentRowsAreTheReferencesBytes) {
  const Backend cuda = backend();
  for (const Layout& layout :
       {Layout{"bf16", KvFormat::bf16, 512, 64}, Layout{"bf16_nope", KvFormat::bf16, 512, 0},
        Layout{"fp8_ds_mla", KvFormat::fp8_ds_mla, 512, 64}, Layout{"fp8_nope", KvFormat::fp8_nope, 512, 0},
        Layout{"fp8_nope_in_656", KvFormat::fp8_nope, 512, 0, 128}})
    for (ScaleRule rule : {ScaleRule::arbitrary, ScaleRule::power_of_two}) {
      expect_reference<float>(cuda, layout, rule);
      expect_reference<bf16>(cuda, layout, rule);
    }
}

// Groups whose largest value is 448, so that the scale is 1: every bf16 below it as a code of its own, and every code
// read back.
TEST_F(KvOnCuda, Case11EveryBf16AndEveryCode) {
  const Backend cuda = backend();
  constexpr std::int64_t kTokens = 2 * 0x43E1 / 508 + 1;  // 448 = 0x43E0
  std::vector<bf16> x(kTokens * 512, bf16{0});
  std::int64_t next = 0;
  for (std::uint32_t bits = 0; bits <= 0x43E0; ++bits)
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      if (next % 128 == 0) x[static_cast<std::size_t>(next++)] = bf16{0x43E0};
      x[static_cast<std::size_t>(next++)] = bf16{static_cast<std::uint16_t>(bits | sign)};
    }
  for (std::int64_t group = next / 128 * 128; group < kTokens * 512; group += 128)
    x[static_cast<std::size_t>(group)] = bf16{0x43E0};
  std::vector<std::int64_t> slots(kTokens);
  std::iota(slots.begin(), slots.end(), 0);
  LatentCache cache({"fp8_nope", KvFormat::fp8_nope, 512, 0}, kTokens / 16 + 1, 16);
  const TensorView pages = cache.view.pages;
  OnDevice device(cuda.device());
  write_latent(cuda, device.put(write_args(x, 512, tensor(slots.data(), {kTokens}), cache.view)));
  device.take_back(pages);
  for (std::int64_t i = 0; i < kTokens * 512; ++i) {
    const auto code = std::to_integer<std::uint8_t>(cache.row(i / 512)[i % 512]);
    const float value = base::to_f32(x[static_cast<std::size_t>(i)]);
    ASSERT_EQ(code, kv::to_e4m3(value)) << value;
  }

  for (int code = 0; code < 256; ++code) *(cache.row(0) + code) = static_cast<std::byte>(code);
  const float one = 1;
  for (int group = 0; group < 4; ++group) std::memcpy(cache.row(0) + 512 + 4 * group, &one, sizeof one);
  std::vector<float> values(512);
  const TensorView out = tensor(values.data(), {1, 512});
  OnDevice again(cuda.device());
  KvCache there = cache.view;
  there.pages = again.put(pages);
  gather_latent(cuda, {there, again.put(tensor(slots.data(), {1})), again.put(out)});
  again.take_back(out);
  for (int code = 0; code < 256; ++code) {
    const float want = kv::from_e4m3(static_cast<std::uint8_t>(code)), got = values[static_cast<std::size_t>(code)];
    ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code;
  }
}

// Rows past 2^31 elements and 2^31 and 2^32 bytes, written and read back; where an offset that lost its upper half
// would point to, nothing changes.
TEST_F(KvOnCuda, Case15SlotsBeyond32Bits) {
  const Backend cuda = backend();
  struct Place {
    KvFormat format;
    std::int64_t page_size, slots;
    std::vector<std::int64_t> written;
  };
  for (const Place& place : {Place{KvFormat::bf16, 16, 3'728'400, {3'728'269, 3'728'271, 3'728'399}},
                             Place{KvFormat::bf16, 480, 3'728'640, {7'767 * 480 + 479, 7'766 * 480}},
                             Place{KvFormat::fp8_ds_mla, 64, 6'547'264, {3'273'604, 6'547'208, 6'547'263}}}) {
    const std::int64_t row_bytes = info(place.format).row_bytes(512, 64), n = std::ssize(place.written);
    std::size_t free = 0, total = 0;
    cuda_good(cudaMemGetInfo(&free, &total));
    if (free < static_cast<std::size_t>(place.slots * row_bytes)) GTEST_SKIP() << "too little memory";
    const cuda::Memory memory = cuda::Memory::on(cuda.device(), place.slots * row_bytes);
    auto* const bytes = static_cast<std::byte*>(memory.data());
    cuda_good(cudaMemset(bytes, 0xA5, static_cast<std::size_t>(memory.bytes())));
    const DType storage = info(place.format).storage;
    const std::int64_t row = row_bytes / size_of(storage);
    KvCache cache;
    cache.format = place.format;
    cache.pages = {bytes,
                   storage,
                   3,
                   {place.slots / place.page_size, place.page_size, row},
                   {place.page_size * row, row, 1},
                   cuda.device()};
    const std::vector<bf16> x = Random(15).bf16s(n * 576);
    LatentCache small({"small", place.format, 512, 64}, 1, n);
    std::vector<std::int64_t> small_slots(static_cast<std::size_t>(n));
    std::iota(small_slots.begin(), small_slots.end(), 0);
    write_latent(Backend::reference(), write_args(x, 576, tensor(small_slots.data(), {n}), small.view));
    const std::vector<float> want = gather(Backend::reference(), small.view, small_slots);

    OnDevice device(cuda.device());
    const TensorView slots = tensor(place.written.data(), {n});
    write_latent(cuda, device.put(write_args(x, 576, slots, cache)));
    std::vector<float> got(want.size());
    const TensorView out = tensor(got.data(), {n, 576});
    gather_latent(cuda, {cache, device.put(slots), device.put(out)});
    device.take_back(out);
    EXPECT_EQ(got, want) << info(place.format).name;
    for (std::int64_t t = 0; t < n; ++t) {
      std::vector<std::byte> there(static_cast<std::size_t>(row_bytes));
      const std::int64_t at = place.written[static_cast<std::size_t>(t)] * row_bytes;
      cuda_copy(there.data(), bytes + at, row_bytes);
      EXPECT_EQ(std::memcmp(there.data(), small.row(t), there.size()), 0);
      for (const std::int64_t wrapped : {at & 0x7FFFFFFF, at & 0xFFFFFFFF}) {
        if (wrapped == at) continue;
        cuda_copy(there.data(), bytes + wrapped, row_bytes);
        EXPECT_EQ(there, std::vector<std::byte>(there.size(), std::byte{0xA5}));
      }
    }
  }
}

TEST_F(KvOnCuda, IndexKeysComeBack) {
  const Backend cuda = backend();
  constexpr std::int64_t kPages = 3, kPage = 32, kN = 50;
  Random random(4);
  std::vector<std::uint8_t> pages(kPages * kPage * kIndexKeyBytes), keys(kN * kIndexDim), want_keys = keys;
  for (auto& byte : pages) byte = static_cast<std::uint8_t>(random.bits());
  std::vector<float> scales(kN), want_scales(kN);
  std::vector<std::int32_t> slots;
  for (int i = 0; i < kN; ++i) slots.push_back(static_cast<std::int32_t>(random.below(kPages * kPage + 4)) - 2);
  GatherIndexKeysArgs args{{IndexFormat::fp8, tensor(pages.data(), {kPages, kPage, kIndexKeyBytes})},
                           tensor(slots.data(), {kN}),
                           tensor(want_keys.data(), {kN, kIndexDim}),
                           tensor(want_scales.data(), {kN})};
  gather_index_keys(Backend::reference(), args);
  OnDevice device(cuda.device());
  const TensorView out = tensor(keys.data(), {kN, kIndexDim}), out_scales = tensor(scales.data(), {kN});
  args.cache.pages = device.put(args.cache.pages), args.slots = device.put(args.slots);
  args.keys = device.put(out), args.scales = device.put(out_scales);
  gather_index_keys(cuda, args);
  cuda_good(cudaDeviceSynchronize());
  device.take_back(out), device.take_back(out_scales);
  EXPECT_EQ(keys, want_keys);
  EXPECT_EQ(0, std::memcmp(scales.data(), want_scales.data(), sizeof(float) * kN));
}

}  // namespace
}  // namespace sievemla::test
