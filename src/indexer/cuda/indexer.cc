// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/indexer.cc -- stage 1 on CUDA, host side: what a call lacks, which kernel, the launch.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "cuda/context.cuh"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "indexer/cuda/kernels.h"
#include "indexer/registry.h"
#include "kv/index_page.h"

namespace sievemla::stage::indexer {
namespace {

using cuda::first_of, cuda::kMost, cuda::misplaced, cuda::spread;

constexpr std::int64_t kMostFillCtas = 1024;  // of rows of indices beyond the tokens

// The rows of an fp8 page are not what its shape says.
base::Lack misplaced(const IndexCache& cache) {
  return misplaced(cache.pages, "the cache", cache.format == IndexFormat::fp8 ? 1 : TensorView::kMaxRank);
}

// Within a few rows places are 32-bit offsets.
base::Lack far_apart(const TensorView& view, const char* name) {
  for (int i = 0; i < view.rank; ++i)
    if (view.dim(i) > 1 && view.step(i) > kMost / 2) return base::Lack(name) + " must have steps of at most 2^29";
  return "";
}

CudaRope rope_of(const Rope& rope) {
  CudaRope r{};
  r.style = rope.style;
  if (rope.style == RopeStyle::none) return r;
  r.positions = rope.positions.data, r.wide = rope.positions.dtype == DType::i64;
  r.positions_step = rope.positions.step(0);
  r.cos_sin = rope.cos_sin.data, r.f32 = rope.cos_sin.dtype == DType::f32, r.most = rope.cos_sin.dim(0);
  r.table_row = rope.cos_sin.step(0), r.table_step = rope.cos_sin.step(1);
  return r;
}

CudaScoreParams params_of(const IndexScoreArgs& args) {
  CudaScoreParams p{};
  p.q = static_cast<const unsigned char*>(args.q.data), p.q_row = args.q.step(0), p.q_head = args.q.step(1);
  p.weights = static_cast<const float*>(args.weights.data), p.weights_row = args.weights.step(0);
  const std::int64_t rows = args.q.dim(0);
  p.page_size = 16, p.page_shift = 4;
  if (const ContiguousKeys& c = args.contiguous; c.keys) {
    p.keys = static_cast<const unsigned char*>(c.keys.data), p.page_bytes = c.keys.step(0);
    p.scales = static_cast<const float*>(c.scales.data), p.n = c.keys.dim(0);
    if (c.starts) p.source = static_cast<const int*>(c.starts.data);
  } else {
    const cuda::Pages cache = cuda::cache_of(args.paged.cache.pages);
    p.keys = cache.pages, p.page_bytes = cache.page_bytes, p.page_size = cache.page_size;
    p.page_shift = std::has_single_bit(static_cast<unsigned>(p.page_size))
                       ? std::countr_zero(static_cast<unsigned>(p.page_size))
                       : -1;
    p.pages = static_cast<int>(args.paged.cache.pages.dim(0));
    const TensorView& table = args.paged.block_table;
    p.table = static_cast<const int*>(table.data), p.table_row = table.step(0);
    p.requests = static_cast<int>(table.dim(0));
    p.table_pages = static_cast<int>(std::min(table.dim(1), kMost));
    if (args.paged.row_request) p.source = static_cast<const int*>(args.paged.row_request.data);
    p.rows_per_source = p.requests > 0 ? static_cast<int>(std::max<std::int64_t>(rows / p.requests, 1)) : 1;
  }
  p.lengths = static_cast<const int*>(args.lengths.data);
  p.rows = static_cast<int>(rows), p.heads = static_cast<int>(args.q.dim(1));
  p.logits = static_cast<float*>(args.logits.data), p.logits_row = args.logits.step(0);
  p.width = static_cast<int>(args.logits.dim(1)), p.fill = args.fill, p.stride = 1;
  return p;
}

WriteKeysParams params_of(const WriteIndexKeysArgs& args) {
  WriteKeysParams p{};
  p.at = cuda::slots_of(args.slots), p.cache = cuda::cache_of(args.cache.pages);
  p.fp8 = args.cache.format == IndexFormat::fp8, p.rule = args.scale, p.floor = kv::kIndexKeyFloor;
  p.tokens = args.k.dim(0);
  p.k = args.k.data, p.k_f32 = args.k.dtype == DType::f32, p.k_row = args.k.step(0), p.k_step = args.k.step(1);
  p.weight = args.norm_weight.data, p.weight_f32 = args.norm_weight.dtype == DType::f32;
  p.weight_step = args.norm_weight.step(0);
  p.bias = args.norm_bias.data, p.bias_f32 = args.norm_bias.dtype == DType::f32, p.bias_step = args.norm_bias.step(0);
  p.eps = args.norm_eps, p.rope = rope_of(args.rope), p.hadamard = args.hadamard, p.round_bf16 = args.round_bf16;
  return p;
}

void launch(const base::Exec& exec, const cuda::Context& context, const void* kernel, const cuda::LaunchShape& shape,
            void** arguments, const char* where) {
  const cuda::CurrentDevice current(context.device);
  cuda::launch(kernel, shape, static_cast<cudaStream_t>(exec.stream.handle), arguments, where);
}

void launch_held(const base::Exec& exec, const cuda::Context& context, const HeldKernel& held, CudaScoreParams& p) {
  const auto start = [&](std::int64_t ctas, int second) {
    void* arguments[] = {&p, &second};
    launch(exec, context, held.kernel,
           {.ctas = ctas, .threads = held.threads, .smem_bytes = held.smem_bytes, .early = held.keys == 0}, arguments,
           "index_scores");
  };
  if (held.keys == 0) {
    for (int row = 0; row < p.rows; row += held.rows) start(context.multiprocessors, row);
    return;
  }
  const int key_blocks = cuda::ceil_div(p.width, held.keys);
  start(std::int64_t{key_blocks} * cuda::ceil_div(p.rows, held.rows), key_blocks);
}

const cuda::Context& context_of(const base::Exec& exec) { return cuda::prepared_context(exec.backend.device().index); }

// A kernel of heads.cuh: a warp a head.
template <class Params>
void launch_heads(const base::Exec& exec, const void* ConfigKernels::* kernel, std::int64_t heads, Params& p,
                  const char* where) {
  const cuda::Context& context = context_of(exec);
  const ConfigKernels& kernels = cuda::kernels_for(context, config_kernels());
  void* arguments[] = {&p};
  launch(exec, context, kernels.*kernel,
         {.ctas = cuda::ceil_div<std::int64_t>(heads, kHeadWarps),
          .threads = 32 * kHeadWarps,
          .smem_bytes = 0,
          .early = cuda::starts_early(kernels.sm)},
         arguments, where);
}

}  // namespace

base::Lack index_scores_cuda_lacks(const IndexScoreArgs& args) {
  if (args.q.dtype != DType::u8) return "q must be u8 (e4m3)";
  if (args.q.dim(1) > kMostHeads) return "there must be at most 64 heads";
  if (args.q.dim(0) > kMost || args.logits.dim(1) > kMost) return "rows and width must be at most 2^30";
  if (args.q.dim(0) * args.logits.dim(1) > std::int64_t{1} << 36) return "rows times width must be at most 2^36";
  const base::Lack far = first_of({far_apart(args.q, "q"), far_apart(args.weights, "weights")});
  if (!far.empty()) return far;
  if (args.contiguous.keys) {
    if (args.contiguous.keys.dim(0) == 0) return "there must be a key";
    return first_of({misplaced(args.q, "q"), spread(args.weights, "weights"), spread(args.lengths, "lengths"),
                     misplaced(args.contiguous.keys, "keys"), spread(args.contiguous.scales, "scales"),
                     spread(args.contiguous.starts, "starts")});
  }
  const IndexCache& cache = args.paged.cache;
  if (cache.page_size() % 16 != 0) return "the page size must be a multiple of 16";
  if (cache.page_size() > kMost || cache.pages.dim(0) > kMost) return "pages and their size must be at most 2^30";
  if (cache.pages.dim(0) == 0 || args.paged.block_table.elements() == 0) return "the cache must have a page";
  return first_of({misplaced(args.q, "q"), spread(args.weights, "weights"), spread(args.lengths, "lengths"),
                   misplaced(cache), spread(args.paged.block_table, "the block table"),
                   spread(args.paged.row_request, "row_request")});
}

void index_scores_cuda(const IndexScoreArgs& args, const base::Exec& exec) {
  CudaScoreParams p = params_of(args);
  if (p.rows == 0 || p.width == 0) return;
  const cuda::Context& context = context_of(exec);
  const ConfigKernels& kernels = cuda::kernels_for(context, config_kernels());
  // Rows that share keys: known where they are dealt evenly.
  const int rows_each = p.table ? p.rows_per_source : p.rows;
  const bool many_heads = p.heads > 32;
  int fold = p.source ? 1 : rows_each;
  const PassKernel& pass = kernels.pass[fold > 1][many_heads];
  const int columns = columns_of(p.heads, std::min(fold, kMostFold));
  if (rows_each <= kMostFold && columns <= pass.most_columns) {
    void* arguments[] = {&p, &fold};
    launch(exec, context, pass.kernel,
           {.ctas = std::int64_t{pass.ctas} * context.multiprocessors,
            .threads = pass.threads,
            .smem_bytes = pass.smem_bytes(columns),
            .early = cuda::starts_early(kernels.sm)},
           arguments, "index_scores");
    return;
  }
  launch_held(exec, context, kernels.held[many_heads], p);
}

base::Lack index_shortlist_cuda_lacks(const IndexShortlistArgs& args) {
  const cuda::Context& context = cuda::context(args.score.q.device.index);
  if (!cuda::kernels_for(context, config_kernels()).shortlist[0].kernel) return "the device's scorer makes none";
  if (args.score.logits.dim(1) > 1 << kPositionBits) return "rows are too long";
  return index_scores_cuda_lacks(args.score);
}

void index_shortlist_cuda(const IndexShortlistArgs& args, const base::Exec& exec) {
  CudaScoreParams p = params_of(args.score);
  const cuda::Context& context = context_of(exec);
  const ConfigKernels& kernels = cuda::kernels_for(context, config_kernels());
  const bool many_heads = p.heads > 32;
  p.shortlists = args.rows;
  if (args.sample) {
    p.logits = reinterpret_cast<float*>(args.rows->of), p.logits_row = sizeof(base::Shortlist) / sizeof(float);
    p.stride = static_cast<int>(base::sample_stride(p.width));
  }
  launch_held(exec, context, (args.sample ? kernels.held : kernels.shortlist)[many_heads], p);
}

base::Lack write_index_keys_cuda_lacks(const WriteIndexKeysArgs& args) {
  if (args.cache.format == IndexFormat::f32) return "the cache must be fp8 or bf16";
  if (args.cache.page_size() > kMost) return "a page must hold at most 2^30 keys";
  return misplaced(args.cache);
}

void write_index_keys_cuda(const WriteIndexKeysArgs& args, const base::Exec& exec) {
  WriteKeysParams p = params_of(args);
  if (p.tokens == 0) return;
  launch_heads(exec, &ConfigKernels::write_keys, p.tokens, p, "write_index_keys");
}

base::Lack write_layer_cuda_lacks(const WriteLayerArgs& args) {
  if (args.indices && (args.indices.dim(0) > kMost || args.indices.dim(1) > kMost))
    return "rows and width of indices must be at most 2^30";
  return first_of({cuda::latent_lacks(args.latent.cache, args.latent.slots.dim(0)),
                   args.keys.k ? write_index_keys_cuda_lacks(args.keys) : base::Lack("")});
}

void write_layer_cuda(const WriteLayerArgs& args, const base::Exec& exec) {
  WriteLayerParams p{};
  p.latent = cuda::latent_params(args.latent), p.tokens = args.latent.slots.dim(0);
  p.weight = args.latent_weight.data, p.weight_f32 = args.latent_weight.dtype == DType::f32;
  p.weight_step = args.latent_weight.step(0), p.eps = args.latent_eps, p.rope = rope_of(args.rope);
  if (args.keys.k) p.keys = params_of(args.keys);
  if (args.indices) {
    p.indices = static_cast<int*>(args.indices.data), p.index_rows = args.indices.dim(0);
    p.index_row = args.indices.step(0), p.index_width = static_cast<int>(args.indices.dim(1));
  }
  const std::int64_t ctas = std::max(p.tokens, std::min<std::int64_t>(p.index_rows, kMostFillCtas));
  if (ctas == 0) return;
  const cuda::Context& context = context_of(exec);
  void* arguments[] = {&p};
  launch(exec, context, cuda::kernels_for(context, config_kernels()).write_layer,
         {.ctas = ctas, .threads = kLayerThreads, .smem_bytes = 0}, arguments, "write_layer");
}

base::Lack index_queries_cuda_lacks(const IndexQueryArgs& args) {
  if (args.out_q.dtype == DType::f32) return "out_q must be u8 (e4m3) or bf16";
  return "";
}

void index_queries_cuda(const IndexQueryArgs& args, const base::Exec& exec) {
  QueryParams p{};
  p.tokens = args.q.dim(0), p.heads = args.q.dim(1);
  if (args.keys.k) p.keys = params_of(args.keys);
  if (p.tokens + p.keys.tokens == 0) return;
  p.q = args.q.data, p.q_f32 = args.q.dtype == DType::f32;
  p.q_token = args.q.step(0), p.q_head = args.q.step(1), p.q_step = args.q.step(2);
  p.weights = args.weights.data, p.weights_f32 = args.weights.dtype == DType::f32;
  p.weights_token = args.weights.step(0), p.weights_head = args.weights.step(1);
  p.weight_scale = args.weight_scale, p.rope = rope_of(args.rope);
  p.hadamard = args.hadamard, p.round_bf16 = args.round_bf16;
  p.rule = args.scale, p.floor = kv::kIndexQueryFloor, p.fp8 = args.out_q.dtype == DType::u8;
  p.out = args.out_q.data, p.out_token = args.out_q.step(0), p.out_head = args.out_q.step(1);
  p.out_weights = static_cast<float*>(args.out_weights.data);
  p.out_weights_token = args.out_weights.step(0), p.out_weights_head = args.out_weights.step(1);
  launch_heads(exec, &ConfigKernels::queries, p.tokens * p.heads + p.keys.tokens, p, "index_queries");
}

void indexer_cuda_prepare(int config_sm) {
  for (const ConfigKernels& kernels : config_kernels()) {
    if (kernels.sm != config_sm) continue;
    for (const auto& some : {std::span(kernels.held), std::span(kernels.shortlist)})
      for (const HeldKernel& held : some)
        if (held.kernel) cuda::load_kernel(held.kernel, held.smem_bytes);
    for (const auto& some : kernels.pass)
      for (const PassKernel& pass : some) cuda::load_kernel(pass.kernel, pass.smem_bytes(pass.most_columns));
    cuda::load_kernel(kernels.write_keys, 0);
    cuda::load_kernel(kernels.write_layer, 0);
    cuda::load_kernel(kernels.queries, 0);
  }
}

}  // namespace sievemla::stage::indexer
