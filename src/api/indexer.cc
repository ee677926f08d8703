// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/indexer.cc -- stage 1: check everything, then hand over to the kernel that serves the call.
#include "sievemla/indexer.h"

#include <cmath>
#include <string_view>

#include "api/checks.h"
#include "api/rules.h"
#include "base/registry.h"
#include "base/view.h"
#include "indexer/registry.h"
#include "sievemla/error.h"

namespace sievemla {
namespace {

using api::check_contiguous_rows;
using api::check_tensor;
using api::kAny;

constexpr std::int64_t kMostIndexHeads = 4096;  // models have 16 to 64; a bound on scratch

void check_index(std::int64_t value, std::int64_t limit, const char* rule, const Where& where, std::int64_t at) {
  expects(value >= 0 && value < limit, rule, where, value, " at ", at, ", limit ", limit);
}

void check_rope(const Backend& backend, const Rope& rope, std::int64_t tokens, const Where& where) {
  expects(rope.style == RopeStyle::half_split || rope.style == RopeStyle::interleaved || rope.style == RopeStyle::none,
          "the indexer's rope style must be said: half_split (DeepSeek-V3.2), interleaved (GLM-5, 5.1, 5.2) or none "
          "(GLM-5.3-Flash)",
          where + ".style", name_of(rope.style));
  if (rope.style == RopeStyle::none) return;
  check_tensor(backend, rope.positions, {tokens}, {DType::i32, DType::i64}, where + ".positions");
  check_tensor(backend, rope.cos_sin, {kAny, kIndexRope}, {DType::f32, DType::bf16}, where + ".cos_sin");
}

void check_position(const Rope& rope, std::int64_t token, const Where& where) {
  if (rope.style == RopeStyle::none) return;
  check_index(base::load_int(rope.positions, token), rope.cos_sin.dim(0), "a position must be in [0, max_position)",
              where + ".positions", token);
}

// The keys' dtype.
DType check_keys(const Backend& backend, const IndexScoreArgs& args, std::int64_t rows, const Where& where) {
  const bool paged{args.paged.cache.pages}, contiguous{args.contiguous.keys};
  expects(paged != contiguous, "exactly one of paged and contiguous keys must be given", where + "paged, contiguous",
          paged ? "both" : "neither");
  if (paged) {
    const PagedKeys& keys = args.paged;
    api::check_cache(backend, keys.cache, where + "paged.cache");
    check_tensor(backend, keys.block_table, {kAny, kAny}, {DType::i32}, where + "paged.block_table");
    check_contiguous_rows(keys.block_table, where + "paged.block_table");
    api::check_row_request(backend, keys.row_request, rows, keys.block_table.dim(0), where + "paged.row_request");
    return keys.cache.pages.dtype;
  }
  const ContiguousKeys& keys = args.contiguous;
  check_tensor(backend, keys.keys, {kAny, kIndexDim}, {DType::f32, DType::bf16, DType::u8}, where + "contiguous.keys");
  check_contiguous_rows(keys.keys, where + "contiguous.keys");
  if (keys.keys.dtype == DType::u8) {
    check_tensor(backend, keys.scales, {keys.keys.dim(0)}, {DType::f32}, where + "contiguous.scales");
  } else {
    expects(!keys.scales, "scales go with u8 keys only", where + "contiguous.scales", api::describe(keys.scales));
  }
  if (keys.starts) check_tensor(backend, keys.starts, {rows}, {DType::i32}, where + "contiguous.starts");
  return keys.keys.dtype;
}

// The values that say which keys a row sees.
void check_row(const IndexScoreArgs& args, std::int64_t t, const Where& where) {
  const std::int64_t length = base::load_int(args.lengths, t), width = args.logits.dim(1);
  if (length <= 0) return;  // a padded row may hold anything
  expects(length <= width, "a length must not exceed the width of logits", where + "lengths", length, " in row ", t,
          ", width ", width);
  if (args.contiguous.keys) {
    const TensorView& starts = args.contiguous.starts;
    const std::int64_t start = starts ? base::load_int(starts, t) : 0, keys = args.contiguous.keys.dim(0);
    expects(start >= 0 && start + length <= keys, "a row must see keys that are there: 0 <= start, start + length <= n",
            where + "contiguous.starts", "start ", start, ", length ", length, " in row ", t, ", n ", keys);
  } else if (args.paged.row_request) {
    check_index(base::load_int(args.paged.row_request, t), args.paged.block_table.dim(0),
                "a row's request must be one of the block table's", where + "paged.row_request", t);
  }
}

}  // namespace

std::string_view name_of(RopeStyle style) {
  switch (style) {
    case RopeStyle::unset: return "unset";
    case RopeStyle::half_split: return "half_split";
    case RopeStyle::interleaved: return "interleaved";
    case RopeStyle::none: return "none";
  }
  return "?";
}

namespace api {

const stage::indexer::WriteIndexKeysKernel& admit(const Backend& backend, const WriteIndexKeysArgs& args) {
  const Where where = "write_index_keys: ";
  check_tensor(backend, args.k, {kAny, kIndexDim}, {DType::f32, DType::bf16}, where + "k");
  check_tensor(backend, args.norm_weight, {kIndexDim}, {DType::f32, DType::bf16}, where + "norm_weight");
  check_tensor(backend, args.norm_bias, {kIndexDim}, {DType::f32, DType::bf16}, where + "norm_bias");
  expects(args.norm_eps > 0 && std::isfinite(args.norm_eps), "eps must be positive and finite", where + "norm_eps",
          args.norm_eps);
  const std::int64_t tokens = args.k.dim(0);
  check_rope(backend, args.rope, tokens, where + "rope");
  api::check_cache(backend, args.cache, where + "cache");
  check_scale_rule(args.scale, where + "scale");
  api::check_write_slots(backend, args.slots, tokens, args.cache.slots(), where + "slots");
  for (std::int64_t t = 0; api::on_host(backend) && t < tokens; ++t)
    if (base::load_int(args.slots, t) >= 0) check_position(args.rope, t, where + "rope");  // else the token is skipped
  return base::pick(stage::indexer::write_index_keys_kernels(), backend, args, "write_index_keys");
}

const stage::indexer::WriteLayerKernel& admit(const Backend& backend, const WriteLayerArgs& args) {
  const Where where = "write_layer: ";
  admit(backend, args.latent);
  const KvCache& cache = args.latent.cache;
  const std::int64_t tokens = args.latent.latent.dim(0);
  if (args.keys.k) {
    admit(backend, args.keys);
    expects(args.keys.k.dim(0) == tokens, "there must be a key for every latent row", where + "keys.k",
            args.keys.k.dim(0));
  }
  check_tensor(backend, args.latent_weight, {cache.latent}, {DType::f32, DType::bf16}, where + "latent_weight");
  expects(args.latent_eps > 0 && std::isfinite(args.latent_eps), "eps must be positive and finite",
          where + "latent_eps", args.latent_eps);
  check_rope(backend, args.rope, tokens, where + "rope");
  expects(args.rope.style == RopeStyle::none || cache.rope == kIndexRope, "a rotated rope must be 64 wide",
          where + "latent.cache", cache.rope);
  for (std::int64_t t = 0; on_host(backend) && t < tokens; ++t)
    if (base::load_int(args.latent.slots, t) >= 0) check_position(args.rope, t, where + "rope");
  if (args.indices) {
    check_output(backend, args.indices, {kAny, kAny}, {DType::i32}, where + "indices");
    check_contiguous_rows(args.indices, where + "indices");
  }
  return base::pick(stage::indexer::write_layer_kernels(), backend, args, "write_layer");
}

Queries admit(const Backend& backend, const IndexQueryArgs& args) {
  const Where where = "index_queries: ";
  check_tensor(backend, args.q, {kAny, kAny, kIndexDim}, {DType::f32, DType::bf16}, where + "q");
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1);
  expects(heads >= 1, "there must be a head", where + "q", api::describe(args.q));
  check_tensor(backend, args.weights, {tokens, heads}, {DType::f32, DType::bf16}, where + "weights");
  expects(args.weight_scale > 0 && std::isfinite(args.weight_scale), "the scale of weights must be positive and finite",
          where + "weight_scale", args.weight_scale);
  check_rope(backend, args.rope, tokens, where + "rope");
  check_scale_rule(args.scale, where + "scale");
  check_output(backend, args.out_q, {tokens, heads, kIndexDim}, {DType::f32, DType::bf16, DType::u8}, where + "out_q");
  check_contiguous_rows(args.out_q, where + "out_q");
  check_output(backend, args.out_weights, {tokens, heads}, {DType::f32}, where + "out_weights");
  const auto* const keys = args.keys.k ? &admit(backend, args.keys) : nullptr;
  for (std::int64_t t = 0; api::on_host(backend) && t < tokens; ++t) check_position(args.rope, t, where + "rope");
  return {base::pick(stage::indexer::index_queries_kernels(), backend, args, "index_queries"),
          api::on_host(backend) ? keys : nullptr};
}

void run(const Backend& backend, const Queries& kernels, const IndexQueryArgs& args, Stream stream) {
  const base::Exec exec{backend, {}, stream};
  if (kernels.keys) kernels.keys->run(args.keys, exec);
  kernels.queries.run(args, exec);
}

const stage::indexer::IndexScoresKernel& admit(const Backend& backend, const IndexScoreArgs& args,
                                               Workspace workspace) {
  const Where where = "index_scores: ";
  check_tensor(backend, args.q, {kAny, kAny, kIndexDim}, {DType::f32, DType::bf16, DType::u8}, where + "q");
  check_contiguous_rows(args.q, where + "q");
  const std::int64_t rows = args.q.dim(0), heads = args.q.dim(1);
  expects(heads >= 1 && heads <= kMostIndexHeads, "heads must be 1 to 4096", where + "q", api::describe(args.q));
  check_tensor(backend, args.weights, {rows, heads}, {DType::f32}, where + "weights");
  const DType keys = check_keys(backend, args, rows, where);
  const IndexCache& cache = args.paged.cache;
  expects(on_host(backend) || !cache.pages || cache.page_size() % 16 == 0,
          "on cuda a page holds a multiple of 16 keys (engines: --block-size 64)", where + "paged.cache", "pages of ",
          cache.page_size());
  expects(args.q.dtype != DType::u8 || keys == DType::u8, "a u8 (e4m3) q goes with fp8 keys", where + "q", "keys of ",
          name_of(keys));
  check_tensor(backend, args.lengths, {rows}, {DType::i32}, where + "lengths");
  check_output(backend, args.logits, {rows, kAny}, {DType::f32}, where + "logits");
  check_contiguous_rows(args.logits, where + "logits");
  for (std::int64_t t = 0; api::on_host(backend) && t < rows; ++t) check_row(args, t, where);
  const auto& kernel = base::pick(stage::indexer::index_scores_kernels(), backend, args, "index_scores");
  const IndexScoreBounds bounds{rows, heads, args.logits.dim(1)};
  check_workspace(workspace, index_scores_workspace_bytes(backend, bounds), "index_scores: workspace");
  return kernel;
}

}  // namespace api

void write_index_keys(const Backend& backend, const WriteIndexKeysArgs& args, Stream stream) {
  api::admit(backend, args).run(args, {backend, {}, stream});
}

void write_layer(const Backend& backend, const WriteLayerArgs& args, Stream stream) {
  api::admit(backend, args).run(args, {backend, {}, stream});
}

void index_queries(const Backend& backend, const IndexQueryArgs& args, Stream stream) {
  api::run(backend, api::admit(backend, args), args, stream);
}

void index_scores(const Backend& backend, const IndexScoreArgs& args, Workspace workspace, Stream stream) {
  api::admit(backend, args, workspace).run(args, {backend, workspace, stream});
}

std::int64_t index_scores_workspace_bytes(const Backend& backend, const IndexScoreBounds& bounds) {
  const Where where = "index_scores_workspace_bytes: ";
  api::check_bound(bounds.rows, api::kMostRows, "rows must be 0 to 2^40", where + "rows");
  api::check_bound(bounds.heads, kMostIndexHeads, "heads must be 0 to 4096", where + "heads");
  api::check_bound(bounds.width, api::kMostRows, "the width must be 0 to 2^40", where + "width");
  return base::workspace_bytes(stage::indexer::index_scores_kernels(), backend, bounds);
}

}  // namespace sievemla
