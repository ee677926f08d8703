// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/geometries.h -- a row per model. A new model geometry is one row here; if its row type exists, nothing else
// changes. Sources: the checkpoints' config.json and Hugging Face's configuration classes.
#pragma once
#include "sievemla/geometry.h"

namespace sievemla::model {

// clang-format off
inline constexpr RopeStyle kPairs = RopeStyle::interleaved, kHalves = RopeStyle::half_split, kNone = RopeStyle::none;
inline constexpr Geometry kGeometries[] = {
    //                                  layers         row          per head   indexer
    // name            model_type       all full heads latent rope  nope    v  heads  topk kpool  rope
    {"glm-5",         "glm_moe_dsa",     78,  78,  64,  512,   64,  192,  256,   32, 2048,    1, kPairs},
    {"glm-5.1",       "glm_moe_dsa",     78,  78,  64,  512,   64,  192,  256,   32, 2048,    1, kPairs},
    {"glm-5.2",       "glm_moe_dsa",     78,  21,  64,  512,   64,  192,  256,   32, 2048,    1, kPairs},
    {"glm-5.3-flash", "glm5_next",       11,  11,  64,  512,    0,  256,  256,   32, 2048,    4, kNone},
    {"deepseek-v3.2", "deepseek_v32",    61,  61, 128,  512,   64,  128,  128,   64, 2048,    1, kHalves},
};
// clang-format on
// GLM-5.2: layers 0, 1, 2 and then every fourth have an indexer. GLM-5.3-Flash: counted are its sparse layers, 11 of
// 45; the others are linear attention.

}  // namespace sievemla::model
