// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/bad_argument_test.cc -- each rule of stage 2's calls refuses with its words, and nothing is written.
#include <gtest/gtest.h>

#include "sievemla/error.h"
#include "topk/problem.h"
#include "topk/refused.h"

namespace sievemla::test {
namespace {

// A right call: 4 rows of 2 requests.
struct Call {
  std::vector<float> scores = std::vector<float>(4 * 10, 1.f);
  Ids starts = {0, 1, 2, 3}, lengths = {4, 4, 4, 4}, table = Ids(2 * 3, 1), request = {0, 0, 1, 1},
      pools = Ids(4 * 2, 0);
  Ids positions = Ids(4 * 5, kUnwritten), slots = Ids(4 * 5, kUnwritten), expanded = Ids(4 * 11, kUnwritten);
  SlotMap map{tensor(table.data(), {2, 3}), tensor(request.data(), {4}), 8, {}};
  TopkArgs topk_args{tensor(scores.data(), {4, 10}),   tensor(starts.data(), {4}),   tensor(lengths.data(), {4}),
                     tensor(positions.data(), {4, 5}), tensor(slots.data(), {4, 5}), map};
  ExpandPoolsArgs pool_args{tensor(pools.data(), {4, 2}), tensor(lengths.data(), {4}), 4,
                            tensor(expanded.data(), {4, 11})};
  TensorView map_positions = tensor(starts.data(), {4, 1});
  TensorView map_slots = tensor(slots.data(), {4, 1});
  std::int64_t workspace_short = 0;

  bool untouched() const {
    auto same = [](const Ids& ids) {
      return std::all_of(ids.begin(), ids.end(), [](std::int32_t id) { return id == kUnwritten; });
    };
    return same(positions) && same(slots) && same(expanded);
  }
};

using Bad = Refusal<Call>;

template <class Error, class Run>
void expect_refused(const Bad& bad, Run&& run) {
  test::expect_refused<Error>(host_backends(kThreads), bad, run);
}

void run_topk(const Backend& backend, Call& call) {
  const PoisonedWorkspace workspace(topk_workspace_bytes(backend, {4, 10, 5}));
  Workspace given = workspace;
  given.bytes -= call.workspace_short;
  topk(backend, call.topk_args, given);
}

const Bad kBadTopk[] = {
    {"scores absent", "topk: scores", [](Call& c) { c.topk_args.scores = {}; }},
    {"scores of rank 1", "topk: scores", [](Call& c) { c.topk_args.scores = tensor(c.scores.data(), {40}); }},
    {"rank beyond all", "rank 1000000", [](Call& c) { c.topk_args.scores.rank = 1000000; }},
    {"positions overlap", "must not overlap", [](Call& c) { c.topk_args.positions.stride[0] = 4; }},
    {"slots overlap", "must not overlap", [](Call& c) { c.topk_args.slots.stride[0] = 0; }},
    {"scores not f32", "must be f32", [](Call& c) { c.topk_args.scores.dtype = DType::bf16; }},
    {"scores not contiguous", "contiguous", [](Call& c) { c.topk_args.scores.stride[1] = 2; }},
    {"width over 32 bits", "width must fit 32 bits",
     [](Call& c) { c.topk_args.scores.shape[1] = std::int64_t{1} << 31; }},
    {"starts of other rows", "topk: starts", [](Call& c) { c.topk_args.starts.shape[0] = 3; }},
    {"starts i64", "topk: starts", [](Call& c) { c.topk_args.starts.dtype = DType::i64; }},
    {"lengths absent", "topk: lengths", [](Call& c) { c.topk_args.lengths = {}; }},
    {"lengths of other rows", "topk: lengths", [](Call& c) { c.topk_args.lengths.shape[0] = 5; }},
    {"start below 0", "inside the width", [](Call& c) { c.starts[3] = -1; }},
    {"end past the width", "inside the width", [](Call& c) { c.lengths[3] = 8; }},
    {"length past 32 bits of the width", "inside the width", [](Call& c) { c.lengths[0] = INT32_MAX; }},
    {"no output", "positions or slots", [](Call& c) { c.topk_args.positions = c.topk_args.slots = {}; }},
    {"positions i64", "topk: positions", [](Call& c) { c.topk_args.positions.dtype = DType::i64; }},
    {"outputs of different width", "topk: slots", [](Call& c) { c.topk_args.slots.shape[1] = 4; }},
    {"slots f32", "topk: slots", [](Call& c) { c.topk_args.slots.dtype = DType::f32; }},
    {"no block table", "topk: map.block_table", [](Call& c) { c.topk_args.map.block_table = {}; }},
    {"page size 0", "page size must be at least 1", [](Call& c) { c.topk_args.map.page_size = 0; }},
    {"rank outside", "0 <= rank < ranks", [](Call& c) { c.topk_args.map.shard = {2, 2, 1}; }},
    {"interleave 0", "interleave >= 1", [](Call& c) { c.topk_args.map.shard = {0, 2, 0}; }},
    {"rows that do not divide", "divide evenly",
     [](Call& c) {
       c.topk_args.map.row_request = {};
       c.topk_args.map.block_table = tensor(c.table.data(), {3, 2});
     }},
    {"row_request of other rows", "map.row_request", [](Call& c) { c.topk_args.map.row_request.shape[0] = 2; }},
    {"another device", "device", [](Call& c) { c.topk_args.positions.device = {DeviceType::cuda, 0}; }},
    {"workspace too small", "workspace must be large enough", [](Call& c) { c.workspace_short = 1; }},
};

TEST(BadArgument, Topk) {
  for (const Bad& bad : kBadTopk) expect_refused<InvalidArgument>(bad, run_topk);
}

TEST(BadArgument, TopkOfF16IsUnsupported) {
  expect_refused<Unsupported>({"f16 scores", "must be f32", [](Call& c) { c.topk_args.scores.dtype = DType::f16; }},
                              run_topk);
}

TEST(BadArgument, PositionsToSlots) {
  const Bad bads[] = {
      {"positions i64", "positions_to_slots: positions", [](Call& c) { c.map_positions.dtype = DType::i64; }},
      {"slots of another shape", "positions_to_slots: slots", [](Call& c) { c.map_slots.shape[1] = 2; }},
      {"slots absent", "positions_to_slots: slots", [](Call& c) { c.map_slots = {}; }},
      {"page size below 0", "positions_to_slots: map.page_size", [](Call& c) { c.map.page_size = -64; }},
  };
  for (const Bad& bad : bads)
    expect_refused<InvalidArgument>(bad, [](const Backend& backend, Call& call) {
      positions_to_slots(backend, call.map_positions, call.map, call.map_slots);
    });
}

TEST(BadArgument, ExpandPools) {
  const Bad bads[] = {
      {"kpool 0", "at least 1 token", [](Call& c) { c.pool_args.kpool = 0; }},
      {"pools absent", "expand_pools: pools", [](Call& c) { c.pool_args.pools = {}; }},
      {"lengths of other rows", "expand_pools: lengths", [](Call& c) { c.pool_args.lengths.shape[0] = 3; }},
      {"positions of other rows", "expand_pools: positions", [](Call& c) { c.pool_args.positions.shape[0] = 3; }},
      {"positions too narrow", "kpool - 1 wide", [](Call& c) { c.pool_args.positions.shape[1] = 10; }},
      {"pools past 63 bits", "kpool - 1 wide",
       [](Call& c) {
         c.pool_args.kpool = INT32_MAX;
         c.pool_args.pools.shape[1] = std::int64_t{1} << 40;
         c.pool_args.pools.stride = {};
       }},
  };
  for (const Bad& bad : bads)
    expect_refused<InvalidArgument>(bad,
                                    [](const Backend& backend, Call& call) { expand_pools(backend, call.pool_args); });
}

TEST(BadArgument, TopkWorkspaceBytes) {
  for (const Backend& backend : host_backends(kThreads)) {
    EXPECT_THROW(topk_workspace_bytes(backend, {-1, 10, 5}), InvalidArgument);
    EXPECT_THROW(topk_workspace_bytes(backend, {1, -10, 5}), InvalidArgument);
    EXPECT_THROW(topk_workspace_bytes(backend, {1, 10, -5}), InvalidArgument);
    EXPECT_THROW(topk_workspace_bytes(backend, {1, std::int64_t{1} << 31, 5}), InvalidArgument);
  }
}

}  // namespace
}  // namespace sievemla::test
