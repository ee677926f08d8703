// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/registry.cc -- the rows of stage 1.
#include "indexer/registry.h"

namespace sievemla::stage::indexer {
namespace {

// name, backend, needs, runs_here, lacks, run, workspace_bytes

constexpr WriteIndexKeysKernel kWriteIndexKeys[] = {
    {"write_index_keys_cpu_portable", BackendKind::cpu, "", nullptr, nullptr, write_index_keys_cpu, nullptr},
    {"write_index_keys_reference", BackendKind::reference, "", nullptr, nullptr, write_index_keys_reference, nullptr},
};

constexpr IndexQueriesKernel kIndexQueries[] = {
    {"index_queries_cpu_portable", BackendKind::cpu, "", nullptr, nullptr, index_queries_cpu, nullptr},
    {"index_queries_reference", BackendKind::reference, "", nullptr, nullptr, index_queries_reference, nullptr},
};

constexpr IndexScoresKernel kIndexScores[] = {
    {"index_scores_cpu_portable", BackendKind::cpu, "", nullptr, nullptr, index_scores_cpu, index_scores_cpu_bytes},
    {"index_scores_reference", BackendKind::reference, "", nullptr, nullptr, index_scores_reference,
     index_scores_reference_bytes},
};

}  // namespace

std::span<const WriteIndexKeysKernel> write_index_keys_kernels() { return kWriteIndexKeys; }
std::span<const IndexQueriesKernel> index_queries_kernels() { return kIndexQueries; }
std::span<const IndexScoresKernel> index_scores_kernels() { return kIndexScores; }

}  // namespace sievemla::stage::indexer
