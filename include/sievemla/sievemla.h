// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/sievemla.h -- the whole public interface.
#pragma once
#include "sievemla/attention.h"
#include "sievemla/backend.h"
#include "sievemla/combine.h"
#include "sievemla/context_parallel.h"
#include "sievemla/error.h"
#include "sievemla/geometry.h"
#include "sievemla/indexer.h"
#include "sievemla/kv_cache.h"
#include "sievemla/kv_format.h"
#include "sievemla/pipeline.h"
#include "sievemla/tensor.h"
#include "sievemla/topk.h"
