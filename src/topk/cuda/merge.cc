// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/merge.cc -- context_parallel.h on CUDA, host side: what a call lacks, the launches.
#include "topk/merge.h"

#include <cstdint>

#include "cuda/context.cuh"
#include "cuda/launch.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/slot_map.h"

namespace sievemla::stage::topk {
namespace {

using cuda::first_of, cuda::spread;

void launch(const void* ConfigKernels::* kernel, std::int64_t ctas, void* params, const base::Exec& exec,
            const char* where) {
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  cuda::launch(cuda::kernels_for(context, config_kernels()).*kernel, ctas, kIdThreads, 0,
               static_cast<cudaStream_t>(exec.stream.handle), &params, where);
}

void order(const MergeTopkArgs& args, const MergeChunk& chunk, const base::Exec& exec) {
  OrderParams p{static_cast<int>(chunk.first),
                static_cast<int>(args.scores.dim(0)),
                static_cast<int>(args.scores.dim(2)),
                static_cast<const float*>(args.scores.data),
                args.scores.step(0),
                args.scores.step(1),
                static_cast<const int*>(args.positions.data),
                args.positions.step(0),
                args.positions.step(1),
                args.lengths ? static_cast<const int*>(args.lengths.data) : nullptr,
                args.lengths.step(0),
                static_cast<float*>(chunk.scores.data),
                static_cast<int*>(chunk.positions.data),
                chunk.positions.step(0),
                static_cast<int*>(chunk.lengths.data)};
  launch(&ConfigKernels::order, chunk.scores.dim(0) * p.ranks * pieces_of(p.n), &p, exec, "merge_topk");
}

void pick(const MergeTopkArgs& args, const MergeChunk& chunk, const base::Exec& exec) {
  const MergeTopkBounds bounds = bounds_of(args);
  PickParams p{static_cast<int>(chunk.first),
               static_cast<int>(bounds.k),
               static_cast<const int*>(chunk.columns.data),
               chunk.columns.step(0),
               static_cast<const int*>(chunk.positions.data),
               chunk.positions.step(0),
               ids_of(args.selected, args.slots, args.map, bounds.rows),
               args.counts ? static_cast<int*>(args.counts.data) : nullptr};
  launch(&ConfigKernels::pick, chunk.scores.dim(0), &p, exec, "merge_topk");
}

}  // namespace

base::Lack topk_candidates_cuda_lacks(const CandidatesArgs& args) {
  if (args.local.dim(0) > kMost || args.local.dim(1) > kMost) return "rows and k must be at most 2^30";
  return first_of({spread(args.starts, "starts"), spread(args.local, "local"),
                   spread(args.selected_scores, "selected_scores"), spread(args.positions, "positions")});
}

void topk_candidates_cuda(const CandidatesArgs& args, const base::Exec& exec) {
  CandidatesParams p{static_cast<const float*>(args.scores.data),
                     args.scores.step(0),
                     static_cast<int>(args.scores.dim(1)),
                     args.starts ? static_cast<const int*>(args.starts.data) : nullptr,
                     static_cast<const int*>(args.local.data),
                     args.local.step(0),
                     static_cast<int>(args.local.dim(1)),
                     args.shard.rank,
                     args.shard.ranks,
                     args.shard.interleave,
                     static_cast<float*>(args.selected_scores.data),
                     args.selected_scores.step(0),
                     static_cast<int*>(args.positions.data),
                     args.positions.step(0)};
  launch(&ConfigKernels::candidates, args.local.dim(0), &p, exec, "topk_candidates");
}

base::Lack merge_topk_cuda_lacks(const MergeTopkArgs& args) {
  if (args.scores.dim(1) > kMost || bounds_of(args).k > kMost) return "rows and k must be at most 2^30";
  return first_of({spread(args.lengths, "lengths"), spread(args.selected, "selected"), spread(args.slots, "slots"),
                   spread(args.counts, "counts"), args.slots ? lacks_map(args.map) : base::Lack("")});
}

void merge_topk_cuda(const MergeTopkArgs& args, const base::Exec& exec) { merge_by_topk({order, pick}, args, exec); }

base::Lack shard_slots_cuda_lacks(const ShardSlotsArgs& args) {
  if (args.positions.dim(0) > kMost || args.positions.dim(1) > kMost) return "rows and k must be at most 2^30";
  return first_of({spread(args.positions, "positions"), spread(args.slots, "slots"), spread(args.counts, "counts"),
                   lacks_map(args.map)});
}

void shard_slots_cuda(const ShardSlotsArgs& args, const base::Exec& exec) {
  PickParams p{0,
               static_cast<int>(args.positions.dim(1)),
               nullptr,
               0,
               static_cast<const int*>(args.positions.data),
               args.positions.step(0),
               ids_of({}, args.slots, args.map, args.positions.dim(0)),
               args.counts ? static_cast<int*>(args.counts.data) : nullptr};
  launch(&ConfigKernels::pick, args.positions.dim(0), &p, exec, "shard_slots");
}

}  // namespace sievemla::stage::topk
