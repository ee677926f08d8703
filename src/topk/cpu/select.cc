// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/select.cc -- exact top-k of a row: narrow the range that holds the k-th largest key, keep what reaches it.
//
//   1. narrow   histogram of the keys' upper 11 bits: the bin that holds the k-th largest. Where scores lie so close
//               that the bin is too full for the next step, find its least and largest key and cut that range up again.
//   2. compact  the keys in the bin and above it -> a short list, still in ascending position
//   3. narrow   the list, until the range is one key, or all that is left in it is taken
//   4. take     what lies above the range, and what lies in it at the lowest positions
//
// The row is mostly read twice, nothing is sorted, and no step depends on threads or order: equal bits give equal ids.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "base/scratch.h"
#include "cpu/threads.h"
#include "topk/rows.h"

namespace sievemla::stage::topk {
namespace {

// Larger score <=> larger key: sign and magnitude become two's complement, where -0 and +0 are one. NaN becomes -inf.
// In integers, because a host may run with denormals flushed.
using Key = std::int32_t;
constexpr Key key_of(float score) {
  constexpr std::int32_t kInfinity = 0x7F800000;
  const std::int32_t bits = std::bit_cast<std::int32_t>(score), sign = bits >> 31, magnitude = bits & 0x7FFFFFFF;
  return magnitude > kInfinity ? -kInfinity : (magnitude ^ sign) - sign;
}
static_assert(key_of(-0.f) == key_of(0.f) && key_of(0x1p-149f) == key_of(0.f) + 1 && key_of(-1.f) < key_of(-0.5f));

// Both sources hand out keys in ascending position, a block at a time.
constexpr std::int64_t kBlock = 64;

struct Row {
  std::span<const float> scores;
  std::int64_t size() const { return static_cast<std::int64_t>(scores.size()); }
  const Key* keys(std::int64_t begin, std::int64_t n, Key* buffer) const {
    const float* from = scores.data() + begin;
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = key_of(from[i]);
    return buffer;
  }
  std::int32_t position(std::int64_t i) const { return static_cast<std::int32_t>(i); }
};

struct List {
  const Key* key;
  const std::int32_t* at;
  std::int64_t count;
  std::int64_t size() const { return count; }
  const Key* keys(std::int64_t begin, std::int64_t, Key*) const { return key + begin; }
  std::int32_t position(std::int64_t i) const { return at[i]; }
};

template <class Source, class Body>
void for_each_block(const Source& source, Body&& body) {
  Key buffer[kBlock];
  std::int64_t begin = 0;
  for (; begin + kBlock <= source.size(); begin += kBlock) body(begin, kBlock, source.keys(begin, kBlock, buffer));
  if (const std::int64_t rest = source.size() - begin) body(begin, rest, source.keys(begin, rest, buffer));
}

// Keys from `low` to `high`, among them the k-th largest.
struct Range {
  Key low = key_of(-std::numeric_limits<float>::infinity()), high = key_of(std::numeric_limits<float>::infinity());
  std::int64_t count;  // keys in the range
  std::int64_t need;   // how many of them are among the k largest: at least 1
  bool done() const { return low == high || need == count; }
};

// The same keys, from the least to the largest that there is.
template <class Source>
Range tighten(const Source& source, Range range) {
  const Key bottom = range.low, top = range.high;
  Key low = top, high = bottom;
  for_each_block(source, [&, bottom, top](std::int64_t, std::int64_t n, const Key* keys) {
    Key least = low, most = high;
    for (std::int64_t i = 0; i < n; ++i) {
      const Key key = keys[i];
      const bool inside = (key >= bottom) & (key <= top);  // in this form compilers vectorise the loop
      const Key up = inside ? key : top, down = inside ? key : bottom;
      least = std::min(least, up);
      most = std::max(most, down);
    }
    low = least, high = most;
  });
  return {low, high, range.count, range.need};
}

constexpr int kBinBits = 11;  // 3 digits are 32 bits; the counters stay in the L1 cache
constexpr int kBins = 1 << kBinBits;
constexpr int kCopies = 4;  // of the counters: neighbours in one bin do not wait for each other's store
using Histogram = std::uint32_t[kCopies][kBins];

// One bin of the range, out of up to 2048 of equal size.
template <class Source>
Range narrow(const Source& source, Range range, Histogram& histogram) {
  const std::uint32_t first = static_cast<std::uint32_t>(range.low),
                      span = static_cast<std::uint32_t>(range.high) - first;
  const int shift = std::max(0, static_cast<int>(std::bit_width(span)) - kBinBits);
  const std::uint32_t bins = (span >> shift) + 1;
  for (auto& copy : histogram) std::fill_n(copy, bins, 0u);
  for_each_block(source, [&](std::int64_t, std::int64_t n, const Key* keys) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t above = static_cast<std::uint32_t>(keys[i]) - first;
      const bool inside = above <= span;
      histogram[i % kCopies][inside ? above >> shift : 0] += inside;
    }
  });
  for (std::uint32_t bin = bins - 1;; --bin) {
    std::int64_t count = 0;
    for (const auto& copy : histogram) count += copy[bin];
    if (count >= range.need) {
      const std::uint32_t low = bin << shift, high = std::min(low + ((1u << shift) - 1), span);
      return {static_cast<Key>(first + low), static_cast<Key>(first + high), count, range.need};
    }
    range.need -= count;
  }
}

bool any_at_least(const Key* keys, std::int64_t n, Key bound) {
  int any = 0;
  for (std::int64_t i = 0; i < n; ++i) any |= keys[i] >= bound;
  return any != 0;
}

// The keys at or above `low`, with their positions. One entry past the last is written too.
List compact(const Row& row, Key low, Key* keys_out, std::int32_t* at) {
  std::int64_t n = 0;
  for_each_block(row, [&](std::int64_t begin, std::int64_t size, const Key* keys) {
    for (std::int64_t i = 0; i < size; ++i) {
      keys_out[n] = keys[i];
      at[n] = static_cast<std::int32_t>(begin + i);
      n += keys[i] >= low;
    }
  });
  return {keys_out, at, n};
}

// The positions of the k largest, ascending. `out` may be the source's own; one entry past the k-th is written too.
template <class Source>
void take(const Source& source, const Range& range, std::int32_t* out) {
  std::int64_t n = 0, ties = range.need;
  for_each_block(source, [&](std::int64_t begin, std::int64_t size, const Key* keys) {
    if (!any_at_least(keys, size, ties > 0 ? range.low : range.high + 1)) return;
    for (std::int64_t i = 0; i < size; ++i) {
      const bool above = keys[i] > range.high, tie = !above && keys[i] >= range.low && ties > 0;
      out[n] = source.position(begin + i);
      n += above || tie;
      ties -= tie;
    }
  });
}

// A worker's part of the workspace. The list has room for the k winners, and for as many again and 8192 more in the bin
// of the cut (sign, exponent and two bits of the mantissa): enough for 2048 of a million normally distributed scores. A
// fuller bin costs passes over the row.
struct WorkerScratch {
  WorkerScratch(base::Scratch& scratch, std::int64_t width, std::int64_t k)
      : capacity(std::min(width, 2 * std::min(k, width) + 8192)),
        histogram(scratch.take<Histogram>(1)),
        keys(scratch.take<Key>(capacity + 1)),
        ids(scratch.take<std::int32_t>(capacity + 1)) {}
  std::int64_t capacity;
  Histogram* histogram;
  Key* keys;
  std::int32_t* ids;
};

// The positions of the k largest of more than k scores.
void select_row(std::span<const float> scores, std::int64_t k, const WorkerScratch& scratch) {
  Histogram& histogram = *scratch.histogram;
  const Row row{scores};
  Range range{.count = row.size(), .need = k};
  auto fits = [&] { return k - range.need + range.count <= scratch.capacity; };

  range = narrow(row, range, histogram);
  while (!fits() && !range.done()) {
    range = tighten(row, range);
    if (!range.done()) range = narrow(row, range, histogram);
  }
  if (!fits()) return take(row, range, scratch.ids);  // more ties than the list holds

  const List list = compact(row, range.low, scratch.keys, scratch.ids);
  while (!range.done()) range = narrow(list, range, histogram);
  take(list, range, scratch.ids);
}

std::int64_t worker_bytes(std::int64_t width, std::int64_t k) {
  base::Scratch scratch;
  const WorkerScratch counted(scratch, width, k);
  return scratch.bytes();
}

}  // namespace

void select_cpu(const TopkArgs& args, const base::Exec& exec) {
  const std::int64_t width = args.scores.dim(1), most = width_of_outputs(args), stride = worker_bytes(width, most);
  cpu::parallel_for(exec.backend, args.scores.dim(0), [&](std::int64_t t, int worker) {
    base::Scratch memory(static_cast<std::byte*>(exec.workspace.data) + worker * stride);
    const WorkerScratch scratch(memory, width, most);
    const std::span<const float> scores = visible_scores(args, t);
    const std::int64_t n = static_cast<std::int64_t>(scores.size()), k = std::min(most, n);
    if (k < n) select_row(scores, k, scratch);
    else
      for (std::int32_t p = 0; p < n; ++p) scratch.ids[p] = p;
    store_row(args, t, {scratch.ids, static_cast<std::size_t>(k)});
  });
}

std::int64_t select_cpu_workspace_bytes(const Backend& backend, const TopkBounds& bounds) {
  return bounds.rows > 0 && bounds.k > 0 ? backend.threads() * worker_bytes(bounds.width, bounds.k) : 0;
}

}  // namespace sievemla::stage::topk
