// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/slots_test.cc -- positions to slots: pages of any size, narrowed tables, shared pages, shards.
#include <gtest/gtest.h>

#include <set>

#include "support/property.h"
#include "topk/problem.h"

namespace sievemla::test {
namespace {

std::vector<std::int64_t> slots_of(const Backend& backend, const Ids& positions, std::int64_t rows,
                                   const SlotMap& map) {
  const std::int64_t k = static_cast<std::int64_t>(positions.size()) / rows;
  Guarded<std::int64_t> slots(rows * k, kUnwritten);
  positions_to_slots(backend, tensor(positions.data(), {rows, k}), map, tensor(slots.data(), {rows, k}));
  EXPECT_TRUE(slots.intact());
  return {slots.begin(), slots.end()};
}

TEST(Case10, LogicalToPhysical) {
  constexpr std::int64_t kRequests = 2, kWidth = 5, kStride = 37;  // a narrowed view of a wider table
  for (std::int64_t page : {16, 32, 64, 128, 256, 544, 1152, 2176}) {
    Random random(static_cast<std::uint64_t>(page));
    const std::vector<std::int64_t> permuted = random.distinct(2 * kWidth, 40);
    Ids table(kRequests * kStride, 1 << 20);  // outside the view: a slot that no row may name
    for (std::size_t r = 0; r < kRequests; ++r)
      for (std::size_t i = 0; i < kWidth; ++i)
        table[r * kStride + i] = static_cast<std::int32_t>(permuted[r * kWidth + i]);
    table[kStride + 3] = table[1];  // one page shared by the two requests
    table[kStride + 4] = -1;        // one that is not there
    SlotMap map{tensor(table.data(), {kRequests, kWidth}), {}, page, {}};
    map.block_table.stride[0] = kStride;

    Ids positions;
    for (int request = 0; request < 2; ++request)
      for (std::int64_t p : {std::int64_t{-1}, std::int64_t{0}, page - 1, page, 2 * page + 5, 4 * page - 1, 4 * page,
                             5 * page - 1, 5 * page, 36 * page, std::int64_t{INT32_MAX}, std::int64_t{INT32_MIN}})
        positions.push_back(static_cast<std::int32_t>(p));
    const std::int64_t lanes = static_cast<std::int64_t>(positions.size()) / 2;
    for (const Backend& backend : host_backends()) {
      const auto slots = slots_of(backend, positions, 2, map);
      for (std::int64_t i = 0; i < 2 * lanes; ++i) {
        const std::int64_t p = positions[static_cast<std::size_t>(i)], request = i / lanes;
        std::int64_t want = -1;
        if (p >= 0 && p / page < kWidth) {
          const std::int64_t physical = table[static_cast<std::size_t>(request * kStride + p / page)];
          if (physical >= 0) want = physical * page + p % page;
        }
        EXPECT_EQ(slots[static_cast<std::size_t>(i)], want) << "page " << page << ", position " << p;
      }
      // The shared page: position 1 * page of request 0 and 3 * page of request 1 are one slot.
      const Ids same{static_cast<std::int32_t>(page + 7), static_cast<std::int32_t>(3 * page + 7)};
      const auto shared = slots_of(backend, same, 2, map);
      EXPECT_EQ(shared[0], shared[1]);
      EXPECT_GE(shared[0], 0);
    }
  }
}

TEST(Slots, RowsBelongToRequestsByTensorOrEvenly) {
  const Ids table{10, 20, 30}, positions{1, 1, 1, 1, 1, 1};
  SlotMap map{tensor(table.data(), {3, 1}), {}, 4, {}};
  for (const Backend& backend : host_backends()) {
    EXPECT_EQ(slots_of(backend, positions, 6, map), (std::vector<std::int64_t>{41, 41, 81, 81, 121, 121}));
    const Ids request{2, 0, 3, -1, 1, INT32_MAX};  // a row of no request has no slots
    SlotMap given = map;
    given.row_request = tensor(request.data(), {6});
    EXPECT_EQ(slots_of(backend, positions, 6, given), (std::vector<std::int64_t>{121, 41, -1, -1, 81, -1}));
  }
}

TEST(Slots, NeverWrapAround32Bits) {
  const Ids table{3'355'443, 3'355'444, INT32_MAX}, positions{0, 127, 640, 767, 1280};
  const SlotMap map{tensor(table.data(), {1, 3}), {}, 640, {}};
  // 3,355,443 * 640 = 2,147,483,520, so offset 127 is the largest slot that 32 bits hold.
  for (const Backend& backend : host_backends()) {
    EXPECT_EQ(
        slots_of(backend, positions, 1, map),
        (std::vector<std::int64_t>{2'147'483'520, 2'147'483'647, 2'147'484'160, 2'147'484'287, 1'374'389'534'080}));
    Ids slots(5, kUnwritten);
    positions_to_slots(backend, tensor(positions.data(), {1, 5}), map, tensor(slots.data(), {1, 5}));
    EXPECT_EQ(slots, (Ids{2'147'483'520, 2'147'483'647, -1, -1, -1}));
  }
}

// Every position is on exactly one rank, at the next free local place; the ranks together have all slots.
TEST(Shards, PartitionThePositions) {
  constexpr std::int32_t kPositions = 1000, kPage = 16;
  for (int ranks : {1, 2, 3, 4, 8})
    for (int interleave : {1, 5, 64}) {
      Ids positions(kPositions), identity(kPositions);
      std::iota(positions.begin(), positions.end(), 0);
      std::iota(identity.begin(), identity.end(), 0);
      for (const Backend& backend : host_backends()) {
        std::vector<int> holders(kPositions, 0);
        for (int rank = 0; rank < ranks; ++rank) {
          // With the identity as block table a slot is the local position.
          const SlotMap map{tensor(identity.data(), {1, kPositions}), {}, kPage, {rank, ranks, interleave}};
          const auto local = slots_of(backend, positions, 1, map);
          std::int64_t next = 0;
          for (std::int32_t p = 0; p < kPositions; ++p) {
            const bool here = p / interleave % ranks == rank;
            EXPECT_EQ(local[static_cast<std::size_t>(p)], here ? next : -1) << "position " << p << ", rank " << rank;
            next += here;
            holders[static_cast<std::size_t>(p)] += here;
          }
        }
        EXPECT_EQ(holders, std::vector<int>(kPositions, 1));
      }
    }
}

TEST(Shards, UnionIsTheUnshardedSelection) {
  constexpr std::int64_t kK = 200, kLength = 900, kPage = 16;
  Random random(12);
  const TopkProblem problem({random.f32s(kLength)});
  const Ids want = problem.expected(kK);
  for (int ranks : {2, 4, 8})
    for (int interleave : {1, 64}) {
      for (const Backend& backend : host_backends()) {
        Ids found(kK, -1);
        for (int rank = 0; rank < ranks; ++rank) {
          Ids table;  // each rank has pages of its own, in an order of its own
          for (std::int64_t page : random.distinct(60, 100)) table.push_back(static_cast<std::int32_t>(page));
          Ids slots(kK, kUnwritten);
          TopkArgs args = problem.args();
          args.slots = tensor(slots.data(), {1, kK});  // slots alone
          args.map = {tensor(table.data(), {1, 60}), {}, kPage, {rank, ranks, interleave}};
          topk(backend, args, PoisonedWorkspace(topk_workspace_bytes(backend, {1, problem.width(), kK})));
          for (std::size_t lane = 0; lane < kK; ++lane) {
            if (slots[lane] < 0) continue;
            const auto page = std::find(table.begin(), table.end(), slots[lane] / kPage) - table.begin();
            const std::int64_t local = page * kPage + slots[lane] % kPage;
            const std::int64_t round = local / interleave, offset = local % interleave;
            EXPECT_EQ(found[lane], -1) << "two ranks hold one position";
            found[lane] = static_cast<std::int32_t>((round * ranks + rank) * interleave + offset);
          }
        }
        EXPECT_EQ(found, want) << ranks << " ranks, interleave " << interleave;
      }
    }
}

RC_GTEST_PROP(SlotsProperty, SelectingSlotsIsSelectingThenMapping, ()) {
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  Random random(seed);
  const std::int64_t per = 1 + random.below(3), requests = 1 + random.below(3), k = random.below(40);
  std::vector<Scores> rows;
  for (std::int64_t t = 0; t < per * requests; ++t) rows.push_back(random.f32s(random.below(80)));
  const TopkProblem problem(rows, seed);
  Ids table;
  for (std::int64_t i = 0; i < requests * 9; ++i) table.push_back(static_cast<std::int32_t>(random.below(12) - 1));
  const int ranks = 1 + static_cast<int>(random.below(4));
  const SlotMap map{tensor(table.data(), {requests, 9}),
                    {},
                    1 + random.below(20),
                    {static_cast<int>(random.below(ranks)), ranks, 1 + static_cast<int>(random.below(5))}};
  for (const Backend& backend : host_backends()) {
    Ids positions(static_cast<std::size_t>(problem.rows() * k)), slots(positions.size()), mapped(positions.size());
    TopkArgs args = problem.args();
    args.positions = tensor(positions.data(), {problem.rows(), k});
    args.slots = tensor(slots.data(), {problem.rows(), k});
    args.map = map;
    topk(backend, args, PoisonedWorkspace(topk_workspace_bytes(backend, {problem.rows(), problem.width(), k})));
    positions_to_slots(backend, args.positions, map, tensor(mapped.data(), {problem.rows(), k}));
    RC_ASSERT(positions == problem.expected(k));
    RC_ASSERT(slots == mapped);
  }
}

}  // namespace
}  // namespace sievemla::test
