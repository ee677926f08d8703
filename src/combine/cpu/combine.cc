// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/cpu/combine.cc -- stage 4 on the CPU, in f32. A work unit is a (token, head); it reads each part once.
#include <algorithm>
#include <array>

#include "base/softmax.h"
#include "base/view.h"
#include "combine/registry.h"
#include "cpu/threads.h"

namespace sievemla::stage::combine {
namespace {

using Softmax = base::Softmax<float>;

constexpr std::int64_t kTile = 512;  // columns added up on the stack, between which the weights are made again

void combine_head(const CombineArgs& args, std::int64_t t, std::int64_t h) {
  const std::int64_t parts = args.partial_lse.dim(0), width = args.out.dim(2);
  const auto score = [&](std::int64_t p) { return *base::at<float>(args.partial_lse, p, t, h); };
  Softmax softmax;
  for (std::int64_t p = 0; p < parts; ++p) softmax.raise_peak(score(p));
  for (std::int64_t p = 0; p < parts; ++p) softmax.sum += softmax.weight(score(p));
  const float normaliser = softmax.normaliser(args.sink ? *base::at<float>(args.sink, h) : Softmax::kNothing);

  for (std::int64_t d0 = 0; d0 < width; d0 += kTile) {
    const std::int64_t n = std::min(kTile, width - d0);
    std::array<float, kTile> sum;
    sum.fill(-0.f);  // what adding to changes no bit, not even the sign of a zero
    for (std::int64_t p = 0; p < parts; ++p) {
      if (score(p) == Softmax::kNothing) continue;
      const float weight = softmax.weight(score(p));
      base::visit_real(args.partial_out.dtype, [&](auto type) {
        const auto* x = base::at<decltype(type)>(args.partial_out, p, t, h, d0);
        for (std::int64_t d = 0; d < n; ++d) sum[static_cast<std::size_t>(d)] += weight * base::to_f32(x[d]);
      });
    }
    base::visit_real(args.out.dtype, [&](auto type) {
      using T = decltype(type);
      for (std::int64_t d = 0; d < n; ++d)
        *base::at<T>(args.out, t, h, d0 + d) =
            base::round_to<T>(softmax.empty() ? 0.f : sum[static_cast<std::size_t>(d)] * normaliser);
    });
  }
  if (args.lse) *base::at<float>(args.lse, t, h) = softmax.lse();
}

}  // namespace

void combine_cpu(const CombineArgs& args, const base::Exec& exec) {
  const std::int64_t heads = args.out.dim(1);
  cpu::parallel_for(exec.backend, args.out.dim(0) * heads,
                    [&](std::int64_t i, int) { combine_head(args, i / heads, i % heads); });
}

}  // namespace sievemla::stage::combine
