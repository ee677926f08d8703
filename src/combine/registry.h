// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/registry.h -- the kernels of stage 4, best first within a backend.
#pragma once
#include <span>

#include "base/registry.h"
#include "sievemla/combine.h"

namespace sievemla::stage::combine {

using Kernel = base::Kernel<CombineArgs, base::NoBounds>;
std::span<const Kernel> kernels();

extern const Kernel kReference;
extern const Kernel kCpuPortable;

}  // namespace sievemla::stage::combine
