// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/verify_bisect.cc -- sievemla verify --bisect: which part is at fault, found without a model.
//
// With k at least the context, the indexer's scores do not matter: its selection is every row, and attention over the
// selected rows is dense attention. What differs names the part.
#include <algorithm>
#include <cmath>

#include "base/compare.h"
#include "base/view.h"
#include "cli/inputs.h"
#include "cli/measure.h"
#include "cli/output.h"
#include "cli/place.h"
#include "cli/verify.h"
#include "sievemla/error.h"

namespace sievemla::cli {
namespace {

constexpr int kLatent = 512;
constexpr double kF32 = 1e-4;  // of f32 accumulation

struct Problem {
  SelectArgs select;
  AttentionArgs attention;  // dense
  std::vector<std::int64_t> lengths;
  std::int64_t heads, index_heads, longest, k;
  std::string text;
};

// One query token a request, on types that every backend serves.
Problem draw(Inputs& in) {
  Problem p;
  const std::int64_t requests = 1 + in.below(3), page = in.one_of<std::int64_t>({16, 64});
  const int rope = in.one_of({64, 0});
  const KvFormat format = in.chance(50) ? KvFormat::bf16 : rope ? KvFormat::fp8_ds_mla : KvFormat::fp8_nope;
  p.heads = in.one_of<std::int64_t>({8, 16, 64, 128});
  p.index_heads = in.one_of<std::int64_t>({32, 64});
  p.longest = 1 + in.below(700);
  p.k = p.longest + in.below(100);
  for (std::int64_t r = 0; r < requests; ++r) p.lengths.push_back(r == 0 ? p.longest : in.below(p.longest + 1));

  const TensorView table = in.block_table(p.lengths, page), lengths = in.ints(p.lengths, {requests});
  const std::int64_t pages = requests * table.dim(1);
  const std::vector<std::int64_t> held = slots_of(table, p.lengths, page);
  p.select.score.q = in.normal(DType::u8, {requests, p.index_heads, kIndexDim}, 1.f);
  p.select.score.weights = in.normal(DType::f32, {requests, p.index_heads}, 0.1f);
  p.select.score.paged = {in.index_cache(IndexFormat::fp8, pages, page, held), table, {}};
  p.select.score.lengths = lengths;
  p.select.width = p.longest;
  p.select.positions = in.poisoned(DType::i32, {requests, p.k});
  p.select.slots = in.poisoned(DType::i32, {requests, p.k});
  p.select.map = {table, {}, page, {}};

  p.attention.q = in.normal(DType::bf16, {requests, p.heads, kLatent + rope}, 1.f);
  p.attention.kv = in.kv_cache(format, kLatent, rope, pages, page, held);
  p.attention.rows = BlockTable{table, lengths};
  p.attention.scale = 0.0625f;
  p.text = fmt::format("{} {}+{}, {} heads, {} requests of up to {}, k {}, pages of {}", info(format).name, kLatent,
                       rope, p.heads, requests, p.longest, p.k, page);
  return p;
}

struct Attended {
  std::vector<float> out, lse;
  bool in_f32;  // the kernel that served computes so
};
Attended attend(const Backend& backend, const Problem& p, const RowSource& rows, std::int64_t lanes) {
  const std::int64_t tokens = p.attention.q.dim(0);
  Attended a{std::vector<float>(static_cast<std::size_t>(tokens * p.heads * kLatent)),
             std::vector<float>(static_cast<std::size_t>(tokens * p.heads)), true};
  AttentionArgs args = p.attention;
  args.rows = rows;
  args.out = tensor(a.out.data(), {tokens, p.heads, kLatent});
  args.lse = tensor(a.lse.data(), {tokens, p.heads});
  Place place(backend);
  const AttentionArgs there = place.put_all(args);
  attention(backend, there,
            place.workspace(attention_workspace_bytes(backend, {tokens, p.heads, lanes, kLatent, args.kv.rope})));
  place.take_back(args.out);
  place.take_back(args.lse);
  const auto& kernel = base::pick(stage::attention::attention_kernels(), backend, there, "verify");
  a.in_f32 = tolerance(backend, kernel) <= kF32;
  return a;
}

// Error over bound. Where weights and rows are rounded to bf16, each by 2^-9 of itself at most, an output may be off by
// 8e-3 of itself and by 2e-3 of the rows that it is an average of, which are about 1 here; an lse by 1e-3.
double share(const Attended& got, const Attended& want, bool in_f32) {
  if (in_f32) return std::max(base::relative_error(got.out, want.out), base::relative_error(got.lse, want.lse)) / kF32;
  double worst = 0;
  for (std::size_t i = 0; i < want.out.size(); ++i) {
    const double off = std::abs(static_cast<double>(got.out[i]) - static_cast<double>(want.out[i]));
    worst =
        std::max(worst, std::isnan(off) ? HUGE_VAL : off / (8e-3 * std::abs(static_cast<double>(want.out[i])) + 2e-3));
  }
  for (std::size_t i = 0; i < want.lse.size(); ++i) {
    if (got.lse[i] == want.lse[i]) continue;  // -inf too
    const double off = std::abs(static_cast<double>(got.lse[i]) - static_cast<double>(want.lse[i]));
    worst = std::max(worst, std::isnan(off) ? HUGE_VAL : off / 1e-3);
  }
  return worst;
}

void choose(const Backend& backend, const Problem& p) {
  poison(p.select.positions);
  poison(p.select.slots);
  Place place(backend);
  const SelectArgs args = place.put_all(p.select);
  const std::int64_t rows = args.score.q.dim(0);
  select(backend, args, place.workspace(select_workspace_bytes(backend, {rows, p.index_heads, args.width, p.k})));
  place.take_back(p.select.positions);
  place.take_back(p.select.slots);
}

// What a selection of every row is, written over the one that a backend made: later steps do not inherit its faults.
std::int64_t misplaced(const Problem& p) {
  std::int64_t wrong = 0;
  const TensorView &table = p.select.map.block_table, &slots = p.select.slots;
  const std::int64_t page = p.select.map.page_size;
  for (std::int64_t t = 0; t < slots.dim(0); ++t)
    for (std::int64_t lane = 0; lane < p.k; ++lane) {
      const bool live = lane < p.lengths[static_cast<std::size_t>(t)];
      const std::int64_t position = live ? lane : -1;
      const std::int64_t slot = live ? base::load_int(table, t, lane / page) * page + lane % page : -1;
      wrong += base::load_int(p.select.positions, t, lane) != position || base::load_int(slots, t, lane) != slot;
      base::store_int(slots, slot, t, lane);
    }
  return wrong;
}

}  // namespace

std::vector<Verdict> verify_bisect(const VerifyOptions& options) {
  std::vector<Verdict> verdicts;
  for (const Backend& backend : options.backends)
    for (const char* part : {"selection", "dense attention", "sparse attention"})
      verdicts.push_back({"bisect", fmt::format("{} ({})", part, backend.name()), backend.name(), 0, 0, 0, {}, {}, {}});

  for (int i = 0; i < options.cases; ++i) {
    const std::uint64_t seed = options.seed + static_cast<std::uint64_t>(i);
    Inputs in(seed);
    const Problem p = draw(in);
    const auto judge = [&](Verdict& v, double off, double most, std::string_view rule, const char* unit) {
      ++v.cases;
      v.shares.push_back(off);
      v.worst = std::max(v.worst, off);
      if (off > most)
        v.failures.push_back(
            error_message(rule, fmt::format("{}, --seed {}: {}", v.kernel, seed, p.text), error_text(off), " ", unit));
    };
    constexpr const char *kLanes = "lanes that differ", *kShare = "times the error that may be";
    const std::int64_t whole_pages = p.select.map.block_table.dim(1) * p.select.map.page_size;  // CUDA's bound
    const Attended want = attend(Backend::reference(), p, p.attention.rows, whole_pages);
    for (std::size_t b = 0; b < options.backends.size(); ++b) {
      const Backend& backend = options.backends[b];
      Verdict* const of = &verdicts[3 * b];
      choose(backend, p);
      judge(of[0], static_cast<double>(misplaced(p)), 0, "a top-k of at least the context selects every row, in order",
            kLanes);
      const Attended dense = attend(backend, p, p.attention.rows, whole_pages);
      judge(of[1], share(dense, want, dense.in_f32), 1, "dense attention must match the reference", kShare);
      const Attended sparse = attend(backend, p, Slots{p.select.slots, {}}, p.k);
      judge(of[2], share(sparse, dense, sparse.in_f32) / 2, 1, "attention over every row must be dense attention",
            kShare);
    }
    if (options.step) options.step("bisect");
  }
  return verdicts;
}

}  // namespace sievemla::cli
