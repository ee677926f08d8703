// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/combine/combine_test.cc -- merging parts: values, bits, empty parts, sinks, strides.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "sievemla/combine.h"
#include "support/attention_problem.h"
#include "support/backends.h"
#include "support/near.h"

namespace sievemla::test {
namespace {

// Parts of a merge, outputs in f32 or bf16. A part whose LSE is -inf holds NaN.
struct Parts {
  std::int64_t parts, tokens, heads, width;
  std::vector<float> out, lse;  // [parts, tokens, heads, width], [parts, tokens, heads]
  std::vector<float> sink{};
  DType part_dtype = DType::f32, out_dtype = DType::f32;

  std::size_t cell(std::int64_t p, std::int64_t t, std::int64_t h) const {
    return static_cast<std::size_t>((p * tokens + t) * heads + h);
  }
  Result run(const Backend& backend, const std::function<void(CombineArgs&)>& tweak = {}) const {
    std::vector<bf16> out16;
    for (float x : out) out16.push_back(base::to_bf16(x));
    const std::int64_t n = tokens * heads * width;
    Guarded<float> got32(out_dtype == DType::f32 ? n : 0, kNan), got_lse(tokens * heads, kNan);
    Guarded<bf16> got16(out_dtype == DType::bf16 ? n : 0, bf16{0xFFFF});
    CombineArgs args;
    args.partial_out = part_dtype == DType::f32 ? tensor(out.data(), {parts, tokens, heads, width})
                                                : tensor(out16.data(), {parts, tokens, heads, width});
    args.partial_lse = tensor(lse.data(), {parts, tokens, heads});
    if (!sink.empty()) args.sink = tensor(sink.data(), {heads});
    args.out = out_dtype == DType::f32 ? tensor(got32.data(), {tokens, heads, width})
                                       : tensor(got16.data(), {tokens, heads, width});
    args.lse = tensor(got_lse.data(), {tokens, heads});
    if (tweak) tweak(args);
    combine(backend, args);
    EXPECT_TRUE(got32.intact() && got16.intact() && got_lse.intact());
    Result result{{got32.begin(), got32.end()}, {got_lse.begin(), got_lse.end()}};
    for (bf16 x : got16) result.out.push_back(base::to_f32(x));
    return result;
  }
};

// LSEs from -8 to 8, about `empty` of the parts empty.
Parts random_parts(std::int64_t parts, std::int64_t tokens, std::int64_t heads, std::int64_t width, double empty,
                   std::uint64_t seed) {
  Random random(seed);
  Parts p{parts, tokens, heads, width, random.f32s(parts * tokens * heads * width), {}};
  for (std::int64_t i = 0; i < parts * tokens * heads; ++i) {
    const bool nothing = (random.uniform() + 1) / 2 < empty;
    p.lse.push_back(nothing ? -kInf : static_cast<float>(random.uniform()) * 8);
    if (nothing) std::fill_n(p.out.begin() + i * width, width, kNan);
  }
  return p;
}

// The definition, in double, against what a backend made of it.
//   cpu: exp, its difference (of at most 16) and the product round a weight by 2 u + 16 u + u; the sums round `parts` times;
//   reference: only the store to f32 counts. bf16 outputs round once more (half an ulp: 2^-8).
void expect_merged(const Parts& p, const Result& got, const Backend& backend) {
  const double u = backend.kind() == BackendKind::reference ? 0x1p-50 : 0x1p-24;
  const double relative = 2 * (19 + static_cast<double>(p.parts)) * u;
  for (std::int64_t t = 0; t < p.tokens; ++t)
    for (std::int64_t h = 0; h < p.heads; ++h) {
      double sum = 0;
      for (std::int64_t i = 0; i < p.parts; ++i) sum += std::exp(static_cast<double>(p.lse[p.cell(i, t, h)]));
      const double total = sum + (p.sink.empty() ? 0 : std::exp(static_cast<double>(p.sink[Problem::at(h)])));
      const double lse = static_cast<double>(got.lse[p.cell(0, t, h)]);
      if (sum == 0) {
        EXPECT_EQ(lse, -INFINITY);
      } else {
        EXPECT_NEAR(lse, std::log(sum), relative + 0x1p-22 * (1 + std::abs(std::log(sum))));
      }
      for (std::int64_t d = 0; d < p.width; ++d) {
        double want = 0, mass = 0;
        for (std::int64_t i = 0; i < p.parts && sum > 0; ++i) {
          const std::size_t c = p.cell(i, t, h);
          if (std::isinf(p.lse[c])) continue;
          const double share = std::exp(static_cast<double>(p.lse[c])) / total *
                               static_cast<double>(p.out[c * Problem::at(p.width) + Problem::at(d)]);
          want += share;
          mass += std::abs(share);
        }
        const float x = got.out[p.cell(0, t, h) * Problem::at(p.width) + Problem::at(d)];
        const double store = p.out_dtype == DType::bf16 ? 0x1.01p-8 : 0x1.01p-24;
        ASSERT_NEAR(static_cast<double>(x), want, relative * mass + store * std::abs(want))
            << t << ", " << h << ", " << d;
        ASSERT_FALSE(sum == 0 && std::signbit(x));
      }
    }
}

TEST(Combine, MergesAnyNumberOfParts) {
  for (const Backend& backend : host_backends())
    for (std::int64_t parts : {0, 1, 2, 3, 7, 32, 100})
      for (const double empty : {0., 0.4, 1.})
        for (const bool sink : {false, true}) {
          SCOPED_TRACE(testing::Message() << backend.name() << ", " << parts << " parts, empty " << empty);
          Parts p = random_parts(parts, 3, 5, 24, empty, 7);
          if (sink) p.sink = {-3.f, 0.f, 9.f, -kInf, 2.f};
          expect_merged(p, p.run(backend), backend);
        }
}

TEST(Combine, WidthsAndDtypes) {
  for (const Backend& backend : host_backends())
    for (std::int64_t width : {1, 3, 511, 512, 513, 1200})
      for (const DType part : {DType::f32, DType::bf16})
        for (const DType out : {DType::f32, DType::bf16}) {
          SCOPED_TRACE(testing::Message() << width << ' ' << name_of(part) << ' ' << name_of(out));
          Parts p = random_parts(4, 2, 2, width, 0.3, 11);  // whose values are bf16
          p.part_dtype = part, p.out_dtype = out;
          expect_merged(p, p.run(backend), backend);
        }
}

// parts of the same sum in other memory: padded rows, tokens before parts, a part repeated by a stride of 0.
TEST(Combine, Strides) {
  for (const Backend& backend : host_backends()) {
    const Parts p = random_parts(3, 2, 4, 10, 0.2, 5);
    const Result want = p.run(backend);
    std::vector<float> out(3 * 2 * 4 * 17, kNan), lse(3 * 2 * 4 * 2, kNan), got(2 * 4 * 11, 7.f), got_lse(4 * 3, 7.f);
    for (std::int64_t i = 0; i < 3; ++i)
      for (std::int64_t t = 0; t < 2; ++t)
        for (std::int64_t h = 0; h < 4; ++h) {
          const auto to = static_cast<std::size_t>((t * 4 + h) * 3 + i);
          std::copy_n(p.out.begin() + static_cast<std::ptrdiff_t>(p.cell(i, t, h) * 10), 10,
                      out.begin() + static_cast<std::ptrdiff_t>(to * 17));
          lse[to * 2] = p.lse[p.cell(i, t, h)];
        }
    TensorView got_view = tensor(got.data(), {2, 4, 10}), got_lse_view = tensor(got_lse.data(), {2, 4});
    got_view.stride = {11, 22, 1};  // heads before tokens, rows of 11
    got_lse_view.stride = {1, 3};
    p.run(backend, [&](CombineArgs& args) {
      args.partial_out = tensor(out.data(), {3, 2, 4, 10});
      args.partial_out.stride = {17, 4 * 3 * 17, 3 * 17, 1};
      args.partial_lse = tensor(lse.data(), {3, 2, 4});
      args.partial_lse.stride = {2, 4 * 3 * 2, 3 * 2};
      args.out = got_view, args.lse = got_lse_view;
    });
    EXPECT_TRUE(same_bits(values(got_view), want.out));
    EXPECT_TRUE(same_bits(values(got_lse_view), want.lse));
    EXPECT_EQ(std::count(got.begin(), got.end(), 7.f), 8);
    EXPECT_EQ(std::count(got_lse.begin(), got_lse.end(), 7.f), 4);

    const Parts one = random_parts(1, 2, 4, 10, 0, 5);
    const Result twice = one.run(backend, [](CombineArgs& args) {
      args.partial_out.shape[0] = args.partial_lse.shape[0] = 2;
      args.partial_out.stride[0] = args.partial_lse.stride[0] = 0;
    });
    EXPECT_TRUE(same_bits(twice.out, one.out));  // (x + x) / 2 is exact
    for (std::size_t i = 0; i < one.lse.size(); ++i) EXPECT_NEAR(twice.lse[i], one.lse[i] + std::log(2.f), 1e-6);
    EXPECT_TRUE(same_bits(one.run(backend, [](CombineArgs& args) { args.lse = {}; }).out, one.out));
  }
}

// A part alone comes back as it is, to the sign of its zeros; and so it does among empty parts, before and after it.
TEST(Combine, EmptyPartsChangeNoBit) {
  for (const Backend& backend : host_backends()) {
    Parts one = random_parts(1, 2, 3, 40, 0, 21);
    one.out[5] = -0.f;
    EXPECT_TRUE(same_bits(one.run(backend), {one.out, one.lse}));

    const Parts some = random_parts(3, 2, 3, 40, 0.2, 22);
    for (const Parts& p : {one, some}) {
      const Result want = p.run(backend);
      for (std::int64_t before : {0, 1, 5})
        for (std::int64_t after : {0, 1, 5}) {
          Parts padded = p;
          padded.parts = before + p.parts + after;
          const auto cells = static_cast<std::size_t>(p.tokens * p.heads);
          padded.out.insert(padded.out.begin(), static_cast<std::size_t>(before) * cells * 40, kNan);
          padded.out.insert(padded.out.end(), static_cast<std::size_t>(after) * cells * 40, kNan);
          padded.lse.insert(padded.lse.begin(), static_cast<std::size_t>(before) * cells, -kInf);
          padded.lse.insert(padded.lse.end(), static_cast<std::size_t>(after) * cells, -kInf);
          EXPECT_TRUE(same_bits(padded.run(backend), want));
        }
    }
  }
}

TEST(Combine, NothingToDo) {
  for (const Backend& backend : host_backends())
    for (const auto& [tokens, heads, width] : {std::array<std::int64_t, 3>{0, 4, 8}, {3, 0, 8}, {3, 4, 0}}) {
      Parts p = random_parts(2, tokens, heads, width, 0, 1);
      const Result result = p.run(backend);
      EXPECT_TRUE(result.out.empty());
      for (float lse : result.lse) EXPECT_FALSE(std::isnan(lse));
    }
}

// A NaN LSE or one of +inf makes its own cell NaN, no other.
TEST(Combine, NanStaysInItsCell) {
  for (const Backend& backend : host_backends())
    for (const float bad : {kNan, kInf}) {
      Parts p = random_parts(3, 2, 2, 8, 0, 3);
      const Result clean = p.run(backend);
      p.lse[p.cell(1, 1, 0)] = bad;
      const Result result = p.run(backend);
      for (std::int64_t cell = 0; cell < 4; ++cell) {
        const auto row = result.row(cell, 8);
        EXPECT_EQ(std::all_of(row.begin(), row.end(), [](float x) { return std::isnan(x); }), cell == 2);
        EXPECT_EQ(std::isnan(result.lse[Problem::at(cell)]), cell == 2);
        EXPECT_EQ(static_cast<bool>(same_bits(row, clean.row(cell, 8))), cell != 2);
      }
    }
}

// LSEs far from 0: only differences matter.
TEST(Combine, LargeLses) {
  for (const Backend& backend : host_backends())
    for (const float offset : {1e4f, -1e4f}) {
      const Parts near_zero{2, 1, 1, 1, {1.f, 5.f}, {0.f, 1.f}};
      Parts far = near_zero;
      for (float& x : far.lse) x += offset;
      EXPECT_TRUE(same_bits(far.run(backend).out, near_zero.run(backend).out));
      EXPECT_NEAR(far.run(backend).lse[0], offset + 1.3132617, std::abs(offset) * 0x1p-23);
    }
}

// Shard A: one key of score 0 and value 0; shard B: one of score ln 3 and value 4. With 2 as the base the merge would give
// 3.3196. Then an empty shard, and empty ones only.
TEST(Case23, LseBase) {
  for (const Backend& backend : host_backends()) {
    const float ln3 = std::log(3.f);
    const Result two = Parts{2, 1, 1, 1, {0.f, 4.f}, {0.f, ln3}}.run(backend);
    EXPECT_NEAR(two.out[0], 3.f, 1e-6);
    EXPECT_NEAR(two.lse[0], 1.386294f, 1e-6);
    EXPECT_TRUE(same_bits(Parts{3, 1, 1, 1, {0.f, kNan, 4.f}, {0.f, -kInf, ln3}}.run(backend), two));
    const Result none = Parts{2, 1, 1, 1, {kNan, kNan}, {-kInf, -kInf}, {5.f}}.run(backend);
    EXPECT_TRUE(same_bits(none, Result{{0.f}, {-kInf}}));
  }
}

}  // namespace
}  // namespace sievemla::test
