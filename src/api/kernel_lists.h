// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/kernel_lists.h -- the one list of the rooms' kernel lists, in the order of the data flow.
#pragma once
#include "attention/registry.h"
#include "combine/registry.h"
#include "indexer/registry.h"
#include "kv/registry.h"
#include "topk/registry.h"

namespace sievemla::api {

// f(stage, span of base::Kernel<Args, Bounds>) for every public function that kernels serve.
template <class F>
void for_each_kernel_list(F&& f) {
  f("write", kv::write_latent_kernels());
  f("write", kv::gather_latent_kernels());
  f("write", kv::gather_index_keys_kernels());
  f("indexer", stage::indexer::write_index_keys_kernels());
  f("indexer", stage::indexer::write_layer_kernels());
  f("indexer", stage::indexer::index_queries_kernels());
  f("indexer", stage::indexer::index_scores_kernels());
  f("topk", stage::topk::topk_kernels());
  f("topk", stage::topk::positions_to_slots_kernels());
  f("topk", stage::topk::expand_pools_kernels());
  f("topk", stage::topk::topk_candidates_kernels());
  f("topk", stage::topk::merge_topk_kernels());
  f("topk", stage::topk::shard_slots_kernels());
  f("attention", stage::attention::attention_kernels());
  f("combine", stage::combine::combine_kernels());
}

}  // namespace sievemla::api
