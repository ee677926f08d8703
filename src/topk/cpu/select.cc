// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/select.cc -- exact top-k: rows in parallel, and where there are fewer than threads, parts of long rows.
//
// A part's candidates go into a list of its own. The lists of a row, one after another, are a list of the row.
#include "topk/cpu/select.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/scratch.h"
#include "cpu/threads.h"
#include "topk/rows.h"

namespace sievemla::stage::topk {
namespace {

constexpr std::int64_t kLeastPart = 65536;  // scores: the guess of a part, and the fork, take as long as 16,384 of them

// One list for each thread: of a worker, or of a part.
struct Lists {
  Lists(base::Scratch& scratch, std::int64_t threads, std::int64_t width, std::int64_t k)
      : capacity(std::min(width, 2 * std::min(k, width) + kListSlack)),
        stride(capacity + kListPad),
        id(scratch.take<std::int32_t>(threads * stride)),
        key(scratch.take<std::int32_t>(threads * stride)),
        count(scratch.take<std::int64_t>(threads)) {}
  Candidates operator[](std::int64_t i) const { return {id + i * stride, key + i * stride, capacity, 0}; }

  std::int64_t capacity, stride;
  std::int32_t *id, *key;
  std::int64_t* count;
};

}  // namespace

template <const Tier& kTier>
void select_cpu(const TopkArgs& args, const base::Exec& exec) {
  const std::int64_t rows = args.scores.dim(0), width = args.scores.dim(1), most = width_of_outputs(args);
  const std::int64_t threads = exec.backend.threads();
  const std::int64_t parts = std::max<std::int64_t>(1, std::min(threads / rows, width / kLeastPart));
  base::Scratch scratch(exec.workspace.data);
  const Lists lists(scratch, threads, width, most);

  const auto collect = [&](std::int64_t t, std::int64_t part, std::int64_t i) {
    const std::span<const float> scores = visible_scores(args, t);
    const std::int64_t n = static_cast<std::int64_t>(scores.size()), k = std::min(most, n);
    Candidates list = lists[i];
    if (k < n) kTier.collect(scores.data(), n, n * part / parts, n * (part + 1) / parts, k, true, &list);
    lists.count[i] = list.count;
  };
  const auto finish = [&](std::int64_t t, std::int64_t first) {
    const std::span<const float> scores = visible_scores(args, t);
    const std::int64_t n = static_cast<std::int64_t>(scores.size()), k = std::min(most, n);
    Candidates list = lists[first];
    for (std::int64_t i = first; i < first + parts; list.count += lists.count[i++])
      if (i > first)
        std::memmove(list.id + list.count, lists[i].id, static_cast<std::size_t>(lists.count[i]) * sizeof *list.id);
    if (k == n) {
      std::iota(list.id, list.id + n, 0);
    } else {
      if (list.count < k) kTier.collect(scores.data(), n, 0, n, k, false, &list);
      kTier.keep(scores.data(), k, &list);
    }
    store_row(args, t, {list.id, static_cast<std::size_t>(k)});
  };

  cpu::parallel_for(exec.backend, rows * parts, [&](std::int64_t i, int worker) {
    const std::int64_t list = parts > 1 ? i : worker;
    collect(i / parts, i % parts, list);
    if (parts == 1) finish(i, list);
  });
  if (parts > 1) cpu::parallel_for(exec.backend, rows, [&](std::int64_t t, int) { finish(t, t * parts); });
}

std::int64_t select_cpu_bytes(const Backend& backend, const TopkBounds& bounds) {
  if (bounds.rows <= 0 || bounds.k <= 0) return 0;
  base::Scratch scratch;
  Lists(scratch, backend.threads(), bounds.width, bounds.k);
  return scratch.bytes();
}

template void select_cpu<kPortable>(const TopkArgs&, const base::Exec&);
#if defined(__x86_64__)
template void select_cpu<kAvx2>(const TopkArgs&, const base::Exec&);
template void select_cpu<kAvx512>(const TopkArgs&, const base::Exec&);
#endif

}  // namespace sievemla::stage::topk
