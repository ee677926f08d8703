// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/golden_test.cc -- bytes that independent code wrote (tests/golden/make_golden.py), reproduced one by one.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "base/number.h"
#include "kv/cache.h"
#include "support/near.h"
#include "support/safetensors.h"

namespace sievemla::test {
namespace {

constexpr Layout kPacked{"fp8_ds_mla", KvFormat::fp8_ds_mla, 512, 64};

struct Golden {
  Safetensors file{"trace-glm5/trace.safetensors"};
  std::vector<bf16> rows = file.values<bf16>("kv_bf16");
  std::vector<std::int64_t> slots = std::vector<std::int64_t>(static_cast<std::size_t>(file.shape("kv_bf16").at(0)));
  Golden() { std::iota(slots.begin(), slots.end(), 0); }
  std::int64_t count() const { return static_cast<std::int64_t>(slots.size()); }
};

TEST(Golden, RequantisedBf16RowsAreTheStoredFp8Rows) {
  const Golden golden;
  constexpr std::int64_t kPage = 64;
  ASSERT_EQ(golden.count() % kPage, 0);
  for (const auto& [rule, name] :
       {std::pair{ScaleRule::arbitrary, "kv_fp8"}, {ScaleRule::power_of_two, "kv_fp8_pow2"}}) {
    const auto want = golden.file.values<std::uint8_t>(name);
    for (const Backend& backend : host_backends()) {
      SCOPED_TRACE(std::string(name) + ", " + describe(backend));
      LatentCache cache(kPacked, golden.count() / kPage, kPage);
      write_latent(backend,
                   write_args(golden.rows, 576, tensor(golden.slots.data(), {golden.count()}), cache.view, rule));
      ASSERT_EQ(cache.bytes.size(), want.size());
      for (std::size_t i = 0; i < want.size(); ++i)
        ASSERT_EQ(static_cast<std::uint8_t>(cache.bytes[i]), want[i]) << "row " << i / 656 << ", byte " << i % 656;
    }
  }
}

TEST(Golden, Fp8RowsReadBackAsCodeTimesScale) {
  const Golden golden;
  LatentCache cache(kPacked, golden.count(), 1);
  const auto bytes = golden.file.values<std::uint8_t>("kv_fp8");
  std::memcpy(cache.bytes.data(), bytes.data(), bytes.size());
  const std::vector<float> got = gather(Backend::reference(), cache.view, golden.slots);

  // Per 128-group half an e4m3 step is at most 16 units of amax / 448: 2^-4.8 of amax. The rope is exact.
  for (std::size_t r = 0; r < golden.slots.size(); ++r) {
    const bf16* want = golden.rows.data() + r * 576;
    for (std::size_t g = 0; g < 4; ++g) {
      float amax = 0.f;
      for (std::size_t i = g * 128; i < (g + 1) * 128; ++i) amax = std::max(amax, std::abs(base::to_f32(want[i])));
      for (std::size_t i = g * 128; i < (g + 1) * 128; ++i)
        ASSERT_LE(std::abs(got[r * 576 + i] - base::to_f32(want[i])), amax * (16.1f / 448)) << r << ", " << i;
    }
    for (std::size_t i = 512; i < 576; ++i) ASSERT_EQ(got[r * 576 + i], base::to_f32(want[i])) << r << ", " << i;
  }
}

}  // namespace
}  // namespace sievemla::test
