// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/pipeline.cc -- where the stages meet.
//
//   write latent row ─┐
//   write index key ──┴─► index_queries ─► [ index_scores ─► topk ] by chunks of rows ─► attention
//
// Every stage is asked for its kernel, and so for its rules, before the first of them writes. They run one after
// another and share the workspace.
#include "sievemla/pipeline.h"

#include <algorithm>
#include <optional>
#include <variant>

#include "api/rules.h"
#include "base/registry.h"

namespace sievemla {
namespace {

struct Indexer {
  IndexQueryArgs args;  // and keys: one kernel on cuda
  api::Queries queries;
  api::Selection select;
};

}  // namespace

void sparse_layer(const Backend& backend, const SparseLayerArgs& args, Workspace workspace, Stream stream) {
  const auto& write = api::admit(backend, args.latent);
  std::optional<Indexer> indexer;
  if (const auto& own = args.indexer) {
    if (!own->keys.k) api::admit(backend, own->keys);  // refuses it: here keys are not optional
    IndexQueryArgs queries = own->queries;
    queries.keys = own->keys;
    indexer.emplace(Indexer{queries, api::admit(backend, queries), api::admit(backend, own->select, workspace)});
  }
  api::admit(backend, args.attention, workspace);

  const base::Exec exec{backend, workspace, stream};
  write.run(args.latent, exec);
  if (indexer) {
    api::run(backend, indexer->queries, indexer->args, stream);
    api::run(backend, indexer->select, args.indexer->select, workspace, stream);
  }
  attention(backend, args.attention, workspace, stream);  // with its check_indices: the slots exist only now
}

std::int64_t sparse_layer_workspace_bytes(const Backend& backend, const SparseLayerBounds& bounds) {
  return std::max(select_workspace_bytes(backend, bounds.select), attention_workspace_bytes(backend, bounds.attention));
}

}  // namespace sievemla
