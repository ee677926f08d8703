// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/geometries.cc -- the table, by name.
#include "model/geometries.h"

#include <string>

#include "sievemla/error.h"

namespace sievemla {

std::span<const Geometry> geometries() { return model::kGeometries; }

const Geometry& geometry_by_name(std::string_view name) {
  std::string names;
  for (const Geometry& row : model::kGeometries) {
    if (row.name == name) return row;
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  throw InvalidArgument(error_message("a geometry is one of " + names, "geometry", "'", name, "'"));
}

}  // namespace sievemla
