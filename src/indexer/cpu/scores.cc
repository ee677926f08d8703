// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/scores.cc -- index scores on the processor, in f32, plain C++ that the compiler vectorises.
//
// Keys are unpacked once for all heads and transposed, so that every inner loop runs over keys: a head's dot products
// are 128 multiply-adds of key vectors, and the sum over heads needs no horizontal add. Each score adds its 128
// products, then its heads, in ascending order, whatever tile, task or thread it falls in: equal rows give equal bits.
#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "cpu/threads.h"
#include "indexer/head.h"
#include "indexer/keys.h"
#include "indexer/registry.h"

namespace sievemla::stage::indexer {
namespace {

constexpr int kKeys = 64;      // per tile: transposed, 32 KB of f32
constexpr int kColumns = 256;  // per task: enough that unpacking the queries is below 1 % of the work
constexpr int kRows = 4;       // per task: rows that share the unpacked tiles where they see the same keys
constexpr int kSteps = 8;      // dimensions per pass over a tile: that many broadcast values stay in registers

struct Tile {
  float key[kIndexDim][kKeys];
  float scale[kKeys];
  bool missing[kKeys];  // its page lies nowhere: the score is -inf
  std::int64_t request, first;
  int count;  // keys unpacked so far; the scores of what lies beyond go nowhere

  void clear() {
    std::memset(static_cast<void*>(this), 0, sizeof *this);
    request = -1;
  }

  // Makes keys [first, first + count) of `request` present. Reads those alone, and only what is not there yet.
  void need(const IndexScoreArgs& args, std::int64_t wanted_request, std::int64_t wanted_first, int wanted_count) {
    if (request != wanted_request || first != wanted_first) {
      request = wanted_request;
      first = wanted_first;
      count = 0;
    }
    for (; count < wanted_count; ++count) {
      const kv::IndexKeyAddress at = key_address(args, request, first + count);
      missing[count] = at.key == nullptr;
      if (missing[count]) continue;
      float values[kIndexDim];
      kv::load_index_values(key_dtype(args), at.key, values);
      for (int d = 0; d < kIndexDim; ++d) key[d][count] = values[d];
      scale[count] = kv::load_index_scale(at);
    }
  }
};

// One worker's part of the workspace: a tile, then kRows queries and their weights.
struct Scratch {
  static std::int64_t bytes(std::int64_t heads) {
    const std::int64_t used =
        std::int64_t{sizeof(Tile)} + kRows * heads * (kIndexDim + 1) * std::int64_t{sizeof(float)};
    return (used + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
  }
  Scratch(Workspace workspace, int worker, std::int64_t heads) {
    std::byte* base = static_cast<std::byte*>(workspace.data) + worker * bytes(heads);
    tile = new (base) Tile;
    q = reinterpret_cast<float*>(base + sizeof(Tile));
    weights = q + kRows * heads * kIndexDim;
  }
  Tile* tile;
  float* q;        // [kRows, heads, 128]
  float* weights;  // [kRows, heads]
};

// score[i] = scale[i] * sum_h weights[h] * relu(q[h] . key[i]) for a whole tile.
void score_tile(const Tile& tile, const float* q, const float* weights, std::int64_t heads, float* score) {
  float sum[kKeys] = {};
  for (std::int64_t h = 0; h < heads; ++h, q += kIndexDim) {
    float dot[kKeys] = {};
    for (int d = 0; d < kIndexDim; d += kSteps) {
      for (int i = 0; i < kKeys; ++i) {
        float x = dot[i];
        for (int s = 0; s < kSteps; ++s) x += q[d + s] * tile.key[d + s][i];
        dot[i] = x;
      }
    }
    for (int i = 0; i < kKeys; ++i) sum[i] += weights[h] * relu(dot[i]);
  }
  for (int i = 0; i < kKeys; ++i)
    score[i] = tile.missing[i] ? -std::numeric_limits<float>::infinity() : tile.scale[i] * sum[i];
}

// Columns [begin, end) of rows [first, last).
void score_block(const IndexScoreArgs& args, const Scratch& scratch, std::int64_t first, std::int64_t last,
                 std::int64_t begin, std::int64_t end) {
  const std::int64_t heads = args.q.dim(1);
  scratch.tile->clear();
  for (std::int64_t t = first; t < last; ++t) {
    if (keys_of_row(args, t).length <= begin) continue;
    float* const q = scratch.q + (t - first) * heads * kIndexDim;
    for (std::int64_t h = 0; h < heads; ++h) {
      load_query(args.q, t, h, q + h * kIndexDim);
      scratch.weights[(t - first) * heads + h] = *base::at<float>(args.weights, t, h);
    }
  }
  for (std::int64_t c = begin; c < end; c += kKeys) {
    const std::int64_t columns = std::min<std::int64_t>(end - c, kKeys);
    for (std::int64_t t = first; t < last; ++t) {
      const RowKeys row = keys_of_row(args, t);
      const std::int64_t seen = std::clamp<std::int64_t>(row.length - c, 0, columns);
      float* const logits = base::at<float>(args.logits, t, c);
      if (seen > 0) {
        float score[kKeys];
        scratch.tile->need(args, row.request, row.first + c, static_cast<int>(seen));
        score_tile(*scratch.tile, scratch.q + (t - first) * heads * kIndexDim, scratch.weights + (t - first) * heads,
                   heads, score);
        std::copy_n(score, seen, logits);
      }
      if (args.fill) std::fill(logits + seen, logits + columns, -std::numeric_limits<float>::infinity());
    }
  }
}

}  // namespace

std::int64_t index_scores_cpu_bytes(const Backend& backend, const IndexScoreBounds& bounds) {
  return backend.threads() * Scratch::bytes(bounds.heads);
}

void index_scores_cpu(const IndexScoreArgs& args, const base::Exec& exec) {
  const std::int64_t rows = args.q.dim(0), width = args.logits.dim(1);
  const std::int64_t row_blocks = (rows + kRows - 1) / kRows, column_blocks = (width + kColumns - 1) / kColumns;
  cpu::parallel_for(exec.backend, row_blocks * column_blocks, [&](std::int64_t task, int worker) {
    const std::int64_t first = task / column_blocks * kRows, begin = task % column_blocks * kColumns;
    score_block(args, Scratch(exec.workspace, worker, args.q.dim(1)), first, std::min(rows, first + kRows), begin,
                std::min(width, begin + kColumns));
  });
}

}  // namespace sievemla::stage::indexer
