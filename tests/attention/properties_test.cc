// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/properties_test.cc -- what must not change a result: the order of a row's slots, padding anywhere, and
// splitting a row into parts that are combined again.
//
// Two results that are each within a bound of the exact answer are within twice the bound of one another; here each is
// held against the answer itself (tests/support/attention_problem.h derives the bounds). The order of the rows changes
// nothing but the order of additions, and padding only where blocks and chunks end; the bounds know neither.
#include "support/property.h"

#include "sievemla/combine.h"
#include "support/attention_problem.h"
#include "support/backends.h"

namespace sievemla::test {
namespace {

// Small enough to draw many: 1 or 2 heads of latent 32 + rope 8, 0 to 700 rows in pages of 9.
Problem draw() {
  const int rows = *rc::gen::inRange(0, 701);
  Problem p{.heads = *rc::gen::inRange<std::int64_t>(1, 3),
            .format = *rc::gen::element(KvFormat::f32, KvFormat::bf16),
            .latent = 32,
            .rope = 8,
            .pages = 80,
            .page_size = 9,
            .seed = *rc::gen::inRange<std::uint64_t>(1, 1000)};
  p.random_list(rows, rows);
  return p;
}

RC_GTEST_PROP(Property, PermutingSlotsChangesNothing, ()) {
  Problem p = draw();
  for (std::size_t i = p.indices.size(); i > 1; --i)
    std::swap(p.indices[i - 1], p.indices[*rc::gen::inRange<std::size_t>(0, i)]);
  for (const Backend& backend : host_backends()) {
    const auto ok = solved(p, backend);
    RC_ASSERT(static_cast<bool>(ok));
  }
}

RC_GTEST_PROP(Property, PaddingAnywhereChangesNothing, ()) {
  Problem p = draw();
  const auto before = p.live(0);
  for (int n = *rc::gen::inRange(0, 200); n > 0; --n)
    p.indices.insert(p.indices.begin() + *rc::gen::inRange<std::ptrdiff_t>(0, std::ssize(p.indices) + 1), -1);
  p.topk = std::ssize(p.indices);
  RC_ASSERT(p.live(0) == before);
  for (const Backend& backend : host_backends()) {
    const auto ok = solved(p, backend);
    RC_ASSERT(static_cast<bool>(ok));
  }
}

// Each part is within the bounds of its own answer, and they are no wider than those of the whole, apart from the terms in
// |lse|: at most 16 here, so that 2 u |lse| <= 2^-19, and the rounding of a stored LSE is at most 2^-21. A part's weight is
// exp of a difference of two LSEs, so it takes both errors; adding up `parts` of them rounds parts + 8 times at most.
RC_GTEST_PROP(Property, SplittingAndCombiningChangesNothing, ()) {
  Problem p = draw();
  p.sinks = *rc::gen::arbitrary<bool>();
  const int parts = *rc::gen::element(1, 2, 3, 7, 32);
  std::vector<Problem> split(static_cast<std::size_t>(parts), p);
  std::vector<std::vector<std::int64_t>> lists(static_cast<std::size_t>(parts));
  for (std::int64_t slot : p.indices) lists[*rc::gen::inRange<std::size_t>(0, lists.size())].push_back(slot);
  for (const Backend& backend : host_backends()) {
    std::vector<float> partial_out, partial_lse;
    for (std::size_t i = 0; i < lists.size(); ++i) {
      split[i].sinks = false;  // the sink is put in when the parts meet
      split[i].list({lists[i]});
      Result part = split[i].run(backend);
      if (lists[i].empty()) std::fill(part.out.begin(), part.out.end(), kNan);  // an empty part is not read
      partial_out.insert(partial_out.end(), part.out.begin(), part.out.end());
      partial_lse.insert(partial_lse.end(), part.lse.begin(), part.lse.end());
    }
    Result merged{std::vector<float>(Problem::at(p.heads * p.latent), kNan),
                  std::vector<float>(Problem::at(p.heads), kNan)};
    std::vector<float> sinks;
    for (std::int64_t h = 0; h < p.heads; ++h) sinks.push_back(p.sink(h));
    CombineArgs args;
    args.partial_out = tensor(partial_out.data(), {parts, 1, p.heads, p.latent});
    args.partial_lse = tensor(partial_lse.data(), {parts, 1, p.heads});
    if (p.sinks) args.sink = tensor(sinks.data(), {p.heads});
    args.out = tensor(merged.out.data(), {1, p.heads, p.latent});
    args.lse = tensor(merged.lse.data(), {1, p.heads});
    combine(backend, args);

    Problem::Cache cache(p);
    for (std::int64_t s : p.live(0)) cache.fill(p, s);
    for (std::int64_t h = 0; h < p.heads; ++h) {
      const Answer want = answer(p, cache, p.live(0), 0, h);
      const Bounds b = bounds(p, want, arithmetic_of(backend));
      RC_ASSERT(want.rows == 0 || std::abs(want.lse) <= 16.);
      const double slack = 2 * (0x1p-19 + 0x1p-21) + (parts + 8) * 0x1p-24,
                   lse = static_cast<double>(merged.lse[Problem::at(h)]);
      if (want.rows == 0) RC_ASSERT(lse == -INFINITY);
      else RC_ASSERT(std::abs(lse - want.lse) <= 2 * b.lse + slack);
      for (std::size_t d = 0; d < want.out.size(); ++d) {
        const double got = static_cast<double>(merged.row(h, p.latent)[d]);
        RC_ASSERT(std::abs(got - want.out[d]) <= (b.out_relative_to_mass + 2 * b.lse + slack) * want.mass[d]);
      }
    }
  }
}

}  // namespace
}  // namespace sievemla::test
