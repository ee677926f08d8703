// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/combine/shards_test.cc -- attention over parts of the rows, combined, against attention over all of them.
#include <gtest/gtest.h>

#include "sievemla/combine.h"
#include "support/attention_problem.h"
#include "support/backends.h"
#include "support/near.h"

namespace sievemla::test {
namespace {

// Attention over each list by itself, merged. An empty part's output is replaced by NaN: it is not to be read.
Result combined(const Backend& backend, const Problem& whole, const std::vector<Problem>& parts) {
  std::vector<float> out, lse;
  const std::int64_t cells = whole.tokens * whole.heads;
  for (const Problem& part : parts) {
    Result r = part.run(backend);
    for (std::int64_t c = 0; c < cells; ++c)
      if (r.lse[Problem::at(c)] == -kInf) std::fill_n(r.out.begin() + c * whole.latent, whole.latent, kNan);
    out.insert(out.end(), r.out.begin(), r.out.end());
    lse.insert(lse.end(), r.lse.begin(), r.lse.end());
  }
  const auto n = static_cast<std::int64_t>(parts.size());
  Result merged{std::vector<float>(Problem::at(cells * whole.latent), kNan),
                std::vector<float>(Problem::at(cells), kNan)};
  CombineArgs args;
  args.partial_out = tensor(out.data(), {n, whole.tokens, whole.heads, whole.latent});
  args.partial_lse = tensor(lse.data(), {n, whole.tokens, whole.heads});
  args.out = tensor(merged.out.data(), {whole.tokens, whole.heads, whole.latent});
  args.lse = tensor(merged.lse.data(), {whole.tokens, whole.heads});
  combine(backend, args);
  return merged;
}

// 1e-4 is what every f32 path has to meet (tests/attention/properties_test.cc has derived bounds).
void expect_near(const Result& got, const Result& want) {
  EXPECT_LE(relative_error(got.out, want.out), 1e-4);
  EXPECT_LE(relative_error(got.lse, want.lse), 1e-4);
}

TEST(Case23, SplitsAgree) {
  for (const Backend& backend : host_backends()) {
    Problem whole{.tokens = 2, .heads = 4, .pages = 8};
    whole.random_list(300, 290);
    const Result want = whole.run(backend);
    for (std::int64_t splits : {1, 2, 3, 7, 32})
      for (const bool with_empty : {false, true}) {
        SCOPED_TRACE(splits);
        std::vector<Problem> parts;
        for (std::int64_t s = 0; s < splits; ++s) {
          std::vector<std::vector<std::int64_t>> lists(2);
          for (std::int64_t t = 0; t < 2; ++t)
            for (std::int64_t i = 300 * s / splits; i < 300 * (s + 1) / splits; ++i)
              lists[Problem::at(t)].push_back(whole.indices[Problem::at(t * 300 + i)]);
          parts.push_back(Problem(whole).list(lists));
          if (with_empty) parts.push_back(Problem(whole).list({{}, {-1, -1}}));
        }
        expect_near(combined(backend, whole, parts), want);
      }
  }
}

// Decode context parallel over four ranks: position p lies on rank p % 4. Early tokens leave some ranks with nothing.
TEST(Case23, InterleavedShardsOfACausalSequence) {
  constexpr std::int64_t kLength = 60, kRanks = 4;
  for (const Backend& backend : host_backends()) {
    Problem whole{.heads = 2, .pages = 1};
    std::vector<std::vector<std::vector<std::int64_t>>> lists(kRanks, std::vector<std::vector<std::int64_t>>(kLength));
    std::vector<std::vector<std::int64_t>> all(kLength);
    for (std::int64_t t = 0; t < kLength; ++t)
      for (std::int64_t p = 0; p <= t; ++p) {
        all[Problem::at(t)].push_back(p);
        lists[Problem::at(p % kRanks)][Problem::at(t)].push_back(p);
      }
    whole.list(all);
    std::vector<Problem> parts;
    for (const auto& list : lists) parts.push_back(Problem(whole).list(list));
    expect_near(combined(backend, whole, parts), whole.run(backend));
  }
}

}  // namespace
}  // namespace sievemla::test
