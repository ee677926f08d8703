// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cpu/select-inl.h -- exact top-k in one pass over the row, written once for all instruction sets.
//
//   guess    a bound that somewhat more than k scores reach, from a sample of the row
//   collect  the positions whose score reaches the bound -> a list. If it fills up, keep the k best of it: from there
//            on a score has to exceed the least of those
//   keep     the k-th largest key of the list, by bisection; what exceeds it, and of its equals the first
//
// The guess decides how long it takes, never what comes out: where it was too high, fewer than k are found, and the
// caller collects again without one.
//
// A tier's file defines `Ops` and includes this inside its own unnamed namespace.
#pragma once

using Key = std::int32_t;
constexpr Index kLanes = Ops::kLanes;
constexpr Index kUnroll = 4, kStep = kUnroll * kLanes;  // keys are counted so many at a time
static_assert(kStep <= kListPad);

constexpr Index least(Index a, Index b) { return a < b ? a : b; }
constexpr Index most(Index a, Index b) { return a > b ? a : b; }

// ---- keys -------------------------------------------------------------------------------------------

// Larger score <=> larger key: sign and magnitude become two's complement, where -0 and +0 are one. NaN becomes -inf.
// In integers, because a host may run with denormals flushed. (Ops::keys does the same.)
constexpr Key kInfinity = 0x7F800000, kLowest = -kInfinity;
constexpr Key kNone = -kInfinity - 1;  // no score's

inline Key key_of(float score) {
  Key bits;
  __builtin_memcpy(&bits, &score, sizeof bits);
  const Key sign = bits >> 31, magnitude = bits & 0x7FFFFFFF;
  return magnitude > kInfinity ? kLowest : (magnitude ^ sign) - sign;
}
inline float score_of(Key key) {  // of kInfinity + 1: a NaN, which nothing reaches
  const Key bits = key < 0 ? -key | static_cast<Key>(0x80000000) : key;
  float score;
  __builtin_memcpy(&score, &bits, sizeof score);
  return score;
}

// Fills list.key, and kNone up to a multiple of kStep.
struct Keys {
  const Key* key;
  Index count, padded;
  Key low = kInfinity, high = kLowest;  // the least and the largest

  Keys(const float* row, const Candidates& list) : key(list.key), count(list.count), padded(0) {
    Index& i = padded;
    if (count >= kLanes) {
      typename Ops::Vec least_key = Ops::set1(kInfinity), most_key = Ops::set1(kLowest);
      for (; i + kLanes <= count; i += kLanes) {
        const typename Ops::Vec keys = Ops::keys(row, list.id + i);
        Ops::store(list.key + i, keys);
        least_key = Ops::min(least_key, keys), most_key = Ops::max(most_key, keys);
      }
      Key lows[kLanes], highs[kLanes];
      Ops::store(lows, least_key), Ops::store(highs, most_key);
      for (Index j = 0; j < kLanes; ++j) include(lows[j]), include(highs[j]);
    }
    for (; i < count; ++i) include(list.key[i] = key_of(row[list.id[i]]));
    for (; i % kStep != 0; ++i) list.key[i] = kNone;
  }

  Index at_least(Key bound) const {
    const typename Ops::Vec bounds = Ops::set1(bound);
    typename Ops::Vec sum[kUnroll];
    for (Index j = 0; j < kUnroll; ++j) sum[j] = Ops::set1(0);
    for (Index i = 0; i < padded; i += kStep)
      for (Index j = 0; j < kUnroll; ++j) sum[j] = Ops::count(sum[j], Ops::load(key + i + j * kLanes), bounds);
    Index total = 0;
    for (Index j = 0; j < kUnroll; ++j) {
      Key lanes[kLanes];
      Ops::store(lanes, sum[j]);
      for (Index l = 0; l < kLanes; ++l) total += lanes[l];
    }
    return total;
  }

 private:
  void include(Key x) {
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
};

// The k largest are those above `at`, and the first `ties` of those at it.
struct Cut {
  Key at;
  Index ties;
};
inline Cut cut(const Keys& keys, Index k) {  // 1 <= k <= keys.count
  Key low = keys.low, high = keys.high;      // the k-th largest lies in [low, high]
  Index above = 0;                           // keys above `high`
  while (low < high) {
    const std::uint32_t bottom = static_cast<std::uint32_t>(low),
                        half = (static_cast<std::uint32_t>(high) - bottom) / 2;
    const Key middle = static_cast<Key>(bottom + half + 1);
    const Index n = keys.at_least(middle);
    if (n == k) return {middle - 1, 0};
    if (n > k) low = middle;
    else high = middle - 1, above = n;
  }
  return {low, k - above};
}

// ---- the list ---------------------------------------------------------------------------------------

// Returns a key that any later position has to reach to be among the k largest.
inline Key keep_largest(const float* row, Index k, Candidates* list) {
  if (list->count <= k) return kLowest;
  const Keys keys(row, *list);
  const Cut bound = cut(keys, k);
  Index n = 0, ties = bound.ties;
  for (Index i = 0; i < keys.padded; i += kLanes) {
    const typename Ops::Vec x = Ops::load(keys.key + i);
    std::uint32_t tied = ties > 0 ? Ops::equal(x, Ops::set1(bound.at)) : 0;
    while (__builtin_popcount(tied) > ties) tied &= ~(0x80000000u >> __builtin_clz(tied));  // the last goes
    ties -= __builtin_popcount(tied);
    n += Ops::compress(list->id + i, Ops::above(x, Ops::set1(bound.at)) | tied, list->id + n);
  }
  list->count = n;
  return bound.at + 1;
}

inline void keep(const float* row, Index k, Candidates* list) { keep_largest(row, k, list); }

// Appends the positions of [i, end) whose score reaches `low`: no test of a key, but -0 equals +0 and where denormals
// are flushed some that do not reach it come along.
inline void append(const float* row, Index i, Index end, Key low, Candidates* list) {
  Key* to = list->id + list->count;
  if (low == kLowest) {  // NaN too
    for (Index j = i; j < end; ++j) *to++ = static_cast<Key>(j);
  } else {
    const float bound = score_of(low);
    for (; i + kLanes <= end; i += kLanes) to += Ops::find(row + i, bound, static_cast<Key>(i), to);
    for (; i < end; ++i) {
      *to = static_cast<Key>(i);
      to += row[i] >= bound;
    }
  }
  list->count = to - list->id;
}

// A key that somewhat more than k scores of the row reach, mostly: one of rank a little above the expected one in a
// sample at uneven distances. The list is overwritten.
inline Key guess_bound(const float* row, Index size, Index k, Candidates* list) {
  constexpr Index kPeriod = 64;
  const Index samples = least(most(size / 64, 1024), kListSlack), stride = size / samples;
  const Index expected = k * samples / size;
  Index deviation = 0;
  while (deviation * deviation < expected) ++deviation;
  const Index rank = expected + 4 * deviation + 4;
  if (rank >= samples) return kLowest;
  for (Index i = 0; i < kPeriod; ++i) {
    const Index shift = i * 37 % kPeriod;
    list->id[i] = static_cast<Key>(i * stride + shift * stride / kPeriod);
  }
  for (Index i = kPeriod; i < samples; ++i) list->id[i] = list->id[i - kPeriod] + static_cast<Key>(kPeriod * stride);
  list->count = samples;
  const Cut bound = cut(Keys(row, *list), rank);
  return bound.at + (bound.ties == 0);
}

inline void collect(const float* row, Index size, Index begin, Index end, Index k, bool guess, Candidates* list) {
  constexpr Index kLeastRoom = 1024;
  Key low = guess && size > list->capacity ? guess_bound(row, size, k, list) : kLowest;
  list->count = 0;
  for (Index i = begin; i < end;) {
    const Index room = list->capacity - list->count, n = least(room, end - i);
    if (n < end - i && n < kLeastRoom) {
      low = keep_largest(row, k, list);
      continue;
    }
    append(row, i, i + n, low, list);
    i += n;
  }
}

constexpr Tier kTier = {collect, keep};
