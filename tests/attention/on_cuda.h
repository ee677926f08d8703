// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/on_cuda.h -- a CUDA result against the definition in double, within the bounds that hold for bf16
// arithmetic: |error| <= 8e-3 |ref| + 2e-3 max(1, sum p |v|), lse 1e-3.
#pragma once
#include "support/attention_problem.h"
#include "support/on_cuda.h"

namespace sievemla::test {

inline testing::AssertionResult near(const Problem& p, const Result& result, const Answer& want, std::int64_t t,
                                     std::int64_t h, double of_mass = 0) {
  const double lse = static_cast<double>(result.lse[Problem::at(t * p.heads + h)]);
  if (std::isinf(want.lse) ? lse != want.lse : !(std::abs(lse - want.lse) <= 1e-3))
    return testing::AssertionFailure() << "token " << t << ", head " << h << ": lse " << lse << ", want " << want.lse;
  const auto out = result.row(t * p.heads + h, p.latent);
  for (std::size_t d = 0; d < out.size(); ++d) {
    const double bound =
        want.rows == 0 ? 0 : 8e-3 * std::abs(want.out[d]) + 2e-3 * std::max(1.0, want.mass[d]) + of_mass * want.mass[d];
    if (!(std::abs(static_cast<double>(out[d]) - want.out[d]) <= bound) || (want.rows == 0 && std::signbit(out[d])))
      return testing::AssertionFailure() << "token " << t << ", head " << h << ", column " << d << ": " << out[d]
                                         << ", want " << want.out[d] << ", bound " << bound;
  }
  return testing::AssertionSuccess();
}

inline void expect_near(const Problem& p, const Problem::Cache& cache, const Result& result, double of_mass = 0) {
  const std::int64_t cells = p.tokens * p.heads, step = cells / 40 + 1;
  for (std::int64_t i = 0; i < cells; i += step)
    EXPECT_TRUE(near(p, result, answer(p, cache, p.live(i / p.heads), i / p.heads, i % p.heads), i / p.heads,
                     i % p.heads, of_mass));
}

// of_mass: what a weight may be off by, relative, beyond the bounds above.
inline Result expect_solved(const Problem& p, const Backend& backend, const Problem::Tweak& tweak = {},
                            double of_mass = 0) {
  Problem::Cache cache(p);
  const Result result = p.run(backend, cache.fill(p), tweak);
  expect_near(p, cache, result, of_mass);
  return result;
}

inline constexpr struct {
  KvFormat format;
  int rope;
} kRows[] = {{KvFormat::bf16, 64}, {KvFormat::bf16, 0}, {KvFormat::fp8_ds_mla, 64}, {KvFormat::fp8_nope, 0}};

}  // namespace sievemla::test
