// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bindings/tensors.h -- from what a typed tvm-ffi function gets to what the library takes: tensors, backends, scratch,
// errors.
//
// Of tvm-ffi only its C interface is stable, so nothing crosses but tensors, numbers, strings and None.
#pragma once
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "sievemla/backend.h"
#include "sievemla/error.h"
#include "sievemla/tensor.h"

namespace sievemla::bindings {

using Tensor = tvm::ffi::TensorView;
using MaybeTensor = tvm::ffi::Optional<tvm::ffi::TensorView>;

// A DLPack tensor of rank 1 to 4. uint16 is taken as the bits of bf16 (NumPy has no bfloat16), float8_e4m3fn as u8.
TensorView view(const Tensor& tensor, const Where& where);
TensorView view(const MaybeTensor& tensor, const Where& where);  // None: an absent view

int to_int(std::int64_t value, const Where& where);

// ---- backends: a handle is an index into the list of those opened -----------------------------------

inline constexpr std::int64_t kByDevice = -1;  // the handle that means: the backend of the tensors' device

std::int64_t open_backend(std::string_view name, std::int64_t threads);
Backend backend_of(std::int64_t handle);
Backend backend_of(std::int64_t handle, const TensorView& tensor);

// The caller's current stream on the backend's device. tvm-ffi asks the framework that a tensor came from.
Stream stream_of(const Backend& backend);

// The caller's scratch, u8 [bytes]. None: on a host backend memory of this thread, kept until the thread ends.
Workspace workspace_of(const Backend& backend, const MaybeTensor& workspace, std::int64_t needed, const Where& where);

// ---- errors -----------------------------------------------------------------------------------------

// guarded<f>::call is f, whose errors arrive in Python as the type that says who is at fault.
template <auto f, class Signature = decltype(f)>
struct guarded;

template <auto f, class Result, class... Args>
struct guarded<f, Result (*)(Args...)> {
  static Result call(Args... args) {
    using PythonError = tvm::ffi::Error;  // type, message, traceback
    try {
      return f(args...);
    } catch (const InvalidArgument& error) {
      throw PythonError("ValueError", error.what(), "");
    } catch (const Unsupported& error) {
      throw PythonError("NotImplementedError", error.what(), "");
    } catch (const Error& error) {
      throw PythonError("RuntimeError", error.what(), "");
    } catch (const std::bad_alloc&) {
      throw PythonError("MemoryError", "out of memory", "");
    }
  }
};

}  // namespace sievemla::bindings
