// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/checks.h -- the argument rules that several public functions share. All throw InvalidArgument or Unsupported
// with the rule, what was got, and where ("attention: q"). They read shapes only, never device memory
// (check_write_slots: never of a device other than the host).
#pragma once
#include <cstdint>
#include <initializer_list>
#include <ostream>

#include "sievemla/backend.h"
#include "sievemla/error.h"
#include "sievemla/kv_format.h"
#include "sievemla/tensor.h"
#include "sievemla/topk.h"

namespace sievemla::api {

inline constexpr std::int64_t kAny = -1;

// "[3, 64, 576] bf16", made where it is written out.
struct Description {
  const TensorView& view;
  friend std::ostream& operator<<(std::ostream& out, const Description& description);
};
inline Description describe(const TensorView& view) { return {view}; }

// The backend's tensors are host memory, whose values can be looked at.
inline bool on_host(const Backend& backend) { return backend.kind() != BackendKind::cuda; }

// A tensor the call reads: rank and extents (kAny: free), one of `dtypes`, extents and strides that are not negative
// and whose byte offsets fit 63 bits, data aligned to its dtype and not null unless an extent is 0, on the backend's
// device. An f16 tensor that is not in `dtypes` is Unsupported, and the message names --dtype bfloat16.
void check_tensor(const Backend& backend, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<DType> dtypes, const Where& where);

// A tensor the call writes: as above, and no two elements lie at one address.
void check_output(const Backend& backend, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<DType> dtypes, const Where& where);

// A size from the caller, small enough that sums of products of two stay inside 63 bits.
inline constexpr std::int64_t kMostRows = std::int64_t{1} << 40;
void check_bound(std::int64_t value, std::int64_t most, const char* rule, const Where& where);

void check_scale_rule(ScaleRule rule, const Where& where);

// The last dimension is contiguous.
void check_contiguous_rows(const TensorView& view, const Where& where);

void check_cache(const Backend& backend, const KvCache& cache, const Where& where);
void check_cache(const Backend& backend, const IndexCache& cache, const Where& where);
// Where a writer puts its rows: [tokens] i32 or i64. On a host backend every slot is read, and is below `cache_slots`
// (negative ones are skipped by the writer), so that nothing is written by a bad call.
void check_write_slots(const Backend& backend, const TensorView& slots, std::int64_t tokens, std::int64_t cache_slots,
                       const Where& where);

void check_shard(const Shard& shard, const Where& where);
void check_slot_map(const Backend& backend, const SlotMap& map, std::int64_t rows, const Where& where);
void check_row_request(const Backend& backend, const TensorView& row_request, std::int64_t rows, std::int64_t requests,
                       const Where& where);

// `workspace` holds at least `needed` bytes and is aligned.
void check_workspace(Workspace workspace, std::int64_t needed, const Where& where);

}  // namespace sievemla::api
