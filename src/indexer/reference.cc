// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/reference.cc -- stage 1 in double precision, one value after the other: the specification.
#include <limits>

#include "indexer/head.h"
#include "indexer/keys.h"
#include "indexer/registry.h"

namespace sievemla::stage::indexer {

void write_index_keys_reference(const WriteIndexKeysArgs& args, const base::Exec&) {
  for (std::int64_t t = 0; t < args.k.dim(0); ++t) write_key<double>(args, t, kv::store_index_values<double>);
}

void index_queries_reference(const IndexQueryArgs& args, const base::Exec&) {
  for (std::int64_t t = 0; t < args.q.dim(0); ++t) {
    const TokenRope<double> rope(args.rope, t);
    for (std::int64_t h = 0; h < args.q.dim(1); ++h) write_query(args, rope, t, h, kv::store_index_values<double>);
  }
}

// The query of one row, in double.
std::int64_t index_scores_reference_bytes(const Backend&, const IndexScoreBounds& bounds) {
  return bounds.heads * kIndexDim * std::int64_t{sizeof(double)};
}

void index_scores_reference(const IndexScoreArgs& args, const base::Exec& exec) {
  constexpr double kMissing = -std::numeric_limits<double>::infinity();
  double* const q = static_cast<double*>(exec.workspace.data);
  const std::int64_t rows = args.q.dim(0), heads = args.q.dim(1);
  for (std::int64_t t = 0; t < rows; ++t) {
    const RowKeys row = keys_of_row(args, t);
    if (row.length > 0)
      for (std::int64_t h = 0; h < heads; ++h) load_query(args.q, t, h, q + h * kIndexDim);

    float* const logits = base::at<float>(args.logits, t);
    for (std::int64_t c = 0; c < row.length; ++c) {
      double score = kMissing;
      if (const kv::IndexKeyAddress at = key_address(args, row.request, row.first + c); at.key) {
        double key[kIndexDim], sum = 0;
        kv::load_index_values(key_dtype(args), at.key, key);
        for (std::int64_t h = 0; h < heads; ++h) {
          double dot = 0;
          for (int d = 0; d < kIndexDim; ++d) dot += q[h * kIndexDim + d] * key[d];
          sum += static_cast<double>(*base::at<float>(args.weights, t, h)) * relu(dot);
        }
        score = static_cast<double>(kv::load_index_scale(at)) * sum;
      }
      logits[c] = static_cast<float>(score);
    }
    if (args.fill)
      for (std::int64_t c = row.length; c < args.logits.dim(1); ++c) logits[c] = static_cast<float>(kMissing);
  }
}

}  // namespace sievemla::stage::indexer
