// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/kv_cache.cc -- checks and dispatch of the cache's writers and gatherers.
#include "sievemla/kv_cache.h"

#include "api/checks.h"
#include "api/rules.h"
#include "kv/registry.h"
#include "sievemla/error.h"

namespace sievemla {
namespace {

// A dense row-wise tensor of the call: row stride free, last dimension contiguous.
void check_rows(const Backend& backend, const TensorView& view, std::int64_t rows, std::int64_t width,
                std::initializer_list<DType> dtypes, std::string_view where) {
  api::check_tensor(backend, view, {rows, width}, dtypes, where);
  api::check_contiguous_rows(view, where);
}

template <class Args>
void dispatch(std::span<const base::Kernel<Args>> kernels, const Backend& backend, const Args& args, Stream stream,
              const char* where) {
  base::pick(kernels, backend, args, where).run(args, {backend, {}, stream});
}

}  // namespace

const kv::WriteLatentKernel& api::admit(const Backend& backend, const WriteLatentArgs& args) {
  const KvCache& cache = args.cache;
  const std::int64_t tokens = args.latent.dim(0);
  api::check_cache(backend, cache, "write_latent: cache");
  check_rows(backend, args.latent, tokens, cache.latent, {DType::f32, DType::bf16}, "write_latent: latent");
  if (cache.rope > 0) check_rows(backend, args.rope, tokens, cache.rope, {args.latent.dtype}, "write_latent: rope");
  else
    expects(args.rope.elements() == 0, "rope must be absent where a row has none", "write_latent: rope",
            api::describe(args.rope));
  api::check_write_slots(backend, args.slots, tokens, cache.slots(), "write_latent: slots");
  return base::pick(kv::write_latent_kernels(), backend, args, "write_latent");
}

void write_latent(const Backend& backend, const WriteLatentArgs& args, Stream stream) {
  api::admit(backend, args).run(args, {backend, {}, stream});
}

void gather_latent(const Backend& backend, const GatherLatentArgs& args, Stream stream) {
  api::check_cache(backend, args.cache, "gather_latent: cache");
  api::check_tensor(backend, args.slots, {api::kAny}, {DType::i32, DType::i64}, "gather_latent: slots");
  check_rows(backend, args.out, args.slots.dim(0), args.cache.latent + args.cache.rope, {DType::f32, DType::bf16},
             "gather_latent: out");
  dispatch(kv::gather_latent_kernels(), backend, args, stream, "gather_latent");
}

void gather_index_keys(const Backend& backend, const GatherIndexKeysArgs& args, Stream stream) {
  api::check_cache(backend, args.cache, "gather_index_keys: cache");
  api::check_tensor(backend, args.slots, {api::kAny}, {DType::i32, DType::i64}, "gather_index_keys: slots");
  const std::int64_t keys = args.slots.dim(0);
  check_rows(backend, args.keys, keys, kIndexDim, {args.cache.pages.dtype}, "gather_index_keys: keys");
  if (args.cache.format == IndexFormat::fp8)
    api::check_tensor(backend, args.scales, {keys}, {DType::f32}, "gather_index_keys: scales");
  else
    expects(!args.scales, "scales must be absent: only an fp8 cache has them", "gather_index_keys: scales",
            api::describe(args.scales));
  dispatch(kv::gather_index_keys_kernels(), backend, args, stream, "gather_index_keys");
}

}  // namespace sievemla
