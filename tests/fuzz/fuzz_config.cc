// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/fuzz/fuzz_config.cc -- any text is a config or a BadFile; a config it accepts gives a rope table.
#include <cstddef>
#include <cstdint>

#include "model/config.h"
#include "model/rope.h"
#include "sievemla/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sievemla;
  try {
    const model::Config config = model::parse_config({reinterpret_cast<const char*>(data), size});
    model::cos_sin_table(config, 2);
    model::softmax_scale(config);
  } catch (const BadFile&) {
  }
  return 0;
}
