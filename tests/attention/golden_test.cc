// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/golden_test.cc -- a call of GLM-5's size over three caches, against answers from independent code.
#include <gtest/gtest.h>

#include <cstring>

#include "sievemla/attention.h"
#include "support/attention_problem.h"
#include "support/backends.h"
#include "support/near.h"
#include "support/safetensors.h"

namespace sievemla::test {
namespace {

struct Trace {
  Safetensors file{"trace-glm5/trace.safetensors"};
  std::int64_t tokens = file.shape("q")[0], heads = file.shape("q")[1], topk = file.shape("indices")[1];
  std::int64_t slots = file.shape("kv_bf16")[0];
  std::vector<bf16> q = file.values<bf16>("q");
  std::vector<std::int32_t> indices = file.values<std::int32_t>("indices");
  std::vector<std::int32_t> topk_length = file.values<std::int32_t>("topk_length");
  std::vector<std::int32_t> poison = file.values<std::int32_t>("poison_slots");
  float scale = file.values<float>("softmax_scale")[0];

  std::vector<std::uint8_t> cache(const std::string& name) const {
    if (name != "bf16") return file.values<std::uint8_t>("kv_" + name);
    const auto rows = file.values<bf16>("kv_bf16");
    std::vector<std::uint8_t> bytes(rows.size() * sizeof(bf16));
    std::memcpy(bytes.data(), rows.data(), bytes.size());
    return bytes;
  }

  Result run(const Backend& backend, const std::vector<std::uint8_t>& bytes) const {
    constexpr std::int64_t kPage = 64;
    const std::int64_t row_bytes = static_cast<std::int64_t>(bytes.size()) / slots;
    AttentionArgs args;
    args.q = tensor(q.data(), {tokens, heads, 576});
    if (row_bytes == 656) {
      args.kv = {KvFormat::fp8_ds_mla, 512, 64, tensor(bytes.data(), {slots / kPage, kPage, row_bytes})};
    } else {
      const auto* rows = reinterpret_cast<const bf16*>(bytes.data());
      args.kv = {KvFormat::bf16, 512, 64, tensor(rows, {slots / kPage, kPage, 576})};
    }
    args.rows = Slots{tensor(indices.data(), {tokens, topk}), tensor(topk_length.data(), {tokens})};
    args.scale = scale;
    Result result;
    result.out.assign(static_cast<std::size_t>(tokens * heads * 512), kNan);
    result.lse.assign(static_cast<std::size_t>(tokens * heads), kNan);
    args.out = tensor(result.out.data(), {tokens, heads, 512});
    args.lse = tensor(result.lse.data(), {tokens, heads});
    const PoisonedWorkspace workspace(attention_workspace_bytes(backend, {tokens, heads, topk}));
    attention(backend, args, workspace);
    return result;
  }
};

class GoldenTrace : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTrace, MatchesAndReadsNoPoison) {
  const Trace trace;
  const std::string name = GetParam();
  const auto bytes = trace.cache(name);
  auto poisoned = bytes;
  const std::size_t row_bytes = bytes.size() / static_cast<std::size_t>(trace.slots);
  for (std::int32_t slot : trace.poison)  // 0xFF: NaN as bf16, as e4m3 and as a scale
    std::memset(poisoned.data() + static_cast<std::size_t>(slot) * row_bytes, 0xFF, row_bytes);
  const auto out = trace.file.values<float>("out_" + name), lse = trace.file.values<float>("lse_" + name);

  for (const Backend& backend : host_backends()) {
    // The reference differs by its one rounding to f32; 1e-4 is what every f32 path has to meet.
    const double tolerance = backend.kind() == BackendKind::reference ? 1e-6 : 1e-4;
    const Result result = trace.run(backend, bytes);
    EXPECT_LE(relative_error(result.out, out), tolerance) << backend.name();
    EXPECT_LE(relative_error(result.lse, lse), tolerance) << backend.name();
    EXPECT_TRUE(same_bits(trace.run(backend, poisoned), result)) << backend.name();
  }
}

INSTANTIATE_TEST_SUITE_P(Caches, GoldenTrace, testing::Values("bf16", "fp8", "fp8_pow2"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace sievemla::test
