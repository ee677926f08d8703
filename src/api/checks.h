// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/checks.h -- the argument rules that several public functions share. All throw InvalidArgument or Unsupported
// with the rule, what was got, and where ("attention: q"). They read shapes only, never device memory
// (check_write_slots: never of a device other than the host).
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "sievemla/backend.h"
#include "sievemla/kv_format.h"
#include "sievemla/tensor.h"
#include "sievemla/topk.h"

namespace sievemla::api {

inline constexpr std::int64_t kAny = -1;

// "[3, 64, 576] bf16"
std::string describe(const TensorView& view);

// A tensor the call needs: rank and extents (kAny: free), one of `dtypes`, extents and strides that are not negative and
// whose byte offsets fit 63 bits, data not null unless an extent is 0, on the backend's device. An f16 tensor that is not
// in `dtypes` is Unsupported, and the message names --dtype bfloat16.
void check_tensor(const Backend& backend, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<DType> dtypes, std::string_view where);

// The last dimension is contiguous.
void check_contiguous_rows(const TensorView& view, std::string_view where);

void check_cache(const Backend& backend, const KvCache& cache, std::string_view where);
void check_cache(const Backend& backend, const IndexCache& cache, std::string_view where);
// Where a writer puts its rows: [tokens] i32 or i64. On a host backend every slot is read, and is below `cache_slots`
// (negative ones are skipped by the writer), so that nothing is written by a bad call.
void check_write_slots(const Backend& backend, const TensorView& slots, std::int64_t tokens, std::int64_t cache_slots,
                       std::string_view where);

void check_slot_map(const Backend& backend, const SlotMap& map, std::int64_t rows, std::string_view where);
void check_row_request(const Backend& backend, const TensorView& row_request, std::int64_t rows, std::int64_t requests,
                       std::string_view where);

// `workspace` holds at least `needed` bytes and is aligned.
void check_workspace(Workspace workspace, std::int64_t needed, std::string_view where);

}  // namespace sievemla::api
