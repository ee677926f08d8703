// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/kernels.cc -- the rows of every room's registry, in the order of the data flow.
#include <span>
#include <vector>

#include "attention/registry.h"
#include "combine/registry.h"
#include "indexer/registry.h"
#include "kv/registry.h"
#include "sievemla/backend.h"
#include "topk/registry.h"

namespace sievemla {

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> all;
  auto add = [&](std::string_view stage, const auto& rows) {
    for (const auto& row : rows)
      all.push_back({stage, row.name, row.backend, !row.runs_here || row.runs_here(), row.needs});
  };
  add("write", kv::write_latent_kernels());
  add("write", kv::gather_latent_kernels());
  add("write", kv::gather_index_keys_kernels());
  add("write", stage::indexer::write_index_keys_kernels());
  add("indexer", stage::indexer::index_queries_kernels());
  add("indexer", stage::indexer::index_scores_kernels());
  add("topk", stage::topk::topk_kernels());
  add("topk", stage::topk::positions_to_slots_kernels());
  add("topk", stage::topk::expand_pools_kernels());
  add("attention", stage::attention::attention_kernels());
  add("combine", stage::combine::combine_kernels());
  return all;
}

}  // namespace sievemla
