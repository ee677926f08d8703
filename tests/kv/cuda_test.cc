// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/cuda_test.cc -- latent rows and indexer keys on a CUDA device: the reference's bytes, and the values back.
#include <cmath>
#include <cstring>

#include "kv/cache.h"
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
  args.latent = device.put(args.latent), args.rope = device.put(args.rope), args.slots = device.put(args.slots);
  args.cache.pages = device.put(pages);
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
