// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/topk.cc -- stage 2 on CUDA, host side: what a call lacks, how it is cut, the launch.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/context.cuh"
#include "cuda/launch.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/slot_map.h"

namespace sievemla::stage::topk {
namespace {

using cuda::first_of, cuda::spread;

constexpr int kMostParts = 32;

// CTAs that share a long row. A part costs its handing over: fewer than four are not worth it.
int parts_of(std::int64_t rows, std::int64_t width, int multiprocessors) {
  if (rows == 0 || width <= kListEntries) return 1;
  const std::int64_t parts = std::min({std::int64_t{kMostParts}, width / (kListEntries / 2), multiprocessors / rows});
  return parts < 4 ? 1 : static_cast<int>(parts);
}

// Whether a row's CTAs may be a cluster: rows that are read four scores at a time, and few. With a CTA on every
// multiprocessor (16 rows) clusters were slower.
bool comes_together(const CudaParams& p, const cuda::Context& context) {
  return p.width <= kMostTogether && 2 * p.rows * kTogether <= context.multiprocessors &&
         p.rows <= context.clusters[kTogether] && !p.starts && p.scores_row % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(p.scores) % 16 == 0;
}

// The workspace: tickets, counts and lists of all parts.
struct Layout {
  std::int64_t counts, lists, bytes;
};
// For as many parts as there can be: a call of fewer rows cuts them into more.
Layout layout(std::int64_t width, int multiprocessors) {
  if (width <= kListEntries) return {0, 0, 0};
  const std::int64_t parts = multiprocessors;
  const std::int64_t counts = cuda::ceil_div(cuda::kTicketBytes, kWorkspaceAlign) * kWorkspaceAlign;
  const std::int64_t lists = counts + cuda::ceil_div(parts * 4, kWorkspaceAlign) * kWorkspaceAlign;
  return {counts, lists, lists + parts * kListEntries * static_cast<std::int64_t>(sizeof(ListEntry))};
}

const ConfigKernels& kernels_on(const cuda::Context& context) { return cuda::kernels_for(context, config_kernels()); }

}  // namespace

base::Lack topk_cuda_lacks(const TopkArgs& args) {
  if (args.scores.dim(0) > kMost) return "there must be at most 2^30 rows";
  if ((args.positions ? args.positions : args.slots).dim(1) > kMost) return "k must be at most 2^30";
  return first_of({spread(args.starts, "starts"), spread(args.lengths, "lengths"), spread(args.positions, "positions"),
                   spread(args.slots, "slots"), args.slots ? lacks_map(args.map) : base::Lack("")});
}

std::int64_t topk_cuda_bytes(const Backend& backend, const TopkBounds& bounds) {
  return layout(bounds.width, cuda::context(backend.device().index).multiprocessors).bytes;
}

namespace {

CudaParams params_of(const TopkArgs& args) {
  CudaParams p{};
  p.scores = static_cast<const float*>(args.scores.data), p.scores_row = args.scores.step(0);
  p.width = args.scores.dim(1);
  if (args.starts) p.starts = static_cast<const int*>(args.starts.data);
  p.lengths = static_cast<const int*>(args.lengths.data);
  p.rows = static_cast<int>(args.scores.dim(0));
  p.k = static_cast<int>((args.positions ? args.positions : args.slots).dim(1));
  p.out = ids_of(args.positions, args.slots, args.map, p.rows);
  return p;
}

void select_rows(CudaParams p, const base::Exec& exec) {
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  const std::int64_t rows = p.rows, width = p.width;
  p.ahead = 2 * context.multiprocessors;
  p.parts = parts_of(rows, width, context.multiprocessors);
  if (p.parts > 1) {
    const Layout at = layout(width, context.multiprocessors);
    char* const space = static_cast<char*>(exec.workspace.data);
    p.tickets = reinterpret_cast<unsigned*>(space) + cuda::kFirstTopkTicket;
    p.counts = reinterpret_cast<int*>(space + at.counts);
    p.lists = reinterpret_cast<ListEntry*>(space + at.lists);
  }
  const ConfigKernels& kernels = kernels_on(context);
  const bool together = kernels.together.kernel && p.parts > 1 && !p.skip_empty && comes_together(p, context);
  if (together) p.parts = kTogether;
  const SelectKernel& kernel = together                ? kernels.together
                               : width <= kListEntries ? kernels.of_list
                               : p.parts > 1           ? kernels.shared
                                                       : kernels.alone;
  void* arguments[] = {&p};
  // With a CTA a row, those that had waited beside another kernel's were slower.
  const bool early = cuda::starts_early(kernels.sm) && (p.parts > 1 || p.skip_empty);
  cuda::launch(kernel.kernel,
               {.ctas = rows * p.parts,
                .threads = kernel.threads,
                .smem_bytes = kernel.smem_bytes,
                .cluster = together ? kTogether : 1,
                .early = early},
               static_cast<cudaStream_t>(exec.stream.handle), arguments, "topk");
}

}  // namespace

void topk_cuda(const TopkArgs& args, const base::Exec& exec) { select_rows(params_of(args), exec); }

base::Lack choose_cuda_lacks(const ChooseArgs& args) {
  const cuda::Context& context = cuda::context(args.topk.lengths.device.index);
  if (!kernels_on(context).choose.kernel) return "the device's scorer makes no shortlists";
  if (args.topk.scores.dim(1) <= 8 * base::kShortlist) return "rows are short";
  if ((args.topk.positions ? args.topk.positions : args.topk.slots).dim(1) > base::kShortlist / 2)
    return "k is too large";
  return "";
}

void choose_cuda(const ChooseArgs& args, const base::Exec& exec) {
  CudaParams p = params_of(args.topk);
  if (args.step == ShortlistStep::rest) {
    p.lengths = static_cast<const int*>(args.left.data), p.skip_empty = true;
    return select_rows(p, exec);
  }
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  p.shortlists = args.rows, p.stride = static_cast<int>(base::sample_stride(p.width));
  p.left = static_cast<int*>(args.left.data);
  const ConfigKernels& kernels = kernels_on(context);
  const SelectKernel& kernel = args.step == ShortlistStep::guess ? kernels.guess : kernels.choose;
  void* arguments[] = {&p};
  cuda::launch(kernel.kernel,
               {.ctas = p.rows, .threads = kernel.threads, .smem_bytes = kernel.smem_bytes, .early = true},
               static_cast<cudaStream_t>(exec.stream.handle), arguments, "topk");
}

base::Lack positions_to_slots_cuda_lacks(const PositionsToSlotsArgs& args) {
  if (args.positions.dim(0) > kMost || args.positions.dim(1) > kMost) return "rows and k must be at most 2^30";
  return first_of({spread(args.positions, "positions"), spread(args.slots, "slots"), lacks_map(args.map)});
}

void positions_to_slots_cuda(const PositionsToSlotsArgs& args, const base::Exec& exec) {
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  const int* positions = static_cast<const int*>(args.positions.data);
  std::int64_t row = args.positions.step(0);
  int k = static_cast<int>(args.positions.dim(1));
  CudaIds out = ids_of({}, args.slots, args.map, args.positions.dim(0));
  void* arguments[] = {&positions, &row, &k, &out};
  cuda::launch(kernels_on(context).slots, args.positions.dim(0), kIdThreads, 0,
               static_cast<cudaStream_t>(exec.stream.handle), arguments, "positions_to_slots");
}

base::Lack expand_pools_cuda_lacks(const ExpandPoolsArgs& args) {
  if (args.pools.dim(0) > kMost || args.positions.dim(1) > kMost) return "rows and width must be at most 2^30";
  return first_of({spread(args.pools, "pools"), spread(args.lengths, "lengths"), spread(args.positions, "positions")});
}

void expand_pools_cuda(const ExpandPoolsArgs& args, const base::Exec& exec) {
  const cuda::Context& context = cuda::prepared_context(exec.backend.device().index);
  const cuda::CurrentDevice current(context.device);
  PoolParams p{static_cast<const int*>(args.pools.data),
               args.pools.step(0),
               static_cast<int>(args.pools.dim(1)),
               static_cast<const int*>(args.lengths.data),
               args.kpool,
               static_cast<int*>(args.positions.data),
               args.positions.step(0),
               args.positions.dim(1)};
  void* arguments[] = {&p};
  cuda::launch(kernels_on(context).pools, args.pools.dim(0), kIdThreads, 0,
               static_cast<cudaStream_t>(exec.stream.handle), arguments, "expand_pools");
}

void topk_cuda_prepare(int config_sm) {
  for (const ConfigKernels& kernels : config_kernels()) {
    if (kernels.sm != config_sm) continue;
    for (const SelectKernel& kernel :
         {kernels.of_list, kernels.alone, kernels.shared, kernels.together, kernels.guess, kernels.choose})
      if (kernel.kernel) cuda::load_kernel(kernel.kernel, kernel.smem_bytes);
    for (const void* kernel : {kernels.slots, kernels.pools, kernels.candidates, kernels.order, kernels.pick})
      cuda::load_kernel(kernel, 0);
  }
}

}  // namespace sievemla::stage::topk
