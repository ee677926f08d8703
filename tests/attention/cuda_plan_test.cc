// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/cuda_plan_test.cc -- the plans of the CUDA attention kernels, on the host: no GPU takes part.
#include <gtest/gtest.h>

#include <array>
#include <map>

#include "attention/cuda/kernels.h"
#include "attention/registry.h"
#include "cuda/config.h"
#include "sievemla/attention.h"

namespace sievemla::stage::attention {
namespace {

// Shared memory that a CTA may have, and a multiprocessor has, by config: what the GPUs are, apart from src/cuda/arch.
struct Limits {
  int cta, multiprocessor;
};
const std::map<int, Limits> kLimits = {
    {80, {163 << 10, 164 << 10}}, {86, {99 << 10, 100 << 10}},  {89, {99 << 10, 100 << 10}},
    {90, {227 << 10, 228 << 10}}, {120, {99 << 10, 100 << 10}},
};

Choice choose_for(const RowKernels& rows, const Workload& workload) {
  std::array<TileShape, kMostTiles> shapes;
  for (std::size_t i = 0; i < rows.tiles().size(); ++i) shapes[i] = rows.tile[i].shape;
  return choose({shapes.data(), rows.tiles().size()}, workload);
}

TEST(Case25SmemPlan, FitsEveryConfig) {
  for (const ConfigKernels& config : config_kernels()) {
    const Limits limits = kLimits.at(config.sm);
    EXPECT_EQ(config.rows.size(), 4u);
    for (const RowKernels& rows : config.rows)
      for (const TileKernel& tile : rows.tiles()) {
        SCOPED_TRACE(testing::Message() << "sm_" << config.sm << ", " << rows.rows << ", heads " << tile.shape.heads);
        EXPECT_LE(tile.smem_bytes, limits.cta);
        EXPECT_LE(tile.shape.ctas * (tile.smem_bytes + 1024), limits.multiprocessor);
        EXPECT_LE(tile.threads, 1024);
      }
  }
}

TEST(Case25SmemPlan, EveryConfigHasKernels) {
  ASSERT_EQ(config_kernels().size(), cuda::configs().size());
  for (std::size_t i = 0; i < cuda::configs().size(); ++i) EXPECT_EQ(config_kernels()[i].sm, cuda::configs()[i].sm);
}

TEST(Case25SmemPlan, AtMost32KernelsAConfig) {
  for (const ConfigKernels& config : config_kernels()) {
    std::size_t kernels = 1;  // merge
    for (const RowKernels& rows : config.rows) kernels += rows.tiles().size();
    EXPECT_LE(kernels, 32u) << "sm_" << config.sm;
  }
}

// Whatever is chosen keeps to the contract: all heads and lanes served, partial results inside the workspace that the
// bounds ask for, and no last arriver that reads too much.
TEST(Case25SmemPlan, ChoicesKeepToTheirBounds) {
  for (const ConfigKernels& config : config_kernels())
    for (const RowKernels& rows : config.rows)
      for (const std::int64_t heads : {1, 5, 8, 12, 16, 20, 32, 64, 96, 127, 128})
        for (const std::int64_t units : {1, 2, 16, 64, 129, 4096})
          for (const std::int64_t lanes : {1, 100, 2048, 131072})
            for (const bool dense : {false, true})
              for (const bool invariant : {false, true}) {
                const Choice c = choose_for(rows, {units, heads, lanes, dense, invariant, 132});
                SCOPED_TRACE(testing::Message()
                             << "sm_" << config.sm << ", " << rows.rows << ", heads " << heads << ", units " << units
                             << ", lanes " << lanes << (dense ? ", dense" : "") << (invariant ? ", invariant" : ""));
                const TileShape& tile = rows.tile[c.tile].shape;
                EXPECT_GE(c.groups * tile.heads, heads);
                EXPECT_LT((c.groups - 1) * tile.heads, heads);
                EXPECT_GE(c.items + c.beside * c.beside_parts, units);
                EXPECT_TRUE(!invariant || c.parts == 1);
                if (c.parts == 1) continue;
                EXPECT_LE(partial_items(c) * c.groups * tile.heads, partial_heads(units, heads, lanes));
                if (c.merge == Merge::cluster) {
                  EXPECT_LE(c.parts, tile.cluster);
                } else if (c.merge == Merge::last) {
                  EXPECT_LE(c.parts * tile.heads * kHeadBytes, kMergeBytes);
                  EXPECT_LE(units * c.groups, cuda::kAttentionTickets);
                }
              }
}

// sm_90 has a tile of short start, of 32 rows, for a few units of few heads: measured, docs/kernels/attention-cuda.md.
TEST(Case25SmemPlan, ShortStartWhereEveryCtaHasATileOrTwo) {
  for (const ConfigKernels& config : config_kernels()) {
    if (config.sm != 90) continue;
    for (const RowKernels& rows : config.rows) {
      const auto tokens_of = [&](std::int64_t units, std::int64_t heads) {
        const Choice c = choose_for(rows, {units, heads, 2048, false, false, 132});
        return rows.tile[c.tile].shape.tokens;
      };
      for (const std::int64_t heads : {8, 16, 32, 64})
        for (std::int64_t units = 1; units <= 4 && units * heads <= 64; units *= 2)
          EXPECT_EQ(tokens_of(units, heads), 32) << rows.rows << ' ' << units << ' ' << heads;
      for (const std::int64_t heads : {8, 16, 32, 64})
        for (const std::int64_t units : {16, 64, 128})
          EXPECT_EQ(tokens_of(units, heads), 64) << rows.rows << ' ' << units << ' ' << heads;
    }
  }
}

// Units that a wave of clusters leaves go beside it: all at the same time, each cut into parts that it has tiles for.
TEST(Case25SmemPlan, WhatAWaveOfClustersLeavesGoesBesideIt) {
  for (const ConfigKernels& config : config_kernels())
    for (const RowKernels& rows : config.rows)
      for (const std::int64_t heads : {16, 64, 72, 128})
        for (const std::int64_t lanes : {64, 700, 2048, 131072})
          for (std::int64_t units = 1; units <= 140; ++units) {
            SCOPED_TRACE(testing::Message() << "sm_" << config.sm << ", " << rows.rows << ", heads " << heads
                                            << ", units " << units << ", lanes " << lanes);
            const Choice c = choose_for(rows, {units, heads, lanes, false, false, 132});
            const bool wanted = config.sm == 90 && heads == 64 && lanes == 2048;
            EXPECT_TRUE(c.beside > 0 || !wanted || (units != 16 && (units < 31 || units > 33)));
            EXPECT_TRUE(c.beside == 0 || config.sm == 90);
            if (c.beside == 0) continue;
            const TileShape& tile = rows.tile[c.tile].shape;
            EXPECT_EQ(c.merge, Merge::cluster);
            EXPECT_EQ(c.items, (units - c.beside) * c.parts);
            EXPECT_LE(c.items * c.groups, c.parts * cuda::kH200Clusters[static_cast<std::size_t>(c.parts)]);
            EXPECT_LE((c.items + c.beside * c.beside_parts) * c.groups, 132);
            EXPECT_GE(c.beside_parts, 2);
            EXPECT_LE(c.beside_parts, tile.meeting);
            EXPECT_LE(c.beside_parts, (lanes + tile.tokens - 1) / tile.tokens);
            EXPECT_LE(c.beside * c.beside_parts * c.groups * tile.heads, partial_heads(units, heads, lanes));
            EXPECT_EQ(choose_for(rows, {units, heads, lanes, false, true, 132}).beside, 0);
            EXPECT_EQ(choose_for(rows, {units, heads, lanes, true, false, 132}).beside, 0);
          }
}

// A share of a GPU may hold no cluster of some size, or none at all.
TEST(Case25SmemPlan, NoClustersThatTheDeviceHasNoPlaceFor) {
  for (const ConfigKernels& config : config_kernels())
    for (const RowKernels& rows : config.rows)
      for (const cuda::ClusterCounts& clusters : {cuda::ClusterCounts{0, 16}, cuda::ClusterCounts{0, 16, 8, 4, 2}})
        for (const std::int64_t heads : {8, 16, 32, 64, 128})
          for (std::int64_t units = 1; units <= 40; ++units) {
            const Choice c = choose_for(rows, {units, heads, 2048, false, false, 16, clusters});
            SCOPED_TRACE(testing::Message()
                         << "sm_" << config.sm << ", " << rows.rows << ", heads " << heads << ", units " << units);
            EXPECT_TRUE(c.merge != Merge::cluster || clusters[static_cast<std::size_t>(c.parts)] > 0);
            EXPECT_LE((c.items + c.beside * c.beside_parts) * (c.beside > 0 ? c.groups : 0), 16);
          }
}

}  // namespace
}  // namespace sievemla::stage::attention
