// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/fuzz/fuzz_safetensors.cc -- any bytes are a file or a BadFile; what a header promises can be read.
#include <cstddef>
#include <cstdint>

#include "model/safetensors.h"
#include "sievemla/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sievemla;
  try {
    const model::SafeTensors file({reinterpret_cast<const char*>(data), size}, "fuzz");
    std::size_t sum = 0;  // reads every byte that the file claims to have
    for (const std::string& name : file.names()) {
      const TensorView& view = file.tensor(name).view;
      const auto* bytes = static_cast<const unsigned char*>(view.data);
      for (std::int64_t i = 0; i < view.elements() * size_of(view.dtype); ++i) sum += bytes[i];
    }
    if (sum == SIZE_MAX) return 1;
  } catch (const BadFile&) {
  }
  return 0;
}
