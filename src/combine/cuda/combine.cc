// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/cuda/combine.cc -- stage 4 on CUDA, host side: what a call lacks, the launch.
#include "combine/cuda/kernels.h"
#include "combine/registry.h"
#include "cuda/context.cuh"
#include "cuda/layout.h"

namespace sievemla::stage::combine {

base::Lack combine_cuda_lacks(const CombineArgs& args) {
  const std::int64_t tokens = args.out.dim(0), heads = args.out.dim(1);
  return heads > 0 && tokens > cuda::kMost / heads ? "tokens * heads must be at most 2^30" : "";
}

void combine_cuda(const CombineArgs& args, const base::Exec& exec) {
  CudaParams p{};
  const TensorView& parts = args.partial_out;
  p.parts = parts.dim(0), p.heads = parts.dim(2), p.width = parts.dim(3);
  p.partial_out = parts.data, p.partial_f32 = parts.dtype == DType::f32;
  p.partial_part = parts.step(0), p.partial_token = parts.step(1), p.partial_head = parts.step(2);
  const TensorView& scores = args.partial_lse;
  p.partial_lse = static_cast<const float*>(scores.data);
  p.lse_part = scores.step(0), p.lse_token = scores.step(1), p.lse_head = scores.step(2);
  p.sink = static_cast<const float*>(args.sink.data), p.sink_step = args.sink.step(0);
  p.out = args.out.data, p.out_f32 = args.out.dtype == DType::f32;
  p.out_token = args.out.step(0), p.out_head = args.out.step(1), p.out_step = args.out.step(2);
  p.lse = static_cast<float*>(args.lse.data), p.out_lse_token = args.lse.step(0), p.out_lse_head = args.lse.step(1);

  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  void* arguments[] = {&p};
  cuda::launch(cuda::kernels_for(context, config_kernels()).combine, parts.dim(1) * p.heads, kThreads, 0,
               static_cast<cudaStream_t>(exec.stream.handle), arguments, "combine");
}

void combine_cuda_prepare(int config_sm) {
  for (const ConfigKernels& kernels : config_kernels())
    if (kernels.sm == config_sm) cuda::load_kernel(kernels.combine, 0);
}

}  // namespace sievemla::stage::combine
