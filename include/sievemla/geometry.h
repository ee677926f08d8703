// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/geometry.h -- the sizes of the models this library knows; the table is src/model/geometries.h.
#pragma once
#include <span>
#include <string_view>

#include "sievemla/indexer.h"

namespace sievemla {

struct Geometry {
  std::string_view name;        // "glm-5"
  std::string_view model_type;  // Hugging Face config.json
  int layers, full_layers;      // all, and those with an indexer of their own
  int heads;                    // attention heads
  int latent, rope;             // cache row: latent | rope
  int nope, v;                  // per-head widths outside the kernel; softmax scale = (nope + rope)^-0.5 before yarn
  int index_heads, index_topk;
  int index_kpool;  // tokens per indexer key, 1 = none pooled
  RopeStyle index_rope;
};

std::span<const Geometry> geometries();
const Geometry& geometry_by_name(std::string_view name);  // InvalidArgument lists the names there are

}  // namespace sievemla
