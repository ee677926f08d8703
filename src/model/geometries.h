// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/geometries.h -- a row per model. A new model geometry is one row here; if its row type exists, nothing else
// changes. Sources: the checkpoints' config.json and Hugging Face's configuration classes.
#pragma once
#include "sievemla/geometry.h"

namespace sievemla::model {

inline constexpr Geometry kGeometries[] = {
    {.name = "glm-5", .model_type = "glm_moe_dsa", .layers = 78, .full_layers = 78, .heads = 64,
     .latent = 512, .rope = 64, .nope = 192, .v = 256,
     .index_heads = 32, .index_topk = 2048, .index_kpool = 1, .index_rope = RopeStyle::interleaved},
    {.name = "glm-5.1", .model_type = "glm_moe_dsa", .layers = 78, .full_layers = 78, .heads = 64,
     .latent = 512, .rope = 64, .nope = 192, .v = 256,
     .index_heads = 32, .index_topk = 2048, .index_kpool = 1, .index_rope = RopeStyle::interleaved},
    // Layers 0, 1, 2 and then every fourth have an indexer.
    {.name = "glm-5.2", .model_type = "glm_moe_dsa", .layers = 78, .full_layers = 21, .heads = 64,
     .latent = 512, .rope = 64, .nope = 192, .v = 256,
     .index_heads = 32, .index_topk = 2048, .index_kpool = 1, .index_rope = RopeStyle::interleaved},
    // The layers counted are the 11 of its 45 that are sparse MLA; the other 34 are linear attention.
    {.name = "glm-5.3-flash", .model_type = "glm5_next", .layers = 11, .full_layers = 11, .heads = 64,
     .latent = 512, .rope = 0, .nope = 256, .v = 256,
     .index_heads = 32, .index_topk = 2048, .index_kpool = 4, .index_rope = RopeStyle::none},
    {.name = "deepseek-v3.2", .model_type = "deepseek_v32", .layers = 61, .full_layers = 61, .heads = 128,
     .latent = 512, .rope = 64, .nope = 128, .v = 128,
     .index_heads = 64, .index_topk = 2048, .index_kpool = 1, .index_rope = RopeStyle::half_split},
};

}  // namespace sievemla::model
