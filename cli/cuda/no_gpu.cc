// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/cuda/gpu.h"
#include "sievemla/error.h"

namespace sievemla::cli::gpu {
namespace {

[[noreturn]] void absent() { throw Unsupported(error_message("CUDA must be part of this build", "gpu", "none")); }

}  // namespace

void copy(void*, const void*, std::int64_t) { absent(); }
void fill(void*, std::byte, std::int64_t) { absent(); }
void wait(Device) { absent(); }
bool hangs() { return false; }
Timing time(Device, const std::function<void(Stream)>&, L2) { absent(); }
Clocks clocks(Device) { absent(); }

}  // namespace sievemla::cli::gpu
