// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/rules.h -- the rules of each public call, apart from the call: sparse_layer checks all its stages before the
// first of them writes. Each throws what the call itself would, workspace aside.
#pragma once
#include "sievemla/backend.h"
#include "sievemla/topk.h"

namespace sievemla::api {

void check(const Backend& backend, const TopkArgs& args);

}  // namespace sievemla::api
