// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/cuda_memory.h -- a call's host tensors, copied to a CUDA device and back.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda/memory.h"
#include "sievemla/sievemla.h"

namespace sievemla::test {

inline void cuda_good(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class OnDevice : public cuda::Copies {
 public:
  using Copies::Copies;
  using Copies::put;
  AttentionArgs put(AttentionArgs args) {
    put_all(args.q, args.q_rope, args.kv.pages, args.sink, args.out, args.lse);
    if (Slots* slots = std::get_if<Slots>(&args.rows)) put_all(slots->indices, slots->topk_length);
    if (BlockTable* blocks = std::get_if<BlockTable>(&args.rows)) put_all(blocks->table, blocks->lengths);
    return args;
  }
  WriteLatentArgs put(WriteLatentArgs args) {
    put_all(args.latent, args.rope, args.slots, args.cache.pages);
    return args;
  }
  WriteIndexKeysArgs put(WriteIndexKeysArgs args) {
    put_all(args.k, args.norm_weight, args.norm_bias, args.rope.positions, args.rope.cos_sin, args.slots,
            args.cache.pages);
    return args;
  }
  IndexQueryArgs put(IndexQueryArgs args) {
    put_all(args.q, args.weights, args.rope.positions, args.rope.cos_sin, args.out_q, args.out_weights);
    return args;
  }
  IndexScoreArgs put(IndexScoreArgs args) {
    put_all(args.q, args.weights, args.paged.cache.pages, args.paged.block_table, args.paged.row_request,
            args.contiguous.keys, args.contiguous.scales, args.contiguous.starts, args.lengths, args.logits);
    return args;
  }
  TopkArgs put(TopkArgs args) {
    put_all(args.scores, args.starts, args.lengths, args.positions, args.slots, args.map.block_table,
            args.map.row_request);
    return args;
  }
  CombineArgs put(CombineArgs args) {
    put_all(args.partial_out, args.partial_lse, args.sink, args.out, args.lse);
    return args;
  }

 private:
  template <class... Views>
  void put_all(Views&... views) {
    ((views = put(views)), ...);
  }
};

// A workspace full of 0xA5, then initialised.
class CudaWorkspace {
 public:
  CudaWorkspace(const Backend& backend, std::int64_t bytes) : view_{nullptr, bytes} {
    cuda_good(cudaMalloc(&view_.data, static_cast<std::size_t>(bytes)));
    cuda_good(cudaMemset(view_.data, 0xA5, static_cast<std::size_t>(bytes)));
    workspace_init(backend, view_);
  }
  CudaWorkspace(const CudaWorkspace&) = delete;
  ~CudaWorkspace() { cudaFree(view_.data); }
  operator Workspace() const { return view_; }

 private:
  Workspace view_;
};

}  // namespace sievemla::test
