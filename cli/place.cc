// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/place.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "cli/cuda/gpu.h"
#include "cli/inputs.h"

namespace sievemla::cli {

using api::span_bytes;

// Behind a kernel that hangs nothing is freed: that would wait for it.
Place::~Place() {
  if (copied_ && gpu::hangs()) static_cast<void>(new (std::nothrow) std::vector<cuda::Memory>(std::move(memory_)));
}

void* Place::allocate(std::int64_t bytes) {
  void* memory = memory_.emplace_back(cuda::Memory::on(backend_.device(), bytes)).data();
  if (copied_) gpu::fill(memory, kPoison, bytes);
  else std::memset(memory, static_cast<int>(kPoison), static_cast<std::size_t>(bytes));
  return memory;
}

TensorView Place::put(const TensorView& view) {
  if (!copied_ || !view) return view;
  const std::int64_t bytes = span_bytes(view);
  auto found = copies_.find(view.data);
  if (found == copies_.end() || found->second.bytes < bytes) {
    void* there = allocate(bytes);
    gpu::copy(there, view.data, bytes);
    found = copies_.insert_or_assign(view.data, Copy{there, bytes}).first;
  }
  TensorView placed = view;
  placed.data = found->second.there;
  placed.device = backend_.device();
  return placed;
}

void Place::take_back(const TensorView& view) {
  if (!copied_ || !view) return;
  gpu::wait(backend_.device());
  gpu::copy(view.data, copies_.at(view.data).there, span_bytes(view));
}

TensorView Place::poisoned(DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view = tensor(static_cast<const std::uint8_t*>(nullptr), shape, backend_.device());
  view.dtype = dtype;
  view.data = allocate(view.elements() * size_of(dtype));
  return view;
}

void Place::repeat(const TensorView& contiguous, const TensorView& there) {
  auto* first = static_cast<std::byte*>(there.data);
  const std::int64_t bytes = span_bytes(there);
  const auto copy = [&](std::byte* to, const void* from, std::int64_t n) {
    if (copied_) gpu::copy(to, from, n);
    else std::memcpy(to, from, static_cast<std::size_t>(n));
  };
  std::int64_t done = std::min(span_bytes(contiguous), bytes);
  copy(first, contiguous.data, done);
  for (std::int64_t more = 0; done < bytes; done += more)
    copy(first + done, first, more = std::min(done, bytes - done));
}

TensorView Place::here(const TensorView& contiguous) {
  if (!copied_) return contiguous;
  gpu::wait(backend_.device());
  here_.resize(static_cast<std::size_t>(span_bytes(contiguous)));
  gpu::copy(here_.data(), contiguous.data, span_bytes(contiguous));
  TensorView view = contiguous;
  view.data = here_.data();
  view.device = {};
  return view;
}

Workspace Place::workspace(std::int64_t bytes) {
  const Workspace workspace{allocate(bytes), bytes};
  workspace_init(backend_, workspace);
  return workspace;
}

}  // namespace sievemla::cli
