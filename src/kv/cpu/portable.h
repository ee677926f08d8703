// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/kv/cpu/portable.h -- writers and gatherers in blocks of rows over the threads.
//
// Rows are independent, so the number of threads changes no bit.
#pragma once
#include <algorithm>

#include "base/registry.h"
#include "cpu/threads.h"
#include "kv/rows.h"

namespace sievemla::kv {

inline constexpr std::int64_t kRowsPerBlock = 16;  // microseconds of work: well above the cost of handing it out

template <class Args>
void run_cpu_portable(const Args& args, const base::Exec& exec) {
  const std::int64_t rows = args.slots.dim(0), blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  sievemla::cpu::parallel_for(exec.backend, blocks, [&](std::int64_t block, int) {
    const std::int64_t end = std::min(rows, (block + 1) * kRowsPerBlock);
    for (std::int64_t i = block * kRowsPerBlock; i < end; ++i) copy_row(args, i);
  });
}

}  // namespace sievemla::kv
