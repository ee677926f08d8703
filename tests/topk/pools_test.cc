// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/pools_test.cc -- pooled keys: selected pools to positions.
#include <gtest/gtest.h>

#include "sievemla/error.h"
#include "support/property.h"
#include "topk/problem.h"

namespace sievemla::test {
namespace {

Ids expand(const Backend& backend, const Ids& pools, const Ids& lengths, int kpool, std::int64_t width) {
  const std::int64_t rows = static_cast<std::int64_t>(lengths.size());
  Guarded<std::int32_t> positions(rows * width, kUnwritten);
  expand_pools(backend, {tensor(pools.data(), {rows, static_cast<std::int64_t>(pools.size()) / rows}),
                         tensor(lengths.data(), {rows}), kpool, tensor(positions.data(), {rows, width})});
  EXPECT_TRUE(positions.intact());
  return {positions.begin(), positions.end()};
}

TEST(Case22, Kpool) {
  for (const Backend& backend : host_backends()) {
    Ids want{4, 5, 6, 7, 0, 1, 2, 3, 8, 9};  // pool 7 lies past the length, the tail {8, 9} fills no pool
    want.resize(4 * 4 + 3, -1);
    EXPECT_EQ(expand(backend, {1, 0, -1, 7}, {10}, 4, 19), want);
  }
}

TEST(Case22, WidthOf512Pools) {
  constexpr std::int64_t kWidth = 2051;
  Ids pools(512), want(kWidth);
  std::iota(pools.begin(), pools.end(), 0);
  std::iota(want.begin(), want.end(), 0);
  for (const Backend& backend : host_backends()) {
    EXPECT_EQ(expand(backend, pools, {2051}, 4, kWidth), want);  // 512 pools and a tail of 3 fill it
    EXPECT_THROW(expand(backend, pools, {2051}, 4, kWidth - 1), InvalidArgument);
  }
}

TEST(Case22, PoolsThatAreNotWhole) {
  for (const Backend& backend : host_backends()) {
    EXPECT_EQ(expand(backend, {0, 1, 2, 0, 1, 2, 0, 1, 2}, {8, 0, -5}, 3, 11),
              (Ids{0,  1,  2,  3,  4,  5,  6,  7,  -1, -1, -1,  // pool 2 is not whole: its part is the tail
                   -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  // no length
                   -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
    EXPECT_EQ(expand(backend, {INT32_MAX, INT32_MIN, 2}, {3}, 1, 3), (Ids{2, -1, -1}));
    EXPECT_EQ(expand(backend, {}, {5}, 8, 7), (Ids{0, 1, 2, 3, 4, -1, -1}));  // no pool selected, the tail remains
  }
}

TEST(Case22, NothingToDoIsLegal) {
  for (const Backend& backend : host_backends())
    expand_pools(backend, {tensor<std::int32_t>(nullptr, {0, 4}), tensor<std::int32_t>(nullptr, {0}), 4,
                           tensor<std::int32_t>(nullptr, {0, 19})});
}

// Selecting every whole pool in order gives every visible position in order.
RC_GTEST_PROP(PoolsProperty, AllPoolsAreAllPositions, ()) {
  const auto kpool = *rc::gen::inRange(1, 20);
  const auto length = *rc::gen::inRange(0, 200);
  Ids pools(20), want(static_cast<std::size_t>(20 * kpool + kpool - 1), -1);
  std::iota(pools.begin(), pools.end(), 0);
  const int seen = std::min(length / kpool, 20) * kpool;
  std::iota(want.begin(), want.begin() + seen, 0);
  std::iota(want.begin() + seen, want.begin() + seen + length % kpool, length / kpool * kpool);
  for (const Backend& backend : host_backends())
    RC_ASSERT(expand(backend, pools, {length}, kpool, std::ssize(want)) == want);
}

}  // namespace
}  // namespace sievemla::test
