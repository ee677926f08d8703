// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/reference.cc -- stage 3 in double precision: the specification.
//
// Two passes over a token's rows: all scores, whose peak is then final, and then the weighted sum of the values. Arrays
// end in [heads], so that a row is dequantised once for all heads.
#include <algorithm>

#include "attention/registry.h"
#include "attention/rows.h"
#include "base/scratch.h"
#include "base/softmax.h"
#include "kv/formats.h"

namespace sievemla::stage::attention {
namespace {

using Softmax = base::Softmax<double>;

struct Buffers {
  double* q;         // [latent + rope, heads]
  double* row;       // [latent + rope]
  double* score;     // [lanes, heads]
  double* sum;       // [latent, heads] of weight * value
  Softmax* softmax;  // [heads]
  Buffers(base::Scratch& scratch, const AttentionBounds& b)
      : q(scratch.take<double>((b.latent + b.rope) * b.heads)),
        row(scratch.take<double>(b.latent + b.rope)),
        score(scratch.take<double>(b.lanes * b.heads)),
        sum(scratch.take<double>(b.latent * b.heads)),
        softmax(scratch.take<Softmax>(b.heads)) {}
};

}  // namespace

void attention_reference(const AttentionArgs& args, const base::Exec& exec) {
  const Rows rows(args);
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1), latent = args.kv.latent;
  const std::int64_t width = latent + args.kv.rope;
  base::Scratch scratch(exec.workspace.data);
  const Buffers b(scratch, {tokens, heads, rows.most_lanes(tokens), args.kv.latent, args.kv.rope});

  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) load_query(args, t, h, b.q + h, heads);
    std::fill_n(b.softmax, heads, Softmax{});
    std::fill_n(b.sum, latent * heads, 0.0);

    const auto for_each_row = [&](auto&& visit) {
      for (std::int64_t lane = 0; lane < rows.lanes(t); ++lane) {
        const std::int64_t slot = rows.slot(t, lane);
        if (slot < 0) continue;
        kv::load_row(args.kv, slot, b.row);
        visit(b.score + lane * heads);
      }
    };
    for_each_row([&](double* score) {
      std::fill_n(score, heads, 0.0);
      for (std::int64_t d = 0; d < width; ++d)
        for (std::int64_t h = 0; h < heads; ++h) score[h] += b.q[d * heads + h] * b.row[d];
      for (std::int64_t h = 0; h < heads; ++h) b.softmax[h].raise_peak(score[h] *= args.scale);
    });
    for_each_row([&](double* score) {
      for (std::int64_t h = 0; h < heads; ++h) b.softmax[h].sum += score[h] = b.softmax[h].weight(score[h]);
      for (std::int64_t d = 0; d < latent; ++d)
        for (std::int64_t h = 0; h < heads; ++h) b.sum[d * heads + h] += score[h] * b.row[d];
    });

    for (std::int64_t h = 0; h < heads; ++h) {
      const Softmax& softmax = b.softmax[h];
      const double sink = args.sink ? base::load_f32(args.sink, h) : Softmax::kNothing;
      const double normaliser = softmax.normaliser(sink);
      base::visit_real(args.out.dtype, [&](auto type) {
        using T = decltype(type);
        for (std::int64_t d = 0; d < latent; ++d)
          *base::at<T>(args.out, t, h, d) = base::round_to<T>(softmax.empty() ? 0 : b.sum[d * heads + h] * normaliser);
      });
      if (args.lse) *base::at<float>(args.lse, t, h) = static_cast<float>(softmax.lse());
    }
  }
}

std::int64_t attention_reference_bytes(const Backend&, const AttentionBounds& bounds) {
  base::Scratch scratch;
  Buffers(scratch, bounds);
  return scratch.bytes();
}

}  // namespace sievemla::stage::attention
