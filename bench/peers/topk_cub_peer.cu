// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// A C entry to CUB's batched top-k, in the CCCL copy that the FlashInfer wheel bundles: the backend that FlashInfer
// picks on Hopper below 128 rows or up to 8192 scores a row. Built by fetch_gpu_peers.sh for the peer benchmark only.
#define CUB_DISABLE_TOPK_UNSUPPORTED_ARCH_ASSERT  // what a device lacks is reported at run time

#include <cstdint>

#include <cuda/__execution/determinism.h>
#include <cuda/__execution/output_ordering.h>
#include <cuda/__execution/require.h>
#include <cuda/__execution/tie_break.h>
#include <cuda/std/__execution/env.h>
#include <cuda/std/limits>

#include <cub/device/device_batched_topk.cuh>
#include <cuda/argument>
#include <cuda/iterator>

namespace {

template <int64_t kMaxLen, class Requirements>
cudaError_t select(const float* scores, int32_t* ids, float* values, int64_t rows, int64_t len, int64_t k, void* work,
                   size_t* work_bytes, Requirements requirements, cudaStream_t stream) {
  const auto row = [](auto* base, int64_t pitch) {
    return cuda::make_strided_iterator(cuda::make_counting_iterator(base), pitch);
  };
  return cub::DeviceBatchedTopK::MaxPairs(
      work, *work_bytes, row(scores, len), row(values, k),
      cuda::make_constant_iterator(cuda::make_counting_iterator(int32_t{0})), row(ids, k),
      cuda::args::immediate{len, cuda::args::bounds<int64_t{1}, kMaxLen>()},
      cuda::args::immediate{k, cuda::args::bounds<int64_t{1}, kMaxLen>()}, cuda::args::immediate{rows},
      cuda::std::execution::env{requirements, cuda::stream_ref{stream}});
}

// Writes the slot that a block table of 64-row pages gives a position.
struct Slot {
  const int32_t* pages;
  __device__ int32_t operator()(int32_t position) const { return pages[position >> 6] << 6 | (position & 63); }
};

struct SlotsOfRow {
  int32_t* slots;
  const int32_t* pages;
  int64_t page_entries, k;
  __host__ __device__ auto operator()(int64_t row) const {
    return cuda::make_transform_output_iterator(slots + row * k, Slot{pages + row * page_entries});
  }
};

// As FlashInfer's cub_topk.cu does for rows of their own lengths: lengths are read on the device, scores are dropped.
template <class RowsOut>
cudaError_t select_rows(const float* scores, RowsOut out, const int32_t* lengths, int64_t rows, int64_t pitch,
                        int64_t k, void* work, size_t* work_bytes, cudaStream_t stream) {
  namespace exec = cuda::execution;
  constexpr int64_t kMaxLen = int64_t{1} << 21;
  constexpr int32_t kMinLen = cuda::std::numeric_limits<int32_t>::min();
  return cub::DeviceBatchedTopK::MaxPairs(
      work, *work_bytes, cuda::make_strided_iterator(cuda::make_counting_iterator(scores), pitch),
      cuda::make_constant_iterator(cuda::discard_iterator{}),
      cuda::make_constant_iterator(cuda::make_counting_iterator(int32_t{0})), out,
      cuda::args::deferred_sequence{lengths, cuda::args::bounds<kMinLen, int32_t{kMaxLen}>(),
                                    cuda::args::bounds(kMinLen, static_cast<int32_t>(pitch))},
      cuda::args::immediate{k, cuda::args::bounds<int64_t{1}, kMaxLen>()}, cuda::args::immediate{rows},
      cuda::std::execution::env{exec::require(exec::determinism::not_guaranteed, exec::tie_break::unspecified,
                                              exec::output_ordering::unsorted),
                                cuda::stream_ref{stream}});
}

}  // namespace

// Row r has lengths[r] scores and starts at scores + r * pitch. ids: positions; with `pages`, the slots that a block
// table of 64-row pages (page_entries a row) gives them. With work == nullptr it only writes *work_bytes.
extern "C" int peer_topk_cub_rows(const float* scores, int32_t* ids, const int32_t* lengths, const int32_t* pages,
                                  int64_t page_entries, int64_t rows, int64_t pitch, int64_t k, void* work,
                                  size_t* work_bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (pages == nullptr)
    return select_rows(scores, cuda::make_strided_iterator(cuda::make_counting_iterator(ids), k), lengths, rows, pitch,
                       k, work, work_bytes, s);
  const auto slots = cuda::make_transform_iterator(cuda::make_counting_iterator(int64_t{0}),
                                                   SlotsOfRow{ids, pages, page_entries, k});
  return select_rows(scores, slots, lengths, rows, pitch, k, work, work_bytes, s);
}

// With work == nullptr it only writes *work_bytes. lowest_id: equal scores go to the lowest position.
extern "C" int peer_topk_cub(const float* scores, int32_t* ids, float* values, int64_t rows, int64_t len, int64_t k,
                             void* work, size_t* work_bytes, int lowest_id, void* stream) {
  namespace exec = cuda::execution;
  const auto run = [&](auto requirements) {
    const auto s = static_cast<cudaStream_t>(stream);
    return len <= 8192 ? select<8192>(scores, ids, values, rows, len, k, work, work_bytes, requirements, s)
                       : select<int64_t{1} << 21>(scores, ids, values, rows, len, k, work, work_bytes, requirements, s);
  };
  if (lowest_id != 0)
    return run(exec::require(exec::determinism::gpu_to_gpu, exec::tie_break::prefer_smaller_index,
                             exec::output_ordering::unsorted));
  return run(exec::require(exec::determinism::not_guaranteed, exec::tie_break::unspecified,
                           exec::output_ordering::unsorted));
}
