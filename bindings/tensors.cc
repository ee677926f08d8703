// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "bindings/tensors.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace sievemla::bindings {
namespace {

struct Type {
  std::uint8_t code;  // of DLPack
  std::uint8_t bits;
  DType dtype;
};
constexpr Type kTypes[] = {
    {kDLFloat, 32, DType::f32}, {kDLBfloat, 16, DType::bf16}, {kDLUInt, 16, DType::bf16},
    {kDLFloat, 16, DType::f16}, {kDLUInt, 8, DType::u8},      {kDLFloat8_e4m3fn, 8, DType::u8},
    {kDLInt, 32, DType::i32},   {kDLInt, 64, DType::i64},
};

const char* name_of_code(std::uint8_t code) {
  switch (code) {
    case kDLInt: return "int";
    case kDLUInt: return "uint";
    case kDLFloat: return "float";
    case kDLBfloat: return "bfloat";
    case kDLComplex: return "complex";
    case kDLBool: return "bool";
    default: return "DLPack type ";
  }
}

DType dtype_of(DLDataType type, const Where& where) {
  for (const Type& known : kTypes)
    if (type.code == known.code && type.bits == known.bits && type.lanes == 1) return known.dtype;
  const char* name = name_of_code(type.code);
  throw InvalidArgument(error_message("the dtype must be float32, bfloat16, uint8, int32 or int64", where, name,
                                      type.code > kDLBool ? std::to_string(type.code) + ", bits " : "",
                                      static_cast<int>(type.bits), type.lanes == 1 ? "" : ", in lanes"));
}

Device device_of(DLDevice device, const Where& where) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost: return {DeviceType::cpu, 0};
    case kDLCUDA:
    case kDLCUDAManaged: return {DeviceType::cuda, device.device_id};
    default: break;
  }
  throw InvalidArgument(error_message("a tensor must be in host memory or on a CUDA device", where,
                                      "DLPack device type ", static_cast<int>(device.device_type)));
}

constexpr std::size_t kMostDevices = 10;  // Backend::by_name knows cuda:0 to cuda:9

struct Backends {
  std::mutex mutex;
  std::vector<Backend> opened;
  std::map<std::pair<std::string, std::int64_t>, std::int64_t> handles;     // by name and threads
  std::array<std::atomic<std::int64_t>, 1 + kMostDevices> of_device;        // the host, then cuda:0 ..
  Backends() { std::fill(of_device.begin(), of_device.end(), kByDevice); }  // not yet opened
};

Backends& backends() {
  static Backends all;
  return all;
}

// The handle for tensors of this device, opened and prepared when first asked for.
std::int64_t handle_of(Device device) {
  const bool host = device.type == DeviceType::cpu;
  const auto index = static_cast<std::size_t>(device.index);
  const auto open = [&] { return open_backend(host ? "cpu" : "cuda:" + std::to_string(device.index), 0); };
  if (!host && index >= kMostDevices) return open();
  std::atomic<std::int64_t>& known = backends().of_device[host ? 0 : 1 + index];
  if (known == kByDevice) {
    const std::int64_t handle = open();
    backend_of(handle).prepare();
    known = handle;
  }
  return known;
}

}  // namespace

TensorView view(const Tensor& tensor, const Where& where) {
  TensorView made;
  made.rank = tensor.ndim();
  expects(made.rank >= 1 && made.rank <= TensorView::kMaxRank, "a tensor must have 1 to 4 dimensions", where,
          made.rank);
  made.dtype = dtype_of(tensor.dtype(), where);
  made.device = device_of(tensor.device(), where);
  made.data = static_cast<std::byte*>(tensor.data_ptr()) + tensor.byte_offset();
  const std::int64_t* shape = tensor.shape().data();
  const std::int64_t* strides = tensor.strides().data();
  for (std::size_t i = 0; i < static_cast<std::size_t>(made.rank); ++i) {
    made.shape[i] = shape[i];
    made.stride[i] = strides[i];
  }
  return made;
}

TensorView view(const MaybeTensor& tensor, const Where& where) {
  return tensor.has_value() ? view(*tensor, where) : TensorView{};
}

int to_int(std::int64_t value, const Where& where) {
  constexpr int kLeast = std::numeric_limits<int>::min(), kMost = std::numeric_limits<int>::max();
  expects(value >= kLeast && value <= kMost, "a number must fit 32 bits", where, value);
  return static_cast<int>(value);
}

std::int64_t open_backend(std::string_view name, std::int64_t threads) {
  Backends& all = backends();
  const std::lock_guard lock(all.mutex);
  const std::pair<std::string, std::int64_t> key{name, threads};
  if (const auto known = all.handles.find(key); known != all.handles.end()) return known->second;
  all.opened.push_back(Backend::by_name(name, {to_int(threads, "Backend: threads"), {}}));
  return all.handles[key] = static_cast<std::int64_t>(all.opened.size()) - 1;
}

Backend backend_of(std::int64_t handle) {
  Backends& all = backends();
  const std::lock_guard lock(all.mutex);
  expects(handle >= 0 && handle < static_cast<std::int64_t>(all.opened.size()), "a backend must have been opened",
          "backend", handle);
  return all.opened[static_cast<std::size_t>(handle)];
}

Backend backend_of(std::int64_t handle, const TensorView& tensor) {
  return backend_of(handle == kByDevice ? handle_of(tensor.device) : handle);
}

Stream stream_of(const Backend& backend) {
  if (backend.kind() != BackendKind::cuda) return {};
  return {TVMFFIEnvGetStream(kDLCUDA, backend.device().index)};
}

Workspace workspace_of(const Backend& backend, const MaybeTensor& workspace, std::int64_t needed, const Where& where) {
  if (workspace.has_value()) {
    const TensorView bytes = view(*workspace, where);
    expects(bytes.dtype == DType::u8 && bytes.rank == 1 && bytes.step(0) == 1 && bytes.device == backend.device(),
            "a workspace must be contiguous bytes, [n] uint8 on the backend's device", where, name_of(bytes.dtype),
            " of rank ", bytes.rank);
    return {bytes.data, bytes.dim(0)};
  }
  if (needed == 0 || backend.kind() == BackendKind::cuda) return {};
  struct alignas(kWorkspaceAlign) Block {
    std::byte bytes[kWorkspaceAlign];
  };
  thread_local std::vector<Block> scratch;
  const auto blocks = static_cast<std::size_t>((needed + kWorkspaceAlign - 1) / kWorkspaceAlign);
  if (scratch.size() < blocks) scratch.resize(blocks);
  return {scratch.data(), needed};
}

}  // namespace sievemla::bindings
