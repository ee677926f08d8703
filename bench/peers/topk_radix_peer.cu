// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// A C entry to two of FlashInfer's top-k kernels: the radix family (picked by its own heuristic, or the
// CUDA-graph-safe single-CTA one) and the thread-block-cluster one. Built by fetch_gpu_peers.sh for the
// peer benchmark only. The *_rows entries take rows of their own lengths, as an indexer's scores need it.
#include <cstdint>

#include <flashinfer/fast_topk_clusters_exact.cuh>
#include <flashinfer/sampling.cuh>
#include <flashinfer/topk.cuh>

namespace fi = flashinfer::sampling;

// row_state: 1 MiB, zeroed once. Returns a cudaError_t.
extern "C" int peer_topk_radix(float* scores, int32_t* ids, float* values, uint32_t rows, uint32_t len, uint32_t k,
                               void* row_state, int graph_safe, void* stream) {
  return fi::TopKDispatch<float, int32_t>(scores, ids, values, rows, k, len, static_cast<fi::RadixRowState*>(row_state),
                                          /*sorted=*/false, /*deterministic=*/false, fi::TopKTieBreak::None,
                                          static_cast<cudaStream_t>(stream), graph_safe != 0);
}

// overflow: rows * 4 * (len / clusters) * clusters ints. Returns a cudaError_t.
extern "C" int peer_topk_clusters(const float* scores, int32_t* ids, float* values, int rows, int len, int k,
                                  int* overflow, int cached, int clusters, void* stream) {
  fi::launch_fast_topk_clusters_exact<float, int>(scores, ids, values, len, nullptr, overflow, len / clusters, rows,
                                                  len, k, cached, clusters, /*pdl=*/false, k,
                                                  static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

// Row r has lengths[r] scores and starts at scores + r * pitch. ids: positions; with `pages`, the slots that a block
// table of 64-row pages (page_entries a row) gives them. zeros: a zero for each row. Returns a cudaError_t.
extern "C" int peer_topk_radix_rows(float* scores, int32_t* ids, int32_t* lengths, const int32_t* zeros,
                                    const int32_t* pages, int64_t page_entries, uint32_t rows, uint32_t pitch,
                                    uint32_t k, void* row_state, void* stream) {
  const auto state = static_cast<fi::RadixRowState*>(row_state);
  const auto s = static_cast<cudaStream_t>(stream);
  if (pages == nullptr)
    return fi::TopKRaggedTransformDispatch<float, int32_t>(scores, ids, zeros, lengths, /*row_starts=*/nullptr, rows, k,
                                                           pitch, state, /*deterministic=*/false,
                                                           fi::TopKTieBreak::None, s);
  const fi::ConfigurablePageTableKernelPolicy<int32_t> pages_of_64(/*output_raw_indices=*/nullptr, pitch,
                                                                   /*page_bits=*/6);
  return fi::TopKPageTableTransformDispatch<float, int32_t, fi::ConfigurablePageTableKernelPolicy<int32_t>>(
      scores, ids, pages, page_entries, lengths, /*row_starts=*/nullptr, /*row_to_batch=*/nullptr, rows, k, pitch,
      state, /*deterministic=*/false, fi::TopKTieBreak::None, s, /*dsa_graph_safe=*/false,
      /*page_table_row_starts=*/nullptr, pages_of_64);
}

// The same; slots come from a block table of one-row pages, since this kernel has no other.
extern "C" int peer_topk_clusters_rows(const float* scores, int32_t* ids, int32_t* lengths, int32_t* zeros,
                                       int32_t* pages, int64_t page_entries, int rows, int pitch, int k, int* overflow,
                                       int cached, int clusters, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (pages == nullptr)
    fi::launch_fast_topk_clusters_exact_ragged_transform<float>(scores, ids, lengths, zeros, nullptr, overflow,
                                                                pitch / clusters, rows, pitch, k, cached, clusters,
                                                                /*pdl=*/false, k, s);
  else
    fi::launch_fast_topk_clusters_exact_page_table_transform<float>(
        scores, ids, lengths, pages, nullptr, overflow, pitch / clusters, rows, pitch, k,
        static_cast<int>(page_entries), cached, clusters, /*pdl=*/false, k, s);
  return cudaGetLastError();
}
