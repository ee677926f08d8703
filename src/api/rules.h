// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/rules.h -- whether a call is right and which kernel serves it, apart from making it: the pipeline asks about
// all its stages before the first of them writes.
#pragma once
#include "attention/registry.h"
#include "indexer/registry.h"
#include "kv/registry.h"
#include "sievemla/backend.h"
#include "sievemla/pipeline.h"
#include "topk/registry.h"

namespace sievemla::api {

// The kernel that the public function of the same arguments runs. Throws what that function throws.
const kv::WriteLatentKernel& admit(const Backend& backend, const WriteLatentArgs& args);
const stage::indexer::WriteIndexKeysKernel& admit(const Backend& backend, const WriteIndexKeysArgs& args);
const stage::indexer::WriteLayerKernel& admit(const Backend& backend, const WriteLayerArgs& args);
const stage::indexer::IndexScoresKernel& admit(const Backend& backend, const IndexScoreArgs& args, Workspace workspace);
const stage::topk::TopkKernel& admit(const Backend& backend, const TopkArgs& args, Workspace workspace);
const stage::topk::CandidatesKernel& admit(const Backend& backend, const CandidatesArgs& args);
// Slots are data, so check_indices comes with the call.
const stage::attention::AttentionKernel& admit(const Backend& backend, const AttentionArgs& args, Workspace workspace);

// Queries, and the keys that go with them. `run` does what index_queries() does after its checks.
struct Queries {
  const stage::indexer::IndexQueriesKernel& queries;
  const stage::indexer::WriteIndexKeysKernel* keys;  // null: there are none, or the kernel of the queries writes them
};
Queries admit(const Backend& backend, const IndexQueryArgs& args);
void run(const Backend& backend, const Queries& kernels, const IndexQueryArgs& args, Stream stream);

// The stages of a selection. `run` does what select() does after its checks.
struct Selection {
  const stage::indexer::IndexScoresKernel& scores;
  const stage::topk::TopkKernel& topk;
  const stage::topk::CandidatesKernel* candidates;  // null: nothing is sent
  // Both, or neither: by shortlists (base/shortlist.h) instead of all scores.
  const stage::indexer::IndexShortlistKernel* score_shortlist;
  const stage::topk::ChooseKernel* choose;
};
Selection admit(const Backend& backend, const SelectArgs& args, Workspace workspace);
void run(const Backend& backend, const Selection& kernels, const SelectArgs& args, Workspace workspace, Stream stream);

}  // namespace sievemla::api
