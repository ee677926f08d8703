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
// Of a block with rounded caches against the golden itself: above what e4m3 does (at most 2^-4 to each value), below what
// a mistake does (0.2 and more). It sees mistakes on the way to the cache, which the same bytes cannot show.
inline constexpr double kRoundingTolerance = 0.1;

// golden.safetensors, checked against the model's sizes.
struct Golden {
  struct Layer {
    TensorView attn_input, attn_output;  // [rows, hidden] f32
    TensorView topk;                     // [rows, index_topk] i32
    TensorView index_scores;             // [n, rows] f32 of the last n rows, on layers with an indexer of their own
  };
  std::shared_ptr<const SafeTensors> file;  // keeps the views alive
  std::vector<std::int32_t> prompt, generated;
  std::vector<float> logits;  // [n + generated - 1, vocab]: the last n prompt positions, then each step
  std::vector<Layer> layers;
  Tolerance tolerance;  // verified_tolerance of the meta.json beside the file, if there is one
  std::int64_t rows() const { return static_cast<std::int64_t>(prompt.size() + generated.size()) - 1; }
};
Golden load_golden(const std::filesystem::path& path, const Config& config);

struct CheckRow {
  int layer;          // -1: the whole model
  std::string stage;  // indexer: its scores | topk: share of rows whose selection differs | attention: the block's
                      // output | logits; indexer_golden and attention_golden: within kRoundingTolerance
  double error, bound;
  double us;  // the stage's time over all rows; attention's with the write before it
  bool passed;
};

struct CheckReport {
  std::vector<CheckRow> rows;
  std::vector<std::int32_t> tokens;  // the choice after each of the golden's own tokens
  std::int64_t tokens_equal = 0;     // how many agree with the golden's
  bool tokens_judged = false;
  double tokens_per_s = 0;
  std::vector<std::string> failures;  // one line each
  bool passed() const { return failures.empty(); }
};

// The golden's tokens are fed, as one prefill and then one by one, so that a wrong choice does not hide what comes after.
// f32 rows and keys: tokens, selections and all outputs are judged end to end, by golden.tolerance.
// Any other format: block by block on the golden's attn_input with its selection handed in, judged against double
// arithmetic on the very bytes in the cache, within kSameBytesTolerance, and loosely against the golden; tokens are only
// reported.
// options.max_tokens does not matter: the cache has the golden's rows.
CheckReport check_golden(const Config& config, const Checkpoint& checkpoint, const Golden& golden,
                         DecoderOptions options);

}  // namespace sievemla::model
