// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/call_trace.h -- writes one call as a trace (src/model/trace.h), for `replay`.
#pragma once
#include <filesystem>
#include <span>

#include "sievemla/attention.h"
#include "sievemla/indexer.h"

namespace sievemla::cli {

// `out` [tokens, heads, latent] and `lse` [tokens, heads] are what should come out. A dense call is written as the slot
// lists it stands for. Throws Error if the file cannot be written.
void write_attention_trace(const std::filesystem::path& path, const AttentionArgs& args, std::span<const float> out,
                           std::span<const float> lse);

// `logits` [rows, width] are what should come out. Keys are written as pages of one, a block table a row.
void write_scores_trace(const std::filesystem::path& path, const IndexScoreArgs& args, std::span<const float> logits);

}  // namespace sievemla::cli
