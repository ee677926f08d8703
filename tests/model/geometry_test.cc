// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/model/geometry_test.cc -- the table of models.
#include "sievemla/geometry.h"

#include <gtest/gtest.h>

#include <set>

#include "sievemla/error.h"

namespace sievemla::test {
namespace {

TEST(Geometry, EveryRowIsFoundByItsName) {
  std::set<std::string_view> names;
  for (const Geometry& row : geometries()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_EQ(&geometry_by_name(row.name), &row);
    EXPECT_LE(row.full_layers, row.layers);
    EXPECT_EQ(row.latent, 512);
    EXPECT_TRUE(row.rope == 64 || row.rope == 0);
    EXPECT_EQ(row.rope == 0, row.index_rope == RopeStyle::none);
    EXPECT_NE(row.index_rope, RopeStyle::unset);
  }
  for (const char* name : {"glm-5", "glm-5.1", "glm-5.2", "glm-5.3-flash", "deepseek-v3.2"})
    EXPECT_TRUE(names.count(name)) << name;
}

TEST(Geometry, AnUnknownNameListsTheKnown) {
  try {
    geometry_by_name("glm-6");
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_STREQ(e.what(),
                 "a geometry is one of glm-5, glm-5.1, glm-5.2, glm-5.3-flash, deepseek-v3.2: got 'glm-6' (geometry)");
  }
}

}  // namespace
}  // namespace sievemla::test
