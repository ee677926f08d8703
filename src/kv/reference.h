// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/reference.h -- writers and gatherers row by row, for any geometry.
#pragma once
#include "base/registry.h"
#include "kv/rows.h"

namespace sievemla::kv {

template <class Args>
void run_reference(const Args& args, const base::Exec&) {
  for (std::int64_t i = 0; i < args.slots.dim(0); ++i) copy_row(args, i);
}

}  // namespace sievemla::kv
