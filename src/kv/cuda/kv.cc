// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cuda/kv.cc -- writers and gatherers of caches on CUDA, host side.
#include <cstdint>

#include "cuda/context.cuh"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "kv/cuda/kernels.h"
#include "kv/registry.h"

namespace sievemla::kv {
namespace {

template <class Params>
void launch(const base::Exec& exec, const void* ConfigKernels::* kernel, std::int64_t rows, Params p,
            const char* where) {
  if (rows == 0) return;
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  const ConfigKernels& kernels = cuda::kernels_for(context, config_kernels());
  void* arguments[] = {&p};
  cuda::launch(kernels.*kernel,
               {.ctas = rows, .threads = cuda::kRowThreads, .smem_bytes = 0, .early = cuda::starts_early(kernels.sm)},
               static_cast<cudaStream_t>(exec.stream.handle), arguments, where);
}

}  // namespace

base::Lack write_latent_cuda_lacks(const WriteLatentArgs& args) {
  return cuda::latent_lacks(args.cache, args.slots.dim(0));
}

void write_latent_cuda(const WriteLatentArgs& args, const base::Exec& exec) {
  launch(exec, &ConfigKernels::write_latent, args.slots.dim(0), cuda::latent_params(args), "write_latent");
}

base::Lack gather_latent_cuda_lacks(const GatherLatentArgs& args) {
  return cuda::latent_lacks(args.cache, args.slots.dim(0));
}

void gather_latent_cuda(const GatherLatentArgs& args, const base::Exec& exec) {
  launch(exec, &ConfigKernels::gather_latent, args.slots.dim(0), cuda::latent_params(args.cache, args.slots, args.out),
         "gather_latent");
}

base::Lack gather_index_keys_cuda_lacks(const GatherIndexKeysArgs& args) {
  if (args.cache.format != IndexFormat::fp8) return "the cache must be fp8";
  if (args.slots.dim(0) > cuda::kMost || args.cache.page_size() > cuda::kMost)
    return "rows and page size must be at most 2^30";
  return cuda::misplaced(args.cache.pages, "the cache", 1);  // the rows of an fp8 page are not what its shape says
}

void gather_index_keys_cuda(const GatherIndexKeysArgs& args, const base::Exec& exec) {
  IndexGatherParams p{};
  p.at = cuda::slots_of(args.slots), p.cache = cuda::cache_of(args.cache.pages);
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
