// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/choice.h -- how many heads a CTA serves and in how many parts a unit's lanes are cut. Plain C++.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "cuda/launch.h"

namespace sievemla::stage::attention {

// What the choice knows of a tile.
struct TileShape {
  int heads;     // of a CTA
  int tokens;    // lanes of a tile
  int ctas;      // on a multiprocessor
  int tile_cost; // time of a tile on a full multiprocessor, in any unit that all tiles of a config share
};

struct Problem {
  std::int64_t units;
  int heads;           // of a unit: fold * heads
  std::int64_t lanes;  // at most, of a unit
  bool lengths_vary;   // and are known on the device only
  bool invariant;      // a unit's cut must not depend on other units
  int multiprocessors;
};

struct Choice {
  int tile = 0;         // index of the tile
  int groups = 1;       // of heads
  int parts = 1, chunk = 0, target = 0;  // as in CudaParams
  bool merge_here = true;
  std::int64_t items = 0;  // most parts of all units together
};

inline constexpr std::int64_t kMergeBytes = 256 << 10;  // most that one CTA merges
inline constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;
inline constexpr int kFixedTiles = 4;        // start, first gather, merge: in tiles of a CTA
inline constexpr int kInvariantLanes = 512;  // of a part in batch-invariant mode
inline constexpr int kLatentBytes = 512 * 4;

// Time of the call, were all units full.
inline double cost_of(const TileShape& t, const Problem& x, int parts) {
  const std::int64_t ctas = x.units * cuda::ceil_div(x.heads, t.heads) * parts;
  const std::int64_t slots = std::int64_t{x.multiprocessors} * t.ctas;
  const std::int64_t tiles = cuda::ceil_div<std::int64_t>(x.lanes, t.tokens);
  const double per_part = static_cast<double>(cuda::ceil_div<std::int64_t>(tiles, parts) + kFixedTiles);
  // A wave that leaves multiprocessors half empty runs its tiles faster, down to about a third of the full cost.
  const std::int64_t waves = ctas / slots, rest = ctas % slots;
  const double full = static_cast<double>(waves) * t.tile_cost * per_part;
  const double share = static_cast<double>(cuda::ceil_div<std::int64_t>(rest, x.multiprocessors)) / t.ctas;
  return full + (rest ? std::max(share, 0.4) * t.tile_cost * per_part : 0.0);
}

inline Choice choose(std::span<const TileShape> tiles, const Problem& x) {
  Choice best;
  double least = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const TileShape& t = tiles[i];
    if (t.heads >= 2 * x.heads && t.heads > tiles[0].heads) continue;  // more than half of it would idle
    const int groups = cuda::ceil_div(x.heads, t.heads);
    const std::int64_t all_tiles = std::max<std::int64_t>(1, cuda::ceil_div<std::int64_t>(x.lanes, t.tokens));
    const std::int64_t merge_parts = kMergeBytes / (std::int64_t{t.heads} * kLatentBytes);
    const std::int64_t most = x.units * groups <= cuda::kAttentionTickets ? std::min(all_tiles, merge_parts) : 1;
    for (int parts = 1; parts <= most; ++parts) {
      const double cost = cost_of(t, x, parts);
      if (best.items && cost >= least) continue;
      least = cost;
      best = {static_cast<int>(i), groups, parts, 0, 0, true, x.units * parts};
    }
  }
  return best;
}

}  // namespace sievemla::stage::attention
