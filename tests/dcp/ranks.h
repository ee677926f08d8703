// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/dcp/ranks.h -- ranks of decode context parallel in one process: rows of scores dealt to them, each rank's own
// selection, the exchange, and the merge on every rank. On host memory, or on a device by another Place.
#pragma once
#include <bit>

#include "sievemla/context_parallel.h"
#include "topk/problem.h"

namespace sievemla::test {

// Where a call's tensors are: put() before it, take_back() after it.
struct OnHost {
  explicit OnHost(const Backend&) {}
  template <class T>
  T put(T args) {
    return args;
  }
  void take_back(const TensorView&) {}
  struct Space : PoisonedWorkspace {
    Space(const Backend&, std::int64_t bytes) : PoisonedWorkspace(bytes) {}
  };
};

inline bool holds(const Shard& shard, std::int64_t position) {
  return position / shard.interleave % shard.ranks == shard.rank;
}

inline std::vector<Scores> part_of(const std::vector<Scores>& rows, const Shard& shard) {
  std::vector<Scores> part(rows.size());
  for (std::size_t t = 0; t < rows.size(); ++t)
    for (std::size_t p = 0; p < rows[t].size(); ++p)
      if (holds(shard, static_cast<std::int64_t>(p))) part[t].push_back(rows[t][p]);
  return part;
}

// What all ranks sent, [ranks, 2, rows, n]: bits of scores, then positions. Lanes without a candidate are poison: the
// best of scores, and (where lengths are given) a position that is there.
struct Exchange {
  std::int64_t ranks, rows, n;
  Ids words, lengths;
  std::int32_t* at(std::int64_t rank, int plane, std::int64_t t) {
    return words.data() + ((rank * 2 + plane) * rows + t) * n;
  }
  TensorView plane(int which) const {
    TensorView view = tensor(words.data() + which * rows * n, {ranks, rows, n});
    view.stride[0] = 2 * rows * n;
    return view;
  }
  TensorView scores() const {
    TensorView view = plane(0);
    view.dtype = DType::f32;
    return view;
  }
};

template <class Place>
Exchange exchange(const Backend& backend, const std::vector<Scores>& rows, std::int64_t k, int ranks, int interleave,
                  bool with_lengths) {
  const auto count = static_cast<std::int64_t>(rows.size());
  Exchange all{ranks, count, k, Ids(static_cast<std::size_t>(ranks * 2 * count * k), kUnwritten), {}};
  for (int rank = 0; rank < ranks; ++rank) {
    const Shard shard{rank, ranks, interleave};
    const TopkProblem problem(part_of(rows, shard), static_cast<std::uint64_t>(rank + 1));
    const TensorView local = tensor(all.at(rank, 1, 0), {count, k});
    TensorView scores = tensor(all.at(rank, 0, 0), {count, k});
    scores.dtype = DType::f32;
    Place place(backend);
    const TopkArgs given = problem.args();
    TopkArgs args = given;
    args.positions = local;
    args = place.put(args);
    topk(backend, args, typename Place::Space(backend, topk_workspace_bytes(backend, {count, problem.width(), k})));
    CandidatesArgs sent{args.scores, args.starts,       args.positions,
                        shard,       place.put(scores), args.positions};  // in place
    topk_candidates(backend, sent);
    place.take_back(scores), place.take_back(local);
    for (std::int64_t t = 0; t < count; ++t) {
      std::int32_t *const bits = all.at(rank, 0, t), *const positions = all.at(rank, 1, t);
      const auto mine = std::find(positions, positions + k, -1) - positions;
      for (std::int64_t i = mine; i < k; ++i) {
        EXPECT_EQ(bits[i], std::bit_cast<std::int32_t>(-kInf));
        EXPECT_EQ(positions[i], -1);
        bits[i] = std::bit_cast<std::int32_t>(kInf);
        if (with_lengths) positions[i] = static_cast<std::int32_t>(i % 3);
      }
      if (with_lengths) all.lengths.push_back(static_cast<std::int32_t>(mine));
    }
  }
  return all;
}

// The merge on one rank. Slots are local positions in a table of one page.
struct Merged {
  Ids selected, slots, counts;
};
template <class Place>
Merged merge(const Backend& backend, const Exchange& all, std::int64_t k, const Shard& shard) {
  const std::int64_t rows = all.rows;
  Guarded<std::int32_t> selected(rows * k, kUnwritten), slots(rows * k, kUnwritten), counts(rows, kUnwritten);
  const Ids table(static_cast<std::size_t>(rows), 0);
  MergeTopkArgs args;
  args.scores = all.scores(), args.positions = all.plane(1);
  if (!all.lengths.empty()) args.lengths = tensor(all.lengths.data(), {all.ranks, rows});
  const TensorView to[] = {tensor(selected.data(), {rows, k}), tensor(slots.data(), {rows, k}),
                           tensor(counts.data(), {rows})};
  args.selected = to[0], args.slots = to[1], args.counts = to[2];
  args.map = {tensor(table.data(), {rows, 1}), {}, 1 << 20, shard};
  Place place(backend);
  merge_topk(backend, place.put(args),
             typename Place::Space(backend, merge_topk_workspace_bytes(backend, {all.ranks, rows, all.n, k})));
  for (const TensorView& view : to) place.take_back(view);
  EXPECT_TRUE(selected.intact() && slots.intact() && counts.intact());
  return {{selected.begin(), selected.end()}, {slots.begin(), slots.end()}, {counts.begin(), counts.end()}};
}

// Every rank has the selection of a rank with everything, and its own part of it as slots without gaps.
template <class Place>
void expect_unsharded(const Backend& backend, const std::vector<Scores>& rows, std::int64_t k, int ranks,
                      int interleave, bool with_lengths) {
  SCOPED_TRACE(testing::Message() << backend.name() << ", k = " << k << ", " << ranks << " ranks by " << interleave);
  const Exchange all = exchange<Place>(backend, rows, k, ranks, interleave, with_lengths);
  Ids want;
  for (const Scores& row : rows) {
    const Ids ids = brute_force(row, k);
    want.insert(want.end(), ids.begin(), ids.end());
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const Shard shard{rank, ranks, interleave};
    const Merged got = merge<Place>(backend, all, k, shard);
    ASSERT_EQ(got.selected, want) << "rank " << rank;
    for (std::size_t t = 0; t < rows.size(); ++t) {
      Ids slots;
      for (std::size_t lane = 0; lane < static_cast<std::size_t>(k); ++lane)
        if (const std::int32_t p = want[t * static_cast<std::size_t>(k) + lane]; p >= 0 && holds(shard, p))
          slots.push_back(p / interleave / ranks * interleave + p % interleave);
      ASSERT_EQ(got.counts[t], static_cast<std::int32_t>(slots.size()));
      slots.resize(static_cast<std::size_t>(k), -1);
      const auto first = got.slots.begin() + static_cast<std::ptrdiff_t>(t) * k;
      ASSERT_EQ(Ids(first, first + k), slots) << "rank " << rank << ", row " << t;
    }
  }
}

// Random, tied, constant, near-tied, NaN- and inf-laden rows.
inline Scores row_of_kind(int kind, std::int64_t n, Random& random) {
  Scores row(static_cast<std::size_t>(n));
  for (float& x : row) {
    const auto bits = static_cast<std::uint32_t>(random.bits());
    switch (kind) {
      case 0: x = static_cast<float>(random.uniform()); break;
      case 1: x = static_cast<float>(random.below(4) - 1); break;
      case 2: x = 7.f; break;
      case 3: x = std::bit_cast<float>(0x3F800000u | (bits & 1023u)); break;
      default: x = bits % 3 ? random.uniform_f32() : bits % 2 ? kNan : bits & 64 ? kInf : bits & 128 ? -kInf : -0.f;
    }
  }
  return row;
}
inline constexpr int kKinds = 5;

// Lengths from nothing to beyond k; most of these rows leave some rank of eight with nothing.
inline std::vector<Scores> rows_of_kind(int kind, std::int64_t k, Random& random) {
  std::vector<Scores> rows;
  for (std::int64_t n :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{3}, std::int64_t{9}, k - 1, k, k + 1, 3 * k + 70})
    rows.push_back(row_of_kind(kind, n, random));
  return rows;
}

}  // namespace sievemla::test
