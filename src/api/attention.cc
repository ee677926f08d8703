// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "sievemla/attention.h"

#include <limits>
#include <string>
#include <variant>

#include "api/checks.h"
#include "api/rules.h"
#include "attention/registry.h"
#include "attention/rows.h"
#include "base/view.h"
#include "sievemla/error.h"

namespace sievemla {
namespace {

using stage::attention::Rows;

// Sizes within which a workspace's bytes fit 63 bits.
void check_bounds(const AttentionBounds& b, std::string_view where) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  constexpr int kMostWidth = 65536;
  expects(b.tokens >= 0 && b.tokens <= kMost, "tokens must be 0 to 2^40", where, b.tokens);
  expects(b.heads >= 1 && b.heads <= 128, "heads must be 1 to 128", where, b.heads);
  expects(b.lanes >= 0 && b.lanes <= kMost, "lanes must be 0 to 2^40", where, b.lanes);
  expects(b.latent >= 1 && b.latent <= kMostWidth && b.rope >= 0 && b.rope <= kMostWidth,
          "a row must be latent 1 to 65536 and rope 0 to 65536 wide", where, b.latent, " + ", b.rope);
}

void check_rows(const Backend& backend, const Slots& slots, std::int64_t tokens) {
  const TensorView& indices = slots.indices;
  const bool folded = indices.rank == 3;
  if (folded) {
    api::check_tensor(backend, indices, {api::kAny, api::kAny, api::kAny}, {DType::i32, DType::i64},
                      "attention: rows.indices");
    expects(tokens == 0
                ? indices.dim(0) * indices.dim(1) == 0
                : indices.dim(1) > 0 && tokens % indices.dim(1) == 0 && tokens / indices.dim(1) == indices.dim(0),
            "indices must be [requests, q_len, topk] with requests * q_len tokens", "attention: rows.indices",
            api::describe(indices), " for ", tokens, " tokens");
  } else {
    api::check_tensor(backend, indices, {tokens, api::kAny}, {DType::i32, DType::i64}, "attention: rows.indices");
  }
  if (slots.topk_length)
    api::check_tensor(backend, slots.topk_length, {tokens}, {DType::i32}, "attention: rows.topk_length");
}

void check_rows(const Backend& backend, const BlockTable& blocks, std::int64_t tokens) {
  api::check_tensor(backend, blocks.table, {api::kAny, api::kAny}, {DType::i32}, "attention: rows.table");
  const std::int64_t requests = blocks.table.dim(0);
  expects(tokens == 0 || (requests > 0 && tokens % requests == 0), "tokens must be requests * q_len",
          "attention: rows.table", tokens, " tokens, ", requests, " requests");
  api::check_tensor(backend, blocks.lengths, {requests}, {DType::i32}, "attention: rows.lengths");
}

// Debug mode, on the host: every entry that a lane goes through is -1 or inside the cache.
void check_entries(const Rows& rows, std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t i = 0; i < rows.entries(t); ++i)
      if (const std::int64_t entry = rows.entry(t, i); entry < -1 || entry >= rows.pages())
        throw InvalidArgument(error_message(
            "with check_indices a slot or page must be -1 or in [0, " + std::to_string(rows.pages()) + ")",
            "attention: rows", entry, " at [", t, ", ", i, "]"));
}

}  // namespace

const stage::attention::AttentionKernel& api::admit(const Backend& backend, const AttentionArgs& args,
                                                    Workspace workspace) {
  api::check_cache(backend, args.kv, "attention: kv");
  const std::int64_t latent = args.kv.latent, rope = args.kv.rope;
  api::check_tensor(backend, args.q, {api::kAny, api::kAny, args.q_rope ? latent : latent + rope},
                    {DType::bf16, DType::f32}, "attention: q");
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1);
  if (args.q_rope) api::check_tensor(backend, args.q_rope, {tokens, heads, rope}, {args.q.dtype}, "attention: q_rope");
  std::visit([&](const auto& rows) { check_rows(backend, rows, tokens); }, args.rows);
  expects(args.scale > 0 && args.scale <= std::numeric_limits<float>::max(), "scale must be positive and finite",
          "attention: scale", args.scale);
  if (args.sink) api::check_tensor(backend, args.sink, {heads}, {DType::f32}, "attention: sink");
  api::check_tensor(backend, args.out, {tokens, heads, latent}, {DType::bf16, DType::f32}, "attention: out");
  if (args.lse) api::check_tensor(backend, args.lse, {tokens, heads}, {DType::f32}, "attention: lse");
  const auto& kernel = base::pick(stage::attention::attention_kernels(), backend, args, "attention");
  // Lengths in device memory are not read here: the bound is then the table's width.
  const bool on_host = backend.device().type == DeviceType::cpu;
  const Rows rows(args);
  const AttentionBounds bounds{tokens, heads, on_host ? rows.most_lanes(tokens) : rows.width(), args.kv.latent,
                               args.kv.rope};
  check_bounds(bounds, "attention");
  check_workspace(workspace, tokens > 0 && kernel.workspace_bytes ? kernel.workspace_bytes(backend, bounds) : 0,
                  "attention: workspace");
  return kernel;
}

void attention(const Backend& backend, const AttentionArgs& args, Workspace workspace, Stream stream) {
  const auto& kernel = api::admit(backend, args, workspace);
  const std::int64_t tokens = args.q.dim(0);
  if (args.check_indices && backend.device().type == DeviceType::cpu) check_entries(Rows(args), tokens);
  if (tokens > 0) kernel.run(args, {backend, workspace, stream});
}

std::int64_t attention_workspace_bytes(const Backend& backend, const AttentionBounds& bounds) {
  check_bounds(bounds, "attention_workspace_bytes");
  return base::workspace_bytes(stage::attention::attention_kernels(), backend, bounds);
}

}  // namespace sievemla
