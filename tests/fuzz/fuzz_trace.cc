// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/fuzz/fuzz_trace.cc -- any bytes are a trace or a BadFile; what it counts can be counted.
#include <cstddef>
#include <cstdint>

#include <memory>
#include <variant>

#include "model/trace.h"
#include "sievemla/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sievemla;
  try {
    auto file = std::make_unique<model::SafeTensors>(
        std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    const model::Trace trace = model::read_trace(std::move(file));
    if (const auto* mla = std::get_if<model::SparseMlaTrace>(&trace.call)) {
      for (const auto& cache : mla->caches) mla->selected(cache);
    } else {
      std::get<model::IndexerTrace>(trace.call).visible();
    }
  } catch (const BadFile&) {
  }
  return 0;
}
