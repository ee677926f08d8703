// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cuda/kv.cc -- writers and gatherers of caches on CUDA, host side.
#include <cstdint>

#include "cuda/context.cuh"
#include "cuda/layout.h"
#include "kv/cuda/kernels.h"
#include "kv/registry.h"

namespace sievemla::kv {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 30;

base::Lack lacks(const KvCache& cache, std::int64_t rows) {
  if (cache.format == KvFormat::f32) return "the cache must be bf16 or fp8";
  if (rows > kMost || cache.page_size() > kMost) return "rows and page size must be at most 2^30";
  return cuda::misplaced(cache.pages, "the cache");
}

cuda::SlotList slots_of(const TensorView& view) { return {view.data, view.dtype == DType::i64, view.step(0)}; }

cuda::Pages cache_of(const TensorView& pages, std::int64_t slots) {
  const std::int64_t size = size_of(pages.dtype);
  return {static_cast<unsigned char*>(pages.data), pages.step(0) * size, pages.step(1) * size, slots,
          static_cast<int>(pages.dim(1))};
}

LatentParams params_of(const KvCache& cache, const TensorView& slots, const TensorView& rows) {
  LatentParams p{};
  p.at = slots_of(slots), p.cache = cache_of(cache.pages, cache.slots()), p.format = cache.format;
  p.latent = cache.latent, p.rope = cache.rope;
  p.latents = rows.data, p.f32 = rows.dtype == DType::f32, p.latents_row = rows.step(0);
  return p;
}

template <class Params>
void launch(const base::Exec& exec, const void* ConfigKernels::* kernel, std::int64_t rows, Params p,
            const char* where) {
  if (rows == 0) return;
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  void* arguments[] = {&p};
  cuda::launch(cuda::kernels_for(context, config_kernels()).*kernel, rows, kRowThreads, 0,
               static_cast<cudaStream_t>(exec.stream.handle), arguments, where);
}

}  // namespace

base::Lack write_latent_cuda_lacks(const WriteLatentArgs& args) { return lacks(args.cache, args.slots.dim(0)); }

void write_latent_cuda(const WriteLatentArgs& args, const base::Exec& exec) {
  LatentParams p = params_of(args.cache, args.slots, args.latent);
  if (args.cache.rope > 0) p.ropes = args.rope.data, p.ropes_row = args.rope.step(0);
  p.rule = args.scale;
  launch(exec, &ConfigKernels::write_latent, args.slots.dim(0), p, "write_latent");
}

base::Lack gather_latent_cuda_lacks(const GatherLatentArgs& args) { return lacks(args.cache, args.slots.dim(0)); }

void gather_latent_cuda(const GatherLatentArgs& args, const base::Exec& exec) {
  launch(exec, &ConfigKernels::gather_latent, args.slots.dim(0), params_of(args.cache, args.slots, args.out),
         "gather_latent");
}

base::Lack gather_index_keys_cuda_lacks(const GatherIndexKeysArgs& args) {
  if (args.cache.format != IndexFormat::fp8) return "the cache must be fp8";
  if (args.slots.dim(0) > kMost || args.cache.page_size() > kMost) return "rows and page size must be at most 2^30";
  return cuda::misplaced(args.cache.pages, "the cache", 1);  // the rows of an fp8 page are not what its shape says
}

void gather_index_keys_cuda(const GatherIndexKeysArgs& args, const base::Exec& exec) {
  IndexGatherParams p{};
  p.at = slots_of(args.slots), p.cache = cache_of(args.cache.pages, args.cache.slots());
  p.cache.row_bytes = kIndexDim;
  p.key_bytes = kIndexDim, p.scaled = true;
  p.keys = static_cast<unsigned char*>(args.keys.data), p.keys_row = args.keys.step(0);
  p.scales = static_cast<float*>(args.scales.data), p.scales_step = args.scales.step(0);
  launch(exec, &ConfigKernels::gather_index_keys, args.slots.dim(0), p, "gather_index_keys");
}

void kv_cuda_prepare(int config_sm) {
  for (const ConfigKernels& kernels : config_kernels())
    if (kernels.sm == config_sm)
      for (const void* kernel : {kernels.write_latent, kernels.gather_latent, kernels.gather_index_keys})
        cuda::load_kernel(kernel, 0);
}

}  // namespace sievemla::kv
