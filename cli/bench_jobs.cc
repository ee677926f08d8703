// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/bench_jobs.cc -- the work behind each kind of case, and how its result is compared with the reference.
#include "cli/bench_jobs.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "api/kernel_lists.h"
#include "base/compare.h"
#include "base/view.h"
#include "cli/measure.h"
#include "sievemla/error.h"
#include "sievemla/kv_cache.h"
#include "sievemla/pipeline.h"

namespace sievemla::cli {
namespace {

constexpr int kLatent = 512, kRope = kBenchRope;
constexpr std::int64_t kPage = 64;
constexpr std::int64_t kSpan = 32768;  // cache rows of one request
constexpr float kScale = 1.f / 24;     // 576^-0.5

double as_double(std::int64_t n) { return static_cast<double>(n); }

std::vector<float> floats(const TensorView& contiguous) {
  TensorView flat = contiguous;
  flat.stride[0] = 1;
  std::vector<float> v;
  for (std::int64_t i = 0; i < contiguous.elements(); ++i) v.push_back(base::load_f32(flat, i));
  return v;
}

// The tier that a kernel's name ends with.
std::optional<cpu::Isa> isa_of(std::string_view kernel) {
  for (const cpu::IsaInfo& row : cpu::kIsas)
    if (kernel.ends_with("_" + std::string(row.name))) return row.isa;
  return {};
}

// Notes the kernel that the call will go to.
template <class Kernel, class Args>
const Kernel& note(Job& job, std::span<const Kernel> kernels, const Backend& backend, const Args& args) {
  const Kernel& kernel = base::pick(kernels, backend, args, "bench");
  job.kernels += (job.kernels.empty() ? "" : " + ") + std::string(kernel.name);
  if (!job.isa) job.isa = isa_of(kernel.name);
  return kernel;
}

// ---- attention --------------------------------------------------------------------------------------

constexpr std::int64_t kChecked = 2;  // query rows that are compared with the reference, which is slow

// The job of a call whose rows are set; `pairs` (query row, cache row) go through it.
Job attend(const Setting& s, AttentionArgs args, std::int64_t pairs, std::int64_t lanes) {
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1);
  args.scale = kScale;
  args.out = s.inputs->poisoned(DType::bf16, {tokens, heads, kLatent});
  const AttentionBounds bounds{tokens, heads, lanes, kLatent, kRope};
  const auto scratch = std::make_shared<Scratch>(attention_workspace_bytes(s.backend, bounds));
  Job job;
  job.flops = 2.0 * as_double(heads * pairs) * (2 * kLatent + kRope);
  job.bytes = as_double(pairs * info(args.kv.format).row_bytes(kLatent, kRope));
  job.call = [args, scratch, inputs = s.inputs, backend = s.backend] {
    attention(backend, args, scratch->workspace());
  };
  job.error = [args, heads, bounds, inputs = s.inputs] {
    const Backend reference = Backend::reference();
    const std::int64_t some = std::min(kChecked, args.q.dim(0));
    AttentionArgs few = args;
    few.q = narrow(args.q, 0, some);
    if (auto* slots = std::get_if<Slots>(&few.rows)) slots->indices = narrow(slots->indices, 0, some);
    if (auto* blocks = std::get_if<BlockTable>(&few.rows)) {
      blocks->table = narrow(blocks->table, 0, some);
      blocks->lengths = narrow(blocks->lengths, 0, some);
    }
    std::vector<float> want(static_cast<std::size_t>(some * heads * kLatent));
    few.out = tensor(want.data(), {some, heads, kLatent});
    const Scratch room(attention_workspace_bytes(reference, {some, heads, bounds.lanes, kLatent, kRope}));
    attention(reference, few, room.workspace());
    return base::relative_error(floats(narrow(args.out, 0, some)), want);
  };
  const auto& kernel = note(job, stage::attention::attention_kernels(), s.backend, args);
  job.bound = 0x1p-8 + tolerance(s.backend, kernel);  // the output is rounded to bf16, the reference's here is not
  return job;
}

// `rows` query rows, each with k different slots of `span` that start at `first(row)`.
Slots random_slots(const Setting& s, std::int64_t rows, std::int64_t k, std::int64_t span, std::int64_t stride) {
  std::vector<std::int64_t> lanes;
  for (std::int64_t t = 0; t < rows; ++t)
    for (const std::int64_t slot : s.inputs->distinct(k, span)) lanes.push_back(t * stride + slot);
  Slots slots;
  slots.indices = s.inputs->ints(lanes, {rows, k});
  return slots;
}

AttentionArgs attention_over(const Setting& s, std::int64_t rows, std::int64_t slots) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(slots));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  AttentionArgs args;
  args.q = s.inputs->normal(DType::bf16, {rows, s["h"], kLatent + kRope}, 1.f / 3);
  args.kv = s.inputs->kv_cache(kv_format_by_name(s.format), kLatent, kRope, (slots + kPage - 1) / kPage, kPage, all);
  return args;
}

Job attend_decode(const Setting& s) {
  const std::int64_t span = decode_span(s["b"]);
  AttentionArgs args = attention_over(s, s["b"], s["b"] * span);
  args.rows = random_slots(s, s["b"], s["topk"], span, span);
  return attend(s, args, s["b"] * s["topk"], s["topk"]);
}

Job attend_prefill(const Setting& s) {
  AttentionArgs args = attention_over(s, s["s"], s["kv"]);
  args.rows = random_slots(s, s["s"], s["topk"], s["kv"], 0);
  return attend(s, args, s["s"] * s["topk"], s["topk"]);
}

Job attend_dense(const Setting& s) {
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(s["b"]), s["ctx"]);
  AttentionArgs args = attention_over(s, s["b"], s["b"] * ((s["ctx"] + kPage - 1) / kPage) * kPage);
  args.rows = BlockTable{s.inputs->block_table(lengths, kPage), s.inputs->ints(lengths, {s["b"]})};
  return attend(s, args, s["b"] * s["ctx"], s["ctx"]);
}

// ---- indexer ----------------------------------------------------------------------------------------

// Queries and keys, and which keys each row sees; no logits yet.
struct Scoring {
  IndexScoreArgs args;
  std::int64_t rows, width, pairs = 0;
};

Scoring scoring(const Setting& s, const std::vector<std::int64_t>& lengths) {
  Scoring scoring;
  scoring.rows = static_cast<std::int64_t>(lengths.size());
  scoring.width = *std::max_element(lengths.begin(), lengths.end());
  for (const std::int64_t length : lengths) scoring.pairs += length;
  scoring.args.q = s.inputs->normal(DType::u8, {scoring.rows, s["h"], kIndexDim}, 1.f);
  scoring.args.weights = s.inputs->normal(DType::f32, {scoring.rows, s["h"]}, 0.1f);
  scoring.args.lengths = s.inputs->ints(lengths, {scoring.rows});
  return scoring;
}

// One query token a request, keys in shuffled pages.
Scoring decode_scoring(const Setting& s) {
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(s["b"]), s["ctx"]);
  Scoring result = scoring(s, lengths);
  PagedKeys& paged = result.args.paged;
  paged.block_table = s.inputs->block_table(lengths, kPage);
  paged.cache = s.inputs->index_cache(IndexFormat::fp8, s["b"] * paged.block_table.dim(1), kPage,
                                      slots_of(paged.block_table, lengths, kPage));
  return result;
}

// The last tokens of a sequence, causal, keys side by side.
Scoring prefill_scoring(const Setting& s) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < s["s"]; ++i) lengths.push_back(s["kv"] - s["s"] + i + 1);
  Scoring result = scoring(s, lengths);
  result.args.contiguous.keys = s.inputs->normal(DType::u8, {s["kv"], kIndexDim}, 1.f);
  result.args.contiguous.scales = s.inputs->normal(DType::f32, {s["kv"]}, 0.3f);
  return result;
}

// The first rows of a scoring.
IndexScoreArgs first_rows(const Scoring& scoring, std::int64_t count) {
  IndexScoreArgs args = scoring.args;
  args.q = narrow(args.q, 0, count);
  args.weights = narrow(args.weights, 0, count);
  args.lengths = narrow(args.lengths, 0, count);
  if (args.paged.block_table) args.paged.block_table = narrow(args.paged.block_table, 0, count);  // one row a request
  return args;
}

std::vector<float> scores_of(const Backend& backend, const Scoring& scoring, std::int64_t count) {
  IndexScoreArgs args = first_rows(scoring, count);
  std::vector<float> logits(static_cast<std::size_t>(count * scoring.width));
  args.logits = tensor(logits.data(), {count, scoring.width});
  const Scratch scratch(index_scores_workspace_bytes(backend, {count, args.q.dim(1), scoring.width}));
  index_scores(backend, args, scratch.workspace());
  return logits;
}

double score_flops(const Setting& s, const Scoring& scoring) {
  return 2.0 * kIndexDim * as_double(s["h"] * scoring.pairs);
}

Job score_job(const Setting& s, Scoring scoring, double bytes_a_pair) {
  scoring.args.logits = s.inputs->poisoned(DType::f32, {scoring.rows, scoring.width});
  const auto scratch =
      std::make_shared<Scratch>(index_scores_workspace_bytes(s.backend, {scoring.rows, s["h"], scoring.width}));
  Job job;
  job.flops = score_flops(s, scoring);
  job.bytes = bytes_a_pair * as_double(scoring.pairs);
  job.call = [scoring, scratch, inputs = s.inputs, backend = s.backend] {
    index_scores(backend, scoring.args, scratch->workspace());
  };
  job.error = [scoring, inputs = s.inputs] {
    const std::int64_t some = std::min(kChecked, scoring.rows);
    return base::relative_error(floats(narrow(scoring.args.logits, 0, some)),
                                scores_of(Backend::reference(), scoring, some));
  };
  job.bound = tolerance(s.backend, note(job, stage::indexer::index_scores_kernels(), s.backend, scoring.args));
  return job;
}

Job index_decode(const Setting& s) { return score_job(s, decode_scoring(s), kIndexKeyBytes); }
Job index_prefill(const Setting& s) { return score_job(s, prefill_scoring(s), sizeof(float)); }

// ---- top-k, and stages together ---------------------------------------------------------------------

// Infinity unless the ids are those that the reference selects from the very scores.
double ids_error(const TensorView& got, const TensorView& scores, const TensorView& lengths) {
  const Backend reference = Backend::reference();
  const std::int64_t rows = scores.dim(0), k = got.dim(1);
  std::vector<std::int32_t> want(static_cast<std::size_t>(rows * k));
  TopkArgs args;
  args.scores = scores;
  args.lengths = lengths;
  args.positions = tensor(want.data(), {rows, k});
  const Scratch scratch(topk_workspace_bytes(reference, {rows, scores.dim(1), k}));
  topk(reference, args, scratch.workspace());
  return std::equal(want.begin(), want.end(), base::at<std::int32_t>(got, 0)) ? 0
                                                                              : std::numeric_limits<double>::infinity();
}

Job topk_rows(const Setting& s) {
  const std::int64_t rows = s["rows"], width = s["len"], k = s["k"];
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(rows), width);
  TopkArgs args;
  args.scores = s.inputs->normal(DType::f32, {rows, width}, 1.f);
  args.lengths = s.inputs->ints(lengths, {rows});
  args.positions = s.inputs->poisoned(DType::i32, {rows, k});
  const auto scratch = std::make_shared<Scratch>(topk_workspace_bytes(s.backend, {rows, width, k}));
  Job job;
  job.bytes = 4.0 * as_double(rows * width);
  job.call = [args, scratch, inputs = s.inputs, backend = s.backend] { topk(backend, args, scratch->workspace()); };
  note(job, stage::topk::topk_kernels(), s.backend, args);
  job.error = [args, inputs = s.inputs] { return ids_error(args.positions, args.scores, args.lengths); };
  return job;
}

// Scores and top-k in one call; slots too, where there are pages.
Job select_job(const Setting& s, const Scoring& scoring, std::int64_t k, double bytes_a_pair, TensorView slots = {}) {
  SelectArgs args;
  args.score = scoring.args;
  args.width = scoring.width;
  args.positions = s.inputs->poisoned(DType::i32, {scoring.rows, k});
  args.slots = slots;
  args.map.block_table = scoring.args.paged.block_table;
  args.map.page_size = kPage;
  const auto scratch =
      std::make_shared<Scratch>(select_workspace_bytes(s.backend, {scoring.rows, s["h"], scoring.width, k}));
  Job job;
  job.flops = score_flops(s, scoring);
  job.bytes = bytes_a_pair * as_double(scoring.pairs);
  job.call = [args, scratch, inputs = s.inputs, backend = s.backend] { select(backend, args, scratch->workspace()); };
  job.error = [args, scoring, inputs = s.inputs, backend = s.backend] {
    const std::int64_t some = std::min(kChecked, scoring.rows);
    const std::vector<float> scores = scores_of(backend, scoring, some);  // index_scores has its own case
    return ids_error(narrow(args.positions, 0, some), tensor(scores.data(), {some, scoring.width}),
                     narrow(scoring.args.lengths, 0, some));
  };
  const TensorView scores = tensor(static_cast<const float*>(nullptr), {scoring.rows, scoring.width});
  const TopkArgs selection{scores, {}, scoring.args.lengths, args.positions, args.slots, args.map};
  note(job, stage::indexer::index_scores_kernels(), s.backend, scoring.args);
  note(job, stage::topk::topk_kernels(), s.backend, selection);
  return job;
}

Job chain(const Setting& s) { return select_job(s, decode_scoring(s), s["k"], kIndexKeyBytes); }
Job select_prefill(const Setting& s) { return select_job(s, prefill_scoring(s), s["k"], sizeof(float)); }

// chain to slots, then attention over the rows of the same pages.
Job step(const Setting& s) {
  const Scoring scoring = decode_scoring(s);
  const std::int64_t b = s["b"], k = s["k"];
  const TensorView slots = s.inputs->poisoned(DType::i32, {b, k});
  const Job first = select_job(s, scoring, k, kIndexKeyBytes, slots);
  Setting attended = s;
  attended.n["h"] = s["H"];
  attended.format = info(KvFormat::fp8_ds_mla).name;
  AttentionArgs args = attention_over(attended, b, scoring.args.paged.cache.slots());
  args.rows = Slots{slots, {}};
  const Job second = attend(attended, args, b * k, k);
  Job job;
  job.flops = first.flops + second.flops;
  job.bytes = first.bytes + second.bytes;
  job.kernels = first.kernels + " + " + second.kernels;
  job.isa = second.isa;
  job.call = [first, second] {
    first.call();
    second.call();
  };
  job.error = [first, second] { return first.error() + second.error(); };
  job.bound = second.bound;
  return job;
}

// ---- rows of the cache ------------------------------------------------------------------------------

// 0 if both tensors, which lie without gaps, hold the same bits, else infinity.
double bits_error(const TensorView& a, const TensorView& b) {
  const auto bytes = static_cast<std::size_t>(a.elements() * size_of(a.dtype));
  return std::memcmp(a.data, b.data, bytes) == 0 ? 0 : std::numeric_limits<double>::infinity();
}

TensorView row_slots(const Setting& s) { return s.inputs->ints(s.inputs->distinct(s["n"], kBenchSlots), {s["n"]}); }

KvCache row_cache(const Setting& s, std::span<const std::int64_t> filled) {
  return s.inputs->kv_cache(kv_format_by_name(s.format), kLatent, kRope, kBenchSlots / kPage, kPage, filled);
}

// Of the cache's row and of the same in bf16, for all n.
double row_bytes(const Setting& s, const KvCache& cache) {
  return as_double(s["n"] * (info(cache.format).row_bytes(kLatent, kRope) + (kLatent + kRope) * size_of(DType::bf16)));
}

// New tokens' bf16 rows to random slots.
Job kv_write(const Setting& s) {
  WriteLatentArgs args;
  args.latent = s.inputs->normal(DType::bf16, {s["n"], kLatent}, 1.f / 3);
  args.rope = s.inputs->normal(DType::bf16, {s["n"], kRope}, 1.f / 3);
  args.slots = row_slots(s);
  args.cache = row_cache(s, {});
  Job job;
  job.bytes = row_bytes(s, args.cache);
  job.call = [args, inputs = s.inputs, backend = s.backend] { write_latent(backend, args); };
  job.error = [args, want = row_cache(s, {}), inputs = s.inputs] {
    WriteLatentArgs again = args;
    again.cache = want;
    write_latent(Backend::reference(), again);
    return bits_error(args.cache.pages, want.pages);
  };
  note(job, kv::write_latent_kernels(), s.backend, args);
  return job;
}

// Rows of random slots as bf16.
Job kv_gather(const Setting& s) {
  GatherLatentArgs args;
  args.slots = row_slots(s);
  std::vector<std::int64_t> filled;
  for (std::int64_t i = 0; i < s["n"]; ++i) filled.push_back(base::load_int(args.slots, i));
  args.cache = row_cache(s, filled);
  args.out = s.inputs->poisoned(DType::bf16, {s["n"], kLatent + kRope});
  Job job;
  job.bytes = row_bytes(s, args.cache);
  job.call = [args, inputs = s.inputs, backend = s.backend] { gather_latent(backend, args); };
  job.error = [args, inputs = s.inputs] {
    GatherLatentArgs want = args;
    want.out = inputs->poisoned(DType::bf16, {args.out.dim(0), args.out.dim(1)});
    gather_latent(Backend::reference(), want);
    return bits_error(args.out, want.out);
  };
  note(job, kv::gather_latent_kernels(), s.backend, args);
  return job;
}

// ---- the list ----------------------------------------------------------------------------------------

const Family kFamilies[] = {
    {"attend.decode", "", {"h", "b", "topk"}, attend_decode},
    {"attend.prefill", "", {"h", "s", "kv", "topk"}, attend_prefill},
    {"attend.dense", "", {"h", "b", "ctx"}, attend_dense},
    {"index.decode", "fp8", {"h", "b", "ctx"}, index_decode},
    {"index.prefill", "fp8", {"h", "s", "kv"}, index_prefill},
    {"topk", "f32", {"rows", "len", "k"}, topk_rows},
    {"select.prefill", "fp8", {"h", "s", "kv", "k"}, select_prefill},
    {"chain", "fp8", {"h", "b", "ctx", "k"}, chain},
    {"step", "fp8", {"h", "H", "b", "ctx", "k"}, step},
    {"kv.write", "", {"n"}, kv_write},
    {"kv.gather", "", {"n"}, kv_gather},
};

}  // namespace

std::span<const Family> families() { return kFamilies; }

std::int64_t decode_span(std::int64_t requests) { return std::max(kSpan, kBenchSlots / requests); }

}  // namespace sievemla::cli
