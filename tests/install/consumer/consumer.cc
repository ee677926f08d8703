// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/install/consumer/consumer.cc -- attention over one row is that row; through the installed package alone.
#include <sievemla/sievemla.h>

#include <cstdio>
#include <string>
#include <vector>

int main() {
  using namespace sievemla;
  const std::vector<float> row(576, 0.5f), q(576, 1.0f);
  const std::int32_t slot = 0;
  std::vector<float> out(512, -1.0f);

  AttentionArgs args;
  args.q = tensor(q.data(), {1, 1, 576});
  args.kv = {KvFormat::f32, 512, 64, tensor(row.data(), {1, 1, 576})};
  args.rows = Slots{tensor(&slot, {1, 1}), {}};
  args.scale = 1.0f;
  args.out = tensor(out.data(), {1, 1, 512});

  const Backend backend = Backend::reference();
  struct alignas(kWorkspaceAlign) Block {
    char bytes[kWorkspaceAlign];
  };
  const std::int64_t bytes = attention_workspace_bytes(backend, {1, 1, 1});
  std::vector<Block> scratch(static_cast<std::size_t>(bytes / kWorkspaceAlign + 1));
  attention(backend, args, {scratch.data(), bytes});
  for (const float x : out)
    if (x != 0.5f) return std::printf("sievemla %s: got %g\n", std::string(version()).c_str(), x), 1;
  return 0;
}
