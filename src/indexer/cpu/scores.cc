// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cpu/scores.cc -- index scores on the CPU: what is done around the kernel of an instruction set.
//
// A task is some columns of up to kQueryRows rows: their queries are packed once a worker, and rows that see the same
// keys share the converted ones. A score adds its products and its heads in one order, whatever task, tile or thread it
// falls in: equal rows give equal bits.
#include "indexer/cpu/scores.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/scratch.h"
#include "cpu/threads.h"
#include "indexer/head.h"
#include "indexer/keys.h"

namespace sievemla::stage::indexer {
namespace {

constexpr std::int64_t kColumns = 512;       // that a kernel gets at a time
constexpr std::int64_t kMostColumns = 2048;  // of a task
constexpr std::int64_t kTasksPerThread = 4;  // for a single row: enough that none waits long for the last
static_assert(kColumns % kKeyPad == 0);

constexpr float kMissing = -std::numeric_limits<float>::infinity();

// What is read where a key is not there, or only fills a vector.
alignas(64) constexpr std::byte kZeros[kIndexDim * sizeof(float)] = {};

using base::ceil_div, base::round_up;

constexpr Element element_of(DType dtype) {
  return dtype == DType::u8 ? Element::e4m3 : dtype == DType::bf16 ? Element::bf16 : Element::f32;
}

struct Worker {
  std::int64_t* packed;  // the first row whose queries are packed; -1: none
  const void** heads;    // [heads] of a row
  float* weights;        // [heads]
  std::byte* scratch;    // the tier's
  Worker(base::Scratch&& memory, const Tier& tier, std::int64_t n) : Worker(memory, tier, n) {}
  Worker(base::Scratch& memory, const Tier& tier, std::int64_t n)
      : packed(memory.take<std::int64_t>(1)),
        heads(memory.take<const void*>(n)),
        weights(memory.take<float>(n)),
        scratch(memory.take<std::byte>(tier.scratch_bytes(n))) {}
};

std::int64_t worker_bytes(const Tier& tier, std::int64_t heads) {
  base::Scratch scratch;
  Worker(scratch, tier, heads);
  return round_up(scratch.bytes(), kWorkspaceAlign);
}

// Addresses and scales of keys [first, first + n) of a request, zeros up to a multiple of kKeyPad; then addresses of up
// to kAhead of the n_ahead keys that follow.
struct Keys {
  const std::byte* key[kColumns + kAhead];
  float scale[kColumns];
  std::int64_t count;  // a multiple of kKeyPad
  bool holes = false;  // there are keys among them that lie nowhere

  Keys(const IndexScoreArgs& args, std::int64_t request, std::int64_t first, std::int64_t n, std::int64_t n_ahead)
      : count(round_up(n, kKeyPad)) {
    n_ahead = std::min(n_ahead, kAhead);
    std::fill(key + n, key + count + kAhead, kZeros);
    std::fill(scale + n, scale + count, 0.f);
    for_each_run(args, request, first, n, [&](std::int64_t j, std::int64_t run, const KeyRun& at) {
      fill(j - first, run, at);
      holes |= at.key == nullptr;
      float* to = scale + (j - first);
      if (!at.scale) std::fill_n(to, run, 1.f);
      else if (at.scale_step == sizeof *to) std::memcpy(to, at.scale, static_cast<std::size_t>(run) * sizeof *to);
      else
        for (std::int64_t i = 0; i < run; ++i) std::memcpy(to + i, at.scale + i * at.scale_step, sizeof *to);
    });
    for_each_run(args, request, first + n, n_ahead, [&](std::int64_t j, std::int64_t run, const KeyRun& at) {
      fill(count + j - (first + n), run, at);
      for (std::int64_t i = 0; at.scale && i < run; i += 16) __builtin_prefetch(at.scale + i * at.scale_step);
    });
  }

 private:
  void fill(std::int64_t to, std::int64_t n, const KeyRun& at) {
    if (!at.key) std::fill_n(key + to, n, kZeros);
    else
      for (std::int64_t i = 0; i < n; ++i) key[to + i] = at.key + i * at.key_step;
  }
};

void load_queries(const Tier& tier, const TierShape& shape, const IndexScoreArgs& args, std::int64_t first,
                  std::int64_t last, const Worker& worker) {
  if (*worker.packed == first) return;
  *worker.packed = first;
  for (std::int64_t t = first; t < last; ++t) {
    if (keys_of_row(args, t).length == 0) continue;
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      worker.heads[h] = static_cast<const std::byte*>(args.q.data) + base::offset(args.q, t, h) * size_of(args.q.dtype);
      worker.weights[h] = *base::at<float>(args.weights, t, h);
    }
    tier.load_query(shape, worker.scratch, t - first, worker.heads, worker.weights);
  }
}

// Columns [begin, begin + columns) of rows [first, last); columns <= kColumns.
void score_columns(const Tier& tier, const TierShape& shape, const IndexScoreArgs& args, std::int64_t first,
                   std::int64_t last, std::int64_t begin, std::int64_t columns, const Worker& worker) {
  RowKeys keys[kQueryRows];
  std::int64_t seen[kQueryRows], left = 0;
  for (std::int64_t i = 0; i < last - first; ++i) {
    keys[i] = keys_of_row(args, first + i);
    seen[i] = std::clamp<std::int64_t>(keys[i].length - begin, 0, columns);
    left += seen[i] > 0;
    if (!args.fill) continue;
    float* const logits = base::at<float>(args.logits, first + i, begin);
    std::fill(logits + seen[i], logits + columns, kMissing);
  }
  // Rows that see the same keys, together.
  bool done[kQueryRows] = {};
  for (std::int64_t next = 0; left > 0; ++next) {
    if (done[next] || seen[next] == 0) continue;
    std::int64_t rows[kQueryRows], n = 0, most = 0, longest = 0;
    for (std::int64_t i = next; i < last - first; ++i) {
      if (seen[i] == 0 || keys[i].request != keys[next].request || keys[i].first != keys[next].first) continue;
      rows[n++] = i;
      most = std::max(most, seen[i]);
      longest = std::max(longest, keys[i].length);
      done[i] = true;
    }
    left -= n;
    const Keys k(args, keys[next].request, keys[next].first + begin, most, longest - begin - most);
    float scores[kQueryRows][kColumns], *out[kQueryRows];
    for (std::int64_t i = 0; i < n; ++i) out[i] = scores[i];
    tier.score(shape, worker.scratch, k.key, k.scale, k.count, rows, out, n);
    for (std::int64_t i = 0; i < n; ++i) {
      float* const logits = base::at<float>(args.logits, first + rows[i], begin);
      std::copy_n(scores[i], seen[rows[i]], logits);
      for (std::int64_t c = 0; k.holes && c < seen[rows[i]]; ++c)
        if (k.key[c] == kZeros) logits[c] = kMissing;
    }
  }
}

// Columns of a task: for few rows fewer, so that every thread gets some.
std::int64_t task_columns(const Backend& backend, std::int64_t row_blocks, std::int64_t width) {
  const std::int64_t even = ceil_div(width * row_blocks, kTasksPerThread * backend.threads());
  return std::clamp(round_up(even, kColumns), kColumns, kMostColumns);
}

}  // namespace

template <const Tier& kTier>
std::int64_t index_scores_cpu_bytes(const Backend& backend, const IndexScoreBounds& bounds) {
  return backend.threads() * worker_bytes(kTier, bounds.heads);
}

template <const Tier& kTier>
void index_scores_cpu(const IndexScoreArgs& args, const base::Exec& exec) {
  const std::int64_t rows = args.q.dim(0), heads = args.q.dim(1), width = args.logits.dim(1);
  const TierShape shape{heads, element_of(args.q.dtype), element_of(key_dtype(args)), relu(kMissing)};
  const std::int64_t row_blocks = ceil_div(rows, kQueryRows), bytes = worker_bytes(kTier, heads);
  const std::int64_t columns = task_columns(exec.backend, row_blocks, width), column_blocks = ceil_div(width, columns);
  const auto worker = [&](int i) {
    return Worker(base::Scratch(static_cast<std::byte*>(exec.workspace.data) + i * bytes), kTier, heads);
  };
  for (int i = 0; i < exec.backend.threads(); ++i) *worker(i).packed = -1;
  cpu::parallel_for(exec.backend, row_blocks * column_blocks, [&](std::int64_t task, int w) {
    const std::int64_t first = task / column_blocks * kQueryRows, last = std::min(rows, first + kQueryRows);
    const std::int64_t begin = task % column_blocks * columns, end = std::min(width, begin + columns);
    load_queries(kTier, shape, args, first, last, worker(w));
    for (std::int64_t c = begin; c < end; c += kColumns)
      score_columns(kTier, shape, args, first, last, c, std::min(kColumns, end - c), worker(w));
  });
}

base::Lack lacks_f32(const IndexScoreArgs& args) {
  if (args.q.dtype == DType::f32) return "f32 queries (its operands are bf16)";
  if (key_dtype(args) == DType::f32) return "f32 keys (its operands are bf16)";
  return "";
}

template void index_scores_cpu<kPortable>(const IndexScoreArgs&, const base::Exec&);
template std::int64_t index_scores_cpu_bytes<kPortable>(const Backend&, const IndexScoreBounds&);
#if defined(__x86_64__)
template void index_scores_cpu<kAvx2>(const IndexScoreArgs&, const base::Exec&);
template void index_scores_cpu<kAvx512>(const IndexScoreArgs&, const base::Exec&);
template void index_scores_cpu<kAvx512Bf16>(const IndexScoreArgs&, const base::Exec&);
template void index_scores_cpu<kAmx>(const IndexScoreArgs&, const base::Exec&);
template std::int64_t index_scores_cpu_bytes<kAvx2>(const Backend&, const IndexScoreBounds&);
template std::int64_t index_scores_cpu_bytes<kAvx512>(const Backend&, const IndexScoreBounds&);
template std::int64_t index_scores_cpu_bytes<kAvx512Bf16>(const Backend&, const IndexScoreBounds&);
template std::int64_t index_scores_cpu_bytes<kAmx>(const Backend&, const IndexScoreBounds&);
#endif

}  // namespace sievemla::stage::indexer
