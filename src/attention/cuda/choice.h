// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/choice.h -- how many heads a CTA serves and in how many parts a unit's lanes are cut. Plain C++.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/cuda/params.h"
#include "cuda/launch.h"

namespace sievemla::stage::attention {

// Clocks of the H200, measured: a tile of 32 lanes in a CTA that is alone; what a tile takes where every multiprocessor
// has a CTA, which share memory, or more of them; what a CTA costs beside its tiles. Other GPUs differ by a factor,
// which does not change the choice much.
struct Clocks {
  double alone, shared, start;
};
constexpr Clocks clocks_of(int heads) {
  if (heads <= 16) return {3300, 2200, 11000};
  if (heads <= 32) return {4300, 2750, 16000};
  return {5200, 5200, 16000};
}
// Of 16 heads beside sm_90's other tiles: the shortest start, so it is right where a CTA has a tile or two.
constexpr Clocks short_start_clocks() { return {3300, 2200, 9000}; }
// Of groups that take tiles in turns (by sm_80's tiles).
constexpr Clocks turns_clocks(int heads, bool scaled) {
  if (heads <= 8) return scaled ? Clocks{1600, 1600, 20000} : Clocks{2550, 2550, 20000};
  return scaled ? Clocks{2200, 2200, 20000} : Clocks{2700, 2700, 20000};
}
constexpr Clocks few_heads_clocks(int heads, bool scaled) {
  if (heads <= 8) return scaled ? Clocks{1250, 1250, 14000} : Clocks{1250, 2100, 14000};
  if (heads <= 16) return scaled ? Clocks{1550, 1550, 14700} : Clocks{1300, 2240, 14700};
  return scaled ? Clocks{2000, 2000, 20000} : Clocks{1700, 2600, 20000};
}
constexpr Clocks warp_group_clocks(bool scaled) {
  return scaled ? Clocks{2400, 2400, 15000} : Clocks{2450, 2450, 15000};
}

// What the choice knows of a tile.
struct TileShape {
  int heads;    // of a CTA
  int tokens;   // lanes of a tile
  int ctas;     // on a multiprocessor
  int cluster;  // most CTAs that can be a cluster and merge their parts; 1 where there are no clusters
  int meeting;  // most parts that can merge together through memory, beside clusters; 0: none
  Clocks clocks;
  int turns = 1;  // tiles that a CTA works on side by side: fewer take no less time
};

struct Workload {
  std::int64_t units;
  std::int64_t heads;  // of a unit: fold * heads
  std::int64_t lanes;  // at most, of a unit
  bool lengths_vary;   // and are known on the device only
  bool invariant;      // a unit's cut must not depend on other units
  int multiprocessors;
  cuda::ClusterCounts clusters = cuda::kH200Clusters;
};

struct Choice {
  std::size_t tile = 0;       // which
  std::int64_t groups = 1;    // of heads
  int parts = 1, target = 0;  // as in CudaParams
  Merge merge = Merge::last;
  std::int64_t items = 0;  // most parts of all units together, without those of:
  // The last units, which a second launch computes on multiprocessors where no cluster of the first fits; their parts
  // merge together.
  std::int64_t beside = 0;
  int beside_parts = 0;
};

inline constexpr std::int64_t kHeadBytes = 512 * 4;     // of a partial result
inline constexpr std::int64_t kMergeBytes = 256 << 10;  // most that the last CTA to arrive merges,
inline constexpr int kMergeHereParts = 4;               // and of how many parts; beyond, a kernel is quicker
inline constexpr int kMostParts = 32;                   // of equal length
inline constexpr std::int64_t kPartialHeads = (64 << 20) / kHeadBytes;  // most partial results in all
inline constexpr int kUnevenUnits = 4096;                               // most that are cut unevenly
inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeParts = 2048;  // most that the merge kernel takes

// Whether parts can be merged so.
inline bool merges(const TileShape& t, const cuda::ClusterCounts& clusters, std::int64_t parts, Merge merge) {
  switch (merge) {
    case Merge::last: return parts <= kMergeHereParts && parts * t.heads * kHeadBytes <= kMergeBytes && t.cluster == 1;
    case Merge::cluster: return parts <= t.cluster && clusters[static_cast<std::size_t>(parts)] > 0;
    case Merge::kernel: return parts > 1;
    case Merge::together: return parts <= t.meeting;
  }
  return false;
}

inline double clocks(const TileShape& t, const Workload& x, int parts, Merge how) {
  const Clocks& c = t.clocks;
  const std::int64_t ctas = x.units * cuda::ceil_div<std::int64_t>(x.heads, t.heads) * parts;
  const std::int64_t at_once =
      how == Merge::cluster ? parts * x.clusters[static_cast<std::size_t>(parts)] : x.multiprocessors;
  const std::int64_t crowd = std::clamp<std::int64_t>(cuda::ceil_div<std::int64_t>(ctas, at_once), 1, t.ctas);
  const std::int64_t waves = cuda::ceil_div<std::int64_t>(ctas, at_once * crowd);
  const std::int64_t part = cuda::ceil_div(cuda::ceil_div<std::int64_t>(x.lanes, t.tokens), std::int64_t{parts}),
                     tiles = cuda::ceil_div<std::int64_t>(part, t.turns) * t.turns;
  const double load = static_cast<double>(std::min(ctas, at_once * crowd)) / static_cast<double>(x.multiprocessors);
  const double tile = std::max(c.alone, c.shared * load) * t.tokens / 32;
  const double all_heads = static_cast<double>(x.units * x.heads);
  double merge = 0;
  if (parts > 1) {
    switch (how) {
      case Merge::last: merge = 3000 + 60. * parts * t.heads; break;
      case Merge::cluster: merge = 3000; break;
      case Merge::together: merge = 4500; break;
      case Merge::kernel: merge = 4500 + std::min(70 * all_heads, 5500.) + all_heads; break;
    }
  }
  return static_cast<double>(waves) * (c.start + static_cast<double>(tiles) * tile) + merge;
}

// Rows of CTAs of the merge kernel, which has one column of CTAs a head: where heads are few, their columns are shared
// out.
inline int merge_rows(std::int64_t heads, int multiprocessors) {
  return heads <= multiprocessors ? 4 : heads <= 2 * multiprocessors ? 2 : 1;
}

// A wave of clusters of `parts` CTAs, the units that it leaves beside it, and the clocks of both. No units: none are
// left, or they do not fit there.
struct Wave {
  std::int64_t beside;
  int parts;  // of each
  double clocks;
};
inline Wave wave_of_clusters(const TileShape& t, const Workload& x, std::int64_t groups, int parts) {
  constexpr double kSecondLaunch = 2000;
  const std::int64_t units = x.clusters[static_cast<std::size_t>(parts)] / groups, beside = x.units - units;
  const std::int64_t left = x.multiprocessors - units * groups * parts;
  if (units <= 0 || beside <= 0 || beside * groups > left) return {};
  const std::int64_t tiles = cuda::ceil_div<std::int64_t>(x.lanes, t.tokens),
                     most = std::min({left / (beside * groups), tiles, std::int64_t{t.meeting}});
  if (most < 2) return {};
  const auto each = static_cast<int>(cuda::ceil_div(tiles, cuda::ceil_div(tiles, most)));  // more would gain nothing
  Workload first = x, second = x;
  first.units = units, second.units = beside;
  return {beside, each,
          std::max(clocks(t, first, parts, Merge::cluster), kSecondLaunch + clocks(t, second, each, Merge::together))};
}

// `tiles` by ascending heads.
inline Choice choose(std::span<const TileShape> tiles, const Workload& x) {
  Choice best;
  double least = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const TileShape& t = tiles[i];
    const std::int64_t groups = cuda::ceil_div<std::int64_t>(x.heads, t.heads), rows = x.units * groups * t.heads;
    const std::int64_t all_tiles = std::max<std::int64_t>(1, cuda::ceil_div<std::int64_t>(x.lanes, t.tokens));
    std::int64_t most = std::min<std::int64_t>(all_tiles, kMostParts);
    if (x.units * groups > cuda::kAttentionTickets || rows == 0) most = 1;
    else most = std::max<std::int64_t>(1, std::min(most, kPartialHeads / rows));
    if (x.invariant) {  // by heads alone, and never cut
      if (i > 0 && x.heads <= tiles[i - 1].heads) break;
      best = {i, groups, 1, 0, Merge::last, x.units};
      continue;
    }
    for (int parts = 1; parts <= most; ++parts)  // units that meet beside clusters come below
      for (const Merge merge : {Merge::last, Merge::cluster, Merge::kernel}) {
        if (parts > 1 && !merges(t, x.clusters, parts, merge)) continue;
        const double cost = clocks(t, x, parts, merge);
        if (best.items > 0 && cost >= least) continue;
        least = cost;
        best = {i, groups, parts, 0, merge, x.units * parts};
      }
    for (int parts = 2; parts <= std::min<std::int64_t>(most, t.cluster) && t.meeting > 0 && !x.lengths_vary; ++parts)
      if (const Wave wave = wave_of_clusters(t, x, groups, parts); wave.beside > 0 && wave.clocks < least) {
        least = wave.clocks;
        best = {i, groups, parts, 0, Merge::cluster, (x.units - wave.beside) * parts, wave.beside, wave.parts};
      }
  }
  const TileShape& t = tiles[best.tile];
  if (x.lengths_vary && !x.invariant && x.lanes > t.tokens) {
    const std::int64_t target = std::max<std::int64_t>(1, std::int64_t{x.multiprocessors} * t.ctas / best.groups);
    const std::int64_t tiles_in_all = x.units * cuda::ceil_div<std::int64_t>(x.lanes, t.tokens);
    const std::int64_t items = std::min(x.units + target, tiles_in_all);  // no part is less than a tile
    if (x.units < 2 * target && x.units <= kUnevenUnits && target <= kMergeParts &&
        items * best.groups * t.heads <= kPartialHeads) {
      best.parts = 0, best.target = static_cast<int>(target), best.items = items, best.merge = Merge::kernel;
    } else if (best.parts > 1) {
      best.parts = 1, best.items = x.units, best.merge = Merge::last;  // equal parts of unequal units are of no use
    }
  }
  return best;
}

// How many parts of a choice leave partial results, at most.
inline std::int64_t partial_items(const Choice& c) {
  return c.beside > 0 ? c.beside * c.beside_parts : c.parts == 1 ? 0 : c.items;
}
// Enough partial results for any call within the bounds.
inline std::int64_t partial_heads(std::int64_t tokens, std::int64_t heads, std::int64_t lanes) {
  const std::int64_t padded = cuda::ceil_div<std::int64_t>(heads, 64) * 64;
  const std::int64_t parts = std::max<std::int64_t>(1, cuda::ceil_div<std::int64_t>(lanes, 16));
  if (parts == 1) return 0;
  if (tokens > kPartialHeads / padded) return kPartialHeads;
  return std::min(kPartialHeads, tokens * padded * std::min(parts, kPartialHeads));
}

}  // namespace sievemla::stage::attention
