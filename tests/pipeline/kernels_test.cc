// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/pipeline/kernels_test.cc -- kernels(): each public function has a row on every host backend, of its own name.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "sievemla/backend.h"

namespace sievemla::test {
namespace {

TEST(Kernels, EveryFunctionOnEveryHostBackend) {
  std::set<std::string> names;
  for (const KernelInfo& kernel : kernels()) {
    EXPECT_TRUE(names.insert(std::string(kernel.name)).second) << kernel.name << " is listed twice";
    EXPECT_TRUE((std::set<std::string_view>{"write", "indexer", "topk", "attention", "combine"}.count(kernel.stage)))
        << kernel.stage;
    EXPECT_NE(kernel.name.find(name_of(kernel.backend)), std::string_view::npos) << kernel.name;
  }
  for (std::string_view function :
       {"write_latent", "gather_latent", "gather_index_keys", "write_index_keys", "write_layer", "index_queries",
        "index_scores", "topk", "positions_to_slots", "expand_pools", "topk_candidates", "merge_topk", "shard_slots",
        "attention", "combine"})
    for (BackendKind backend : {BackendKind::reference, BackendKind::cpu}) {
      bool found = false;
      for (const KernelInfo& kernel : kernels())
        found |= kernel.backend == backend && kernel.runs_here &&
                 kernel.name.starts_with(std::string(function) + "_" + std::string(name_of(backend)));
      EXPECT_TRUE(found) << function << " on " << name_of(backend);
    }
}

}  // namespace
}  // namespace sievemla::test
