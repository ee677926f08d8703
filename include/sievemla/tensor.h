// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/tensor.h -- a view of memory that somebody else owns: pointer, dtype, shape, strides, device.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>

namespace sievemla {

enum class DType : std::uint8_t { f32, bf16, f16, u8, i32, i64 };

// Bits only; the arithmetic is in src/base/number.h.
struct bf16 {
  std::uint16_t bits;  // upper half of an IEEE binary32
};
struct f16 {
  std::uint16_t bits;  // IEEE binary16; appears in weights only
};

constexpr std::int64_t size_of(DType t) {
  switch (t) {
    case DType::f32: return 4;
    case DType::bf16: return 2;
    case DType::f16: return 2;
    case DType::u8: return 1;
    case DType::i32: return 4;
    case DType::i64: return 8;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::u8: return "u8";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
  }
  return "?";
}

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  friend constexpr bool operator==(Device, Device) = default;
};

// A queue of work on a device: a cudaStream_t on cuda, unused elsewhere. Null is the default stream.
struct Stream {
  void* handle = nullptr;
};

// Memory that the caller provides for intermediate results. Sizes come from the *_workspace_bytes functions. On cuda a
// workspace starts with tickets, so it has to pass through workspace_init once, and serves one stream at a time.
struct Workspace {
  void* data = nullptr;  // aligned to kWorkspaceAlign
  std::int64_t bytes = 0;
};
inline constexpr std::int64_t kWorkspaceAlign = 256;

// A strided view. It owns nothing; inputs are never written through it. A default-made view (rank 0) means "absent" for
// an optional tensor. `data` may be null where an extent is 0.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};  // in elements; 0 repeats one row
  Device device{};

  constexpr explicit operator bool() const { return rank > 0; }
  constexpr std::int64_t dim(int i) const { return shape[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t step(int i) const { return stride[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t elements() const {
    std::int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank; ++i) n *= dim(i);
    return n;
  }
};

namespace detail {
constexpr DType dtype_of(const float*) { return DType::f32; }
constexpr DType dtype_of(const bf16*) { return DType::bf16; }
constexpr DType dtype_of(const f16*) { return DType::f16; }
constexpr DType dtype_of(const std::uint8_t*) { return DType::u8; }
constexpr DType dtype_of(const std::int32_t*) { return DType::i32; }
constexpr DType dtype_of(const std::int64_t*) { return DType::i64; }
}  // namespace detail

// A contiguous view of `shape` at `data`; the dtype follows from the pointer.
template <class T>
TensorView tensor(const T* data, std::initializer_list<std::int64_t> shape, Device device = {}) {
  TensorView view;
  view.data = const_cast<T*>(data);
  view.dtype = detail::dtype_of(data);
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  std::size_t i = 0;
  for (std::int64_t extent : shape) view.shape[i++] = extent;
  std::int64_t step = 1;
  for (i = shape.size(); i-- > 0;) {
    view.stride[i] = step;
    step *= view.shape[i];
  }
  return view;
}

}  // namespace sievemla
