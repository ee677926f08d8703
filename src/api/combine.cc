// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "sievemla/combine.h"

#include "api/checks.h"
#include "combine/registry.h"

namespace sievemla {

void combine(const Backend& backend, const CombineArgs& args, Stream stream) {
  constexpr auto kAny = api::kAny;
  api::check_tensor(backend, args.partial_out, {kAny, kAny, kAny, kAny}, {DType::f32, DType::bf16},
                    "combine: partial_out");
  api::check_contiguous_rows(args.partial_out, "combine: partial_out");
  const std::int64_t parts = args.partial_out.dim(0), tokens = args.partial_out.dim(1);
  const std::int64_t heads = args.partial_out.dim(2), width = args.partial_out.dim(3);
  api::check_tensor(backend, args.partial_lse, {parts, tokens, heads}, {DType::f32}, "combine: partial_lse");
  if (args.sink) api::check_tensor(backend, args.sink, {heads}, {DType::f32}, "combine: sink");
  api::check_tensor(backend, args.out, {tokens, heads, width}, {DType::f32, DType::bf16}, "combine: out");
  if (args.lse) api::check_tensor(backend, args.lse, {tokens, heads}, {DType::f32}, "combine: lse");
  const auto& kernel = base::pick(stage::combine::combine_kernels(), backend, args, "combine");
  if (tokens > 0 && heads > 0) kernel.run(args, {backend, {}, stream});
}

}  // namespace sievemla
