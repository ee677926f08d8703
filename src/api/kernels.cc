// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/kernels.cc -- every kernel of this build, in the order of the data flow: the rooms' own lists, one after the
// other.
#include "attention/registry.h"
#include "combine/registry.h"
#include "indexer/registry.h"
#include "kv/registry.h"
#include "sievemla/backend.h"
#include "topk/registry.h"

namespace sievemla {
namespace {

template <class Rows>
void add(std::vector<KernelInfo>& all, std::string_view stage, const Rows& rows) {
  for (const auto& row : rows)
    all.push_back({stage, row.name, row.backend, !row.runs_here || row.runs_here(), row.needs});
}

}  // namespace

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> all;
  add(all, "write", kv::write_latent_kernels());
  add(all, "write", kv::gather_latent_kernels());
  add(all, "write", kv::gather_index_keys_kernels());
  add(all, "indexer", stage::indexer::write_index_keys_kernels());
  add(all, "indexer", stage::indexer::index_queries_kernels());
  add(all, "indexer", stage::indexer::index_scores_kernels());
  add(all, "topk", stage::topk::topk_kernels());
  add(all, "topk", stage::topk::positions_to_slots_kernels());
  add(all, "topk", stage::topk::expand_pools_kernels());
  add(all, "attention", stage::attention::attention_kernels());
  add(all, "combine", stage::combine::combine_kernels());
  return all;
}

}  // namespace sievemla
