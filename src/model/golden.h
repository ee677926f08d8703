// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/golden.h -- compares the decoder with a run of Hugging Face transformers on the same checkpoint.
//
// File format: tests/golden/README.md, "Model directories". Error = max |a - b| / max |b| over a tensor.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "model/decoder.h"

namespace sievemla::model {

struct Tolerance {
  double attn_output = 5e-6, index_scores = 5e-6, logits = 2e-5;
};
inline constexpr double kSameBytesTolerance = 2e-3;  // of a block against double on the same bytes and selection

// golden.safetensors, checked against the model's sizes.
struct Golden {
  struct Layer {
    TensorView attn_input, attn_output;  // [rows, hidden] f32
    TensorView topk;                     // [rows, index_topk] i32
    TensorView index_scores;             // [4, rows] f32, layers with an indexer of their own
  };
  std::shared_ptr<const SafeTensors> file;  // keeps the views alive
  std::vector<std::int32_t> prompt, generated;
  std::vector<float> logits;                // [8 + generated - 1, vocab]: the last 8 prompt positions, then each step
  std::vector<Layer> layers;
  Tolerance tolerance;                      // verified_tolerance of the meta.json beside the file, if there is one
  std::int64_t rows() const { return static_cast<std::int64_t>(prompt.size() + generated.size()) - 1; }
};
Golden load_golden(const std::filesystem::path& path, const Config& config);

struct CheckRow {
  int layer;          // -1: the whole model
  std::string stage;  // topk (error = share of rows that differ) | index_scores | attn_output | logits
  double error, bound;
  double us;          // time of the stages behind it, summed over the rows
  bool passed;
};

struct CheckReport {
  std::vector<CheckRow> rows;
  std::vector<std::int32_t> tokens;   // generated here
  std::int64_t tokens_equal = 0;      // how many agree with the golden's
  bool tokens_judged = false;
  double tokens_per_s = 0;
  std::vector<std::string> failures;  // one line each
  bool passed() const { return failures.empty(); }
};

// f32 rows and keys: prefill and decode end to end; tokens, selections and all outputs are judged, by golden.tolerance.
// Any other format: block by block on the golden's attn_input with its selection handed in, judged against double
// arithmetic on the very bytes in the cache, within kSameBytesTolerance; tokens are only reported.
// options.max_tokens is raised to what the golden needs.
CheckReport check_golden(const Config& config, const Checkpoint& checkpoint, const Golden& golden,
                         DecoderOptions options);

}  // namespace sievemla::model
