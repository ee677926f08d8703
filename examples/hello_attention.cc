// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// examples/hello_attention.cc -- write three rows into a paged cache, attend to two of them.
#include <sievemla/sievemla.h>

#include <cstdio>
#include <exception>
#include <vector>

namespace {

constexpr std::int64_t kPages = 2, kPageSize = 4, kLatent = 512, kRope = 64;
constexpr std::int64_t kHeads = 8, kTopk = 3;

void run() {
  using namespace sievemla;
  const Backend backend = Backend::cpu();  // the tensors below are in host memory

  // A cache of 8 slots, and new tokens for three of them: token t is the constant t + 1.
  std::vector<bf16> pages(kPages * kPageSize * (kLatent + kRope));
  const KvCache cache{KvFormat::bf16, kLatent, kRope, tensor(pages.data(), {kPages, kPageSize, kLatent + kRope})};
  std::vector<float> latent, rope(3 * kRope, 0.0f);
  for (const float constant : {1.0f, 2.0f, 3.0f}) latent.insert(latent.end(), kLatent, constant);
  const std::vector<std::int32_t> written = {5, 0, 2};
  WriteLatentArgs write;
  write.latent = tensor(latent.data(), {3, kLatent});
  write.rope = tensor(rope.data(), {3, kRope});
  write.slots = tensor(written.data(), {3});
  write.cache = cache;
  write_latent(backend, write);

  // One query, all zeros: both selected rows score 0, so the result is their mean. -1 selects nothing.
  const std::vector<float> q(kHeads * (kLatent + kRope), 0.0f);
  const std::vector<std::int32_t> selected = {5, 2, -1};
  std::vector<float> out(kHeads * kLatent), lse(kHeads);
  AttentionArgs args;
  args.q = tensor(q.data(), {1, kHeads, kLatent + kRope});
  args.kv = cache;
  args.rows = Slots{tensor(selected.data(), {1, kTopk}), {}};
  args.scale = 1.0f / 16;
  args.out = tensor(out.data(), {1, kHeads, kLatent});
  args.lse = tensor(lse.data(), {1, kHeads});

  const std::int64_t bytes = attention_workspace_bytes(backend, {1, kHeads, kTopk});
  struct alignas(kWorkspaceAlign) Block {
    std::byte bytes[kWorkspaceAlign];
  };
  std::vector<Block> scratch(static_cast<std::size_t>(bytes / kWorkspaceAlign + 1));
  attention(backend, args, {scratch.data(), bytes});

  std::printf("%s: out[0] = %.3f (the mean of 1 and 3), lse[0] = %.3f (log 2)\n", backend.name().c_str(),
              static_cast<double>(out[0]), static_cast<double>(lse[0]));
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
