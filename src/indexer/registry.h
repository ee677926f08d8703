// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/registry.h -- stage 1 of 4: its kernels, one list per public function, best first.
#pragma once
#include <span>

#include "base/registry.h"
#include "base/shortlist.h"
#include "sievemla/pipeline.h"

namespace sievemla::stage::indexer {

using WriteIndexKeysKernel = base::Kernel<WriteIndexKeysArgs>;
using WriteLayerKernel = base::Kernel<WriteLayerArgs>;
using IndexQueriesKernel = base::Kernel<IndexQueryArgs>;
using IndexScoresKernel = base::Kernel<IndexScoreArgs, IndexScoreBounds>;

// Instead of all scores of rows: those of a sample, or those that reach the rows' thresholds (base/shortlist.h).
struct IndexShortlistArgs {
  IndexScoreArgs score;  // its logits are as wide as the longest length, and nowhere
  base::Shortlist* rows;
  bool sample;
};
using IndexShortlistKernel = base::Kernel<IndexShortlistArgs>;

std::span<const WriteIndexKeysKernel> write_index_keys_kernels();
std::span<const WriteLayerKernel> write_layer_kernels();
std::span<const IndexQueriesKernel> index_queries_kernels();
std::span<const IndexScoresKernel> index_scores_kernels();
std::span<const IndexShortlistKernel> index_shortlist_kernels();  // none for most backends

// What the rows name. Arguments have passed the checks of src/api/indexer.cc.
void write_index_keys_reference(const WriteIndexKeysArgs& args, const base::Exec& exec);
void write_layer_host(const WriteLayerArgs& args, const base::Exec& exec);
base::Lack write_layer_host_lacks(const WriteLayerArgs& args);
void index_queries_reference(const IndexQueryArgs& args, const base::Exec& exec);
void index_scores_reference(const IndexScoreArgs& args, const base::Exec& exec);
std::int64_t index_scores_reference_bytes(const Backend& backend, const IndexScoreBounds& bounds);

// Builds with CUDA only.
void write_index_keys_cuda(const WriteIndexKeysArgs& args, const base::Exec& exec);
base::Lack write_index_keys_cuda_lacks(const WriteIndexKeysArgs& args);
void write_layer_cuda(const WriteLayerArgs& args, const base::Exec& exec);
base::Lack write_layer_cuda_lacks(const WriteLayerArgs& args);
void index_queries_cuda(const IndexQueryArgs& args, const base::Exec& exec);
base::Lack index_queries_cuda_lacks(const IndexQueryArgs& args);
void index_scores_cuda(const IndexScoreArgs& args, const base::Exec& exec);
base::Lack index_scores_cuda_lacks(const IndexScoreArgs& args);
void index_shortlist_cuda(const IndexShortlistArgs& args, const base::Exec& exec);
base::Lack index_shortlist_cuda_lacks(const IndexShortlistArgs& args);
// Loads the kernels of a config on the current device.
void indexer_cuda_prepare(int config_sm);

}  // namespace sievemla::stage::indexer
