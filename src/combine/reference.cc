// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/combine/reference.cc -- stage 4 in double precision: the specification.
#include "base/softmax.h"
#include "base/view.h"
#include "combine/registry.h"

namespace sievemla::stage::combine {

// The parts' own log-sum-exps are the scores of this softmax, and their outputs its values.
void combine_reference(const CombineArgs& args, const base::Exec&) {
  using Softmax = base::Softmax<double>;
  const TensorView& lse = args.partial_lse;
  const std::int64_t parts = lse.dim(0), tokens = args.out.dim(0), heads = args.out.dim(1), width = args.out.dim(2);
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t h = 0; h < heads; ++h) {
      Softmax softmax;
      for (std::int64_t p = 0; p < parts; ++p) softmax.raise_peak(*base::at<float>(lse, p, t, h));
      for (std::int64_t p = 0; p < parts; ++p) softmax.sum += softmax.weight(*base::at<float>(lse, p, t, h));
      const double normaliser = softmax.normaliser(args.sink ? *base::at<float>(args.sink, h) : Softmax::kNothing);

      for (std::int64_t d = 0; d < width; ++d) {
        double sum = -0.0;  // what adding to changes no bit, not even the sign of a zero
        for (std::int64_t p = 0; p < parts; ++p)
          if (const double score = *base::at<float>(lse, p, t, h); score != Softmax::kNothing)
            sum += softmax.weight(score) * base::load_f32(args.partial_out, p, t, h, d);
        base::visit_real(args.out.dtype, [&](auto type) {
          using T = decltype(type);
          *base::at<T>(args.out, t, h, d) = base::round_to<T>(softmax.empty() ? 0 : sum * normaliser);
        });
      }
      if (args.lse) *base::at<float>(args.lse, t, h) = static_cast<float>(softmax.lse());
    }
}

}  // namespace sievemla::stage::combine
