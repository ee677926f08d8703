// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/attention.cc -- stage 3 on CUDA, host side: what a call lacks, how it is cut, the launch.
#include <cuda_runtime_api.h>

#include <array>
#include <variant>
#include <vector>

#include "attention/cuda/kernels.h"
#include "attention/registry.h"
#include "cuda/context.cuh"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "sievemla/error.h"

namespace sievemla::stage::attention {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

const RowKernels* rows_of(const ConfigKernels& config, const KvCache& kv) {
  for (const RowKernels& rows : config.rows)
    if (rows.format == kv.format && rows.rope == kv.rope && kv.latent == 512) return &rows;
  return nullptr;
}

Choice choose_for(const RowKernels& rows, const Workload& workload) {
  std::array<TileShape, kMostTiles> shapes;
  for (std::size_t i = 0; i < rows.tiles().size(); ++i) shapes[i] = rows.tile[i].shape;
  return choose({shapes.data(), rows.tiles().size()}, workload);
}

// The workspace: tickets, a flag for bad indices, the plan of unequal parts, log2 of the partial sums, partial results.
struct Layout {
  std::int64_t flag, plan, log2, partial, bytes;
};
Layout layout(std::int64_t heads) {
  const auto aligned = [](std::int64_t n) { return cuda::ceil_div(n, kWorkspaceAlign) * kWorkspaceAlign; };
  const std::int64_t flag = cuda::kTicketBytes, plan = flag + kWorkspaceAlign,
                     log2 = plan + aligned(kUnevenUnits * std::int64_t{sizeof(UnitParts)}),
                     partial = log2 + aligned(heads * 4);
  return {flag, plan, log2, partial, partial + heads * kHeadBytes};
}

// A base and all strides but the last are multiples of 16 bytes, the last dimension is contiguous.
base::Lack misplaced(const TensorView& view, const char* name) {
  return view.elements() == 0 ? "" : cuda::first_of({cuda::misplaced(view, name), cuda::spread(view, name)});
}

base::Lack not_contiguous(const TensorView& view, const char* name) {
  return view && view.dim(0) > 1 && view.step(0) != 1 ? base::Lack(name) + " must be contiguous" : base::Lack("");
}

// Tokens of a request and whether they share a list, in which case they are folded into heads.
struct Units {
  std::int64_t units, fold;
};
Units units_of(const AttentionArgs& args) {
  const std::int64_t tokens = args.q.dim(0);
  if (const auto* slots = std::get_if<Slots>(&args.rows)) {
    const TensorView& i = slots->indices;
    const bool shared = i.rank == 3 && i.dim(1) > 1 && i.step(1) == 0;
    return shared ? Units{i.dim(0), i.dim(1)} : Units{tokens, 1};
  }
  const std::int64_t requests = std::get<BlockTable>(args.rows).table.dim(0);
  return {requests, requests > 0 ? tokens / requests : 1};
}

CudaParams params_of(const AttentionArgs& args, Units units) {
  CudaParams p{};
  const TensorView& q = args.q;
  p.q = q.data, p.q_token = q.step(0), p.q_head = q.step(1);
  if (args.q_rope)
    p.q_rope = args.q_rope.data, p.q_rope_token = args.q_rope.step(0), p.q_rope_head = args.q_rope.step(1);
  else
    p.q_rope = static_cast<const bf16*>(q.data) + args.kv.latent, p.q_rope_token = p.q_token, p.q_rope_head = p.q_head;

  const TensorView& pages = args.kv.pages;
  const std::int64_t size = size_of(pages.dtype);
  p.rows = static_cast<const unsigned char*>(pages.data);
  p.page_bytes = pages.step(0) * size, p.row_bytes = pages.step(1) * size;
  p.slots = args.kv.slots(), p.pages = pages.dim(0);
  const int page_size = static_cast<int>(args.kv.page_size());
  if (page_size == 1) p.row_bytes = p.page_bytes;
  else if (p.page_bytes != page_size * p.row_bytes) p.page = divider(page_size);

  if (const auto* slots = std::get_if<Slots>(&args.rows)) {
    const TensorView& i = slots->indices;
    p.indices = i.data, p.wide_indices = i.dtype == DType::i64;
    const bool folded = i.rank == 3;
    p.unit_tokens = folded && units.fold == 1 ? static_cast<int>(i.dim(1)) : 1;
    p.index_request = i.step(0), p.index_token = folded ? i.step(1) : 0, p.index_lane = i.step(i.rank - 1);
    p.lanes = static_cast<int>(i.dim(i.rank - 1));
    if (slots->topk_length) p.topk_length = static_cast<const int*>(slots->topk_length.data);
  } else {
    const BlockTable& blocks = std::get<BlockTable>(args.rows);
    p.table = static_cast<const int*>(blocks.table.data), p.table_request = blocks.table.step(0);
    p.table_pages = static_cast<int>(blocks.table.dim(1)), p.table_page = divider(page_size);
    p.lanes = static_cast<int>(std::min<std::int64_t>(std::int64_t{p.table_pages} * page_size, INT32_MAX / 2));
    p.lengths = static_cast<const int*>(blocks.lengths.data);
  }

  p.units = static_cast<int>(units.units), p.fold = static_cast<int>(units.fold), p.heads = static_cast<int>(q.dim(1));
  p.read_once = !p.indices || units.units * p.lanes <= p.slots;
  p.scale_log2 = args.scale * kLog2e;
  p.slack = args.round_weights ? 0.f : 8.f, p.heavy = args.round_weights ? 0x1p-100f : 16.f;
  p.sink = static_cast<const float*>(args.sink.data);
  p.out = args.out.data, p.out_f32 = args.out.dtype == DType::f32;
  p.out_token = args.out.step(0), p.out_head = args.out.step(1);
  p.lse = static_cast<float*>(args.lse.data), p.lse_token = args.lse.step(0), p.lse_head = args.lse.step(1);
  return p;
}

}  // namespace

base::Lack attention_cuda_lacks(const AttentionArgs& args) {
  if (args.kv.format == KvFormat::f32) return "the cache must be bf16 or fp8";
  if (args.kv.latent != 512 || (args.kv.rope != 0 && args.kv.rope != 64))
    return "a row must be latent 512 and rope 64 or 0";
  if (args.q.dtype != DType::bf16) return "q must be bf16";
  if (args.q.dim(0) * args.q.dim(1) > cuda::kMost) return "tokens * heads must be at most 2^30";
  if (args.kv.page_size() > cuda::kMost) return "a page must hold at most 2^30 rows";
  const base::Lack fault =
      cuda::first_of({misplaced(args.q, "q"), misplaced(args.q_rope, "q_rope"), misplaced(args.kv.pages, "kv.pages"),
                      misplaced(args.out, "out"), not_contiguous(args.sink, "sink")});
  if (!fault.empty()) return fault;
  if (const auto* slots = std::get_if<Slots>(&args.rows)) {
    if (slots->indices.dim(slots->indices.rank - 1) > cuda::kMost) return "topk must be at most 2^30";
    return not_contiguous(slots->topk_length, "topk_length");
  }
  const BlockTable& blocks = std::get<BlockTable>(args.rows);
  if (blocks.table.dim(1) > 1 && blocks.table.step(1) != 1) return "a row of the block table must be contiguous";
  return not_contiguous(blocks.lengths, "lengths");
}

std::int64_t attention_cuda_bytes(const Backend&, const AttentionBounds& bounds) {
  return layout(partial_heads(bounds.tokens, bounds.heads, bounds.lanes)).bytes;
}

void attention_cuda(const AttentionArgs& args, const base::Exec& exec) {
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  const ConfigKernels& config = cuda::kernels_for(context, config_kernels());
  const RowKernels& rows = *rows_of(config, args.kv);
  const Units units = units_of(args);
  CudaParams p = params_of(args, units);

  const bool dense = std::holds_alternative<BlockTable>(args.rows);
  const Choice choice = choose_for(rows, {units.units, units.fold * p.heads, p.lanes, dense, args.batch_invariant,
                                          context.multiprocessors, context.clusters});
  p.parts = choice.parts, p.target = choice.target, p.merge = choice.merge;

  char* const space = static_cast<char*>(exec.workspace.data);
  const std::int64_t tile_heads = rows.tile[choice.tile].shape.heads;
  const Layout at = layout(partial_items(choice) * choice.groups * tile_heads);
  p.tickets = reinterpret_cast<unsigned*>(space);
  p.unit_parts = reinterpret_cast<UnitParts*>(space + at.plan);
  p.partial_log2 = reinterpret_cast<float*>(space + at.log2);
  p.partial = reinterpret_cast<float*>(space + at.partial);

  const auto stream = static_cast<cudaStream_t>(exec.stream.handle);
  int* const flag = reinterpret_cast<int*>(space + at.flag);
  if (args.check_indices) {
    p.bad_index = flag;
    cuda::check(cudaMemsetAsync(flag, 0, sizeof(int), stream), "attention");
  }
  const TileKernel& tile = rows.tile[choice.tile];
  int groups = static_cast<int>(choice.groups), heads = tile.shape.heads;
  void* arguments[] = {&p, &groups, &heads};
  const bool early = cuda::starts_early(config.sm);
  const auto start = [&](std::int64_t items, int cluster) {
    const std::int64_t ctas = items * groups;
    const int smem = ctas <= context.multiprocessors ? std::max(tile.smem_bytes, config.alone_bytes) : tile.smem_bytes;
    cuda::launch(tile.kernel, {ctas, tile.threads, smem, 1, cluster, early}, stream, arguments, "attention");
  };
  if (choice.beside > 0) p.launch = Launch::first;
  start(choice.items, choice.merge == Merge::cluster ? p.parts : 1);
  if (choice.beside > 0) {  // behind the clusters, whose places its CTAs would take
    p.launch = Launch::second, p.first_unit = p.units - static_cast<int>(choice.beside);
    p.parts = choice.beside_parts, p.merge = Merge::together;
    start(choice.beside * p.parts, 1);
  }
  if (choice.merge == Merge::kernel) {
    const std::int64_t all_heads = std::int64_t{p.units} * p.fold * p.heads;
    cuda::launch(config.merge, {all_heads, kMergeThreads, 0, merge_rows(all_heads, context.multiprocessors), 1, early},
                 stream, arguments, "attention");
  }
  if (args.check_indices) {  // debug mode may wait
    int bad = 0;
    cuda::check(cudaMemcpyAsync(&bad, flag, sizeof bad, cudaMemcpyDeviceToHost, stream), "attention");
    cuda::check(cudaStreamSynchronize(stream), "attention");
    expects(bad == 0, "with check_indices a slot or page must be -1 or inside the cache", "attention: rows",
            "one outside");
  }
}

void attention_cuda_prepare(int config_sm) {
  for (const ConfigKernels& config : config_kernels()) {
    if (config.sm != config_sm) continue;
    for (const RowKernels& rows : config.rows)
      for (const TileKernel& tile : rows.tiles())
        cuda::load_kernel(tile.kernel, std::max(tile.smem_bytes, config.alone_bytes));
    cuda::load_kernel(config.merge, 0);
  }
}

}  // namespace sievemla::stage::attention
