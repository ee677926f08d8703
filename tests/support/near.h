// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/near.h -- comparisons: element-wise bounds; NaN and infinities must sit at the same places.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "base/compare.h"
#include "base/view.h"

namespace sievemla::test {

// |got - want| <= relative * |want| + absolute, everywhere.
template <class A, class B>
testing::AssertionResult near(const A& got, const B& want, double relative, double absolute) {
  if (std::size(got) != std::size(want))
    return testing::AssertionFailure() << "sizes differ: " << std::size(got) << " and " << std::size(want);
  for (std::size_t i = 0; i < std::size(want); ++i) {
    const double a = static_cast<double>(got[i]), b = static_cast<double>(want[i]);
    if (std::isnan(a) && std::isnan(b)) continue;
    if (std::isinf(a) || std::isinf(b)) {
      if (a == b) continue;
    } else if (std::abs(a - b) <= relative * std::abs(b) + absolute) {
      continue;
    }
    return testing::AssertionFailure() << "element " << i << ": got " << a << ", want " << b << ", |difference| "
                                       << std::abs(a - b) << " > " << relative << " * |want| + " << absolute;
  }
  return testing::AssertionSuccess();
}

using base::relative_error;

// A contiguous copy of any f32 / bf16 view, for comparing.
inline std::vector<float> values(const TensorView& v) {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(v.elements()));
  auto extent = [&](int d) { return d < v.rank ? v.dim(d) : std::int64_t{1}; };
  if (v.elements() == 0) return out;
  for (std::int64_t i = 0; i < extent(0); ++i)
    for (std::int64_t j = 0; j < extent(1); ++j)
      for (std::int64_t k = 0; k < extent(2); ++k)
        for (std::int64_t l = 0; l < extent(3); ++l) out.push_back(base::load_f32(v, i, j, k, l));
  return out;
}

}  // namespace sievemla::test
