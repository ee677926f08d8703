// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/bench_jobs.cc -- the work behind each kind of case, and how its result is judged: by the reference, for CUDA by
// the cpu backend, which verify holds against the reference and which is fast enough for the large cases.
#include "cli/bench_jobs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

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

constexpr std::int64_t kChecked = 2;  // rows that are compared with the judge's, which is slow
constexpr std::int64_t kDrawn = 64;   // rows of queries and scores that differ: drawing all would take minutes

Backend judge_of(const Backend& backend) {
  return backend.kind() == BackendKind::cuda ? Backend::cpu() : Backend::reference();
}

// What `make` gives, worked out when it is first asked for: a result is judged twice, the judge's stays the same.
template <class Make>
auto once(Make make) {
  using T = decltype(make());
  return [make = std::move(make), made = std::make_shared<std::optional<T>>()]() -> const T& {
    if (!*made) *made = make();
    return **made;
  };
}

// A tensor of `rows` rows where the backend reads it, and its first ones on the host.
struct Rows {
  TensorView there, host;
};
Rows random_rows(const Setting& s, DType dtype, std::int64_t rows, std::int64_t width, float deviation) {
  const TensorView there = s.place->poisoned(dtype, {rows, width});  // first, as it may be too much
  const TensorView host = s.inputs->normal(dtype, {std::min(rows, kDrawn), width}, deviation);
  s.place->repeat(host, there);
  return {there, host};
}
// The same, of rows of heads.
Rows random_heads(const Setting& s, DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t width) {
  const TensorView there = s.place->poisoned(dtype, {rows, heads, width});
  const TensorView host =
      s.inputs->normal(dtype, {std::min(rows, kDrawn), heads, width}, dtype == DType::u8 ? 1.f : 1.f / 3);
  s.place->repeat(host, there);
  return {there, host};
}

// ---- attention --------------------------------------------------------------------------------------

// A call as the backend gets it, and its first rows as the judge does: the cache there repeats the judge's, so that a
// slot of the one holds what the slot modulo the other's size does.
struct Attend {
  AttentionArgs there, host;
};

Attend attention_over(const Setting& s, std::int64_t rows, std::int64_t slots) {
  constexpr std::int64_t kPeriod = 4096;
  const std::int64_t pages = (slots + kPage - 1) / kPage;
  const KvFormatInfo& format = info(kv_format_by_name(s.format));
  const TensorView there =
      s.place->poisoned(format.storage, {pages, kPage, format.row_bytes(kLatent, kRope) / size_of(format.storage)});
  std::vector<std::int64_t> all(static_cast<std::size_t>(std::min(pages * kPage, kPeriod)));
  std::iota(all.begin(), all.end(), 0);
  Attend a;
  a.host.kv = s.inputs->kv_cache(format.format, kLatent, kRope, std::ssize(all) / kPage, kPage, all);
  s.place->repeat(a.host.kv.pages, there);
  a.there.kv = a.host.kv, a.there.kv.pages = there;
  const Rows q = random_heads(s, DType::bf16, rows, s["h"], kLatent + kRope);
  a.there.q = q.there, a.host.q = q.host;
  a.there.scale = a.host.scale = kScale;
  return a;
}

// `lanes` as the judge's cache has them.
TensorView folded(const Setting& s, const TensorView& lanes, std::int64_t modulus) {
  std::vector<std::int64_t> all;
  for (std::int64_t t = 0; t < lanes.dim(0); ++t)
    for (std::int64_t i = 0; i < lanes.dim(1); ++i) {
      const std::int64_t lane = base::load_int(lanes, t, i);
      all.push_back(lane < 0 ? lane : lane % modulus);
    }
  return s.inputs->ints(all, {lanes.dim(0), lanes.dim(1)});
}

// The job of a call whose rows are set; `pairs` (query row, cache row) go through it. The first rows' lanes are read
// only when the error is asked for: step makes them.
Job attend(const Setting& s, Attend a, std::int64_t pairs, std::int64_t lanes) {
  const std::int64_t tokens = a.there.q.dim(0), heads = a.there.q.dim(1), some = std::min(kChecked, tokens);
  a.there.out = s.place->poisoned(DType::bf16, {tokens, heads, kLatent});
  const std::int64_t most = (lanes + kPage - 1) / kPage * kPage;  // of a block table on CUDA: whole pages
  const Workspace workspace =
      s.place->workspace(attention_workspace_bytes(s.backend, {tokens, heads, most, kLatent, kRope}));
  Job job;
  job.flops = 2.0 * as_double(heads * pairs) * (2 * kLatent + kRope);
  job.bytes = as_double(pairs * info(a.there.kv.format).row_bytes(kLatent, kRope));
  job.call = [s, a, workspace](Stream stream) { attention(s.backend, a.there, workspace, stream); };
  const auto judged = once([s, a, some, heads, lanes] {
    const Backend judge = judge_of(s.backend);
    AttentionArgs few = a.host;
    few.q = narrow(few.q, 0, some);
    if (const auto* slots = std::get_if<Slots>(&a.there.rows)) {
      few.rows = Slots{folded(s, s.place->here(narrow(slots->indices, 0, some)), few.kv.slots()), {}};
    } else {
      const auto& blocks = std::get<BlockTable>(a.there.rows);
      BlockTable first;
      first.table = folded(s, s.place->here(narrow(blocks.table, 0, some)), few.kv.pages.dim(0));
      const std::vector<std::int64_t> lengths(static_cast<std::size_t>(some), lanes);
      first.lengths = s.inputs->ints(lengths, {some});
      few.rows = first;
    }
    std::vector<float> want(static_cast<std::size_t>(some * heads * kLatent));
    few.out = tensor(want.data(), {some, heads, kLatent});
    Place room(judge);
    attention(judge, few, room.workspace(attention_workspace_bytes(judge, {some, heads, lanes, kLatent, kRope})));
    return want;
  });
  job.error = [s, a, some, judged] {
    return base::relative_error(floats(s.place->here(narrow(a.there.out, 0, some))), judged());
  };
  const auto& kernel = note(job, stage::attention::attention_kernels(), s.backend, a.there);
  job.bound = 0x1p-8 + tolerance(s.backend, kernel);  // the output is rounded to bf16, the judge's here is not
  return job;
}

// `rows` query rows, each with k different slots of `span` that start at `stride` times the row.
Slots random_slots(const Setting& s, std::int64_t rows, std::int64_t k, std::int64_t span, std::int64_t stride) {
  std::vector<std::int64_t> lanes;
  lanes.reserve(static_cast<std::size_t>(rows * k));
  for (std::int64_t t = 0; t < rows; ++t)
    for (const std::int64_t slot : s.inputs->distinct(k, span)) lanes.push_back(t * stride + slot);
  return {s.place->put(s.inputs->ints(lanes, {rows, k})), {}};
}

Job attend_decode(const Setting& s) {
  const std::int64_t span = decode_span(s["b"]);
  Attend a = attention_over(s, s["b"], s["b"] * span);
  a.there.rows = random_slots(s, s["b"], s["topk"], span, span);
  return attend(s, a, s["b"] * s["topk"], s["topk"]);
}

Job attend_prefill(const Setting& s) {
  Attend a = attention_over(s, s["s"], s["kv"]);
  a.there.rows = random_slots(s, s["s"], s["topk"], s["kv"], 0);
  return attend(s, a, s["s"] * s["topk"], s["topk"]);
}

Job attend_dense(const Setting& s) {
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(s["b"]), s["ctx"]);
  Attend a = attention_over(s, s["b"], s["b"] * ((s["ctx"] + kPage - 1) / kPage) * kPage);
  a.there.rows =
      BlockTable{s.place->put(s.inputs->block_table(lengths, kPage)), s.place->put(s.inputs->ints(lengths, {s["b"]}))};
  return attend(s, a, s["b"] * s["ctx"], s["ctx"]);
}

// ---- indexer ----------------------------------------------------------------------------------------

// Queries and keys, and which keys each row sees; no logits yet. `host` has the first rows alone.
struct Scoring {
  IndexScoreArgs there, host;
  std::int64_t rows, width, some, pairs = 0;
};

Scoring scoring(const Setting& s, const std::vector<std::int64_t>& lengths) {
  Scoring c;
  c.rows = std::ssize(lengths);
  c.some = std::min(kChecked, c.rows);
  c.width = *std::max_element(lengths.begin(), lengths.end());
  for (const std::int64_t length : lengths) c.pairs += length;
  const Rows q = random_heads(s, DType::u8, c.rows, s["h"], kIndexDim);
  const Rows weights = random_rows(s, DType::f32, c.rows, s["h"], 0.1f);
  const TensorView seen = s.inputs->ints(lengths, {c.rows});
  c.there.q = q.there, c.there.weights = weights.there, c.there.lengths = s.place->put(seen);
  c.host.q = narrow(q.host, 0, c.some), c.host.weights = narrow(weights.host, 0, c.some);
  c.host.lengths = narrow(seen, 0, c.some);
  return c;
}

// One query token a request, keys in shuffled pages.
Scoring paged_scoring(const Setting& s, const std::vector<std::int64_t>& lengths) {
  Scoring c = scoring(s, lengths);
  const TensorView table = s.inputs->block_table(lengths, kPage);
  std::int64_t pages = 0;
  for (const std::int64_t length : lengths) pages += (length + kPage - 1) / kPage;
  c.host.paged = {s.inputs->index_cache(IndexFormat::fp8, pages, kPage, slots_of(table, lengths, kPage)),
                  narrow(table, 0, c.some),  // one row a request
                  {}};
  c.there.paged = c.host.paged;
  c.there.paged.cache.pages = s.place->put(c.host.paged.cache.pages);
  c.there.paged.block_table = s.place->put(table);
  return c;
}
Scoring decode_scoring(const Setting& s) {
  return paged_scoring(s, std::vector<std::int64_t>(static_cast<std::size_t>(s["b"]), s["ctx"]));
}

// The last tokens of a sequence, causal, keys side by side.
Scoring prefill_scoring(const Setting& s) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < s["s"]; ++i) lengths.push_back(s["kv"] - s["s"] + i + 1);
  Scoring c = scoring(s, lengths);
  c.host.contiguous.keys = s.inputs->normal(DType::u8, {s["kv"], kIndexDim}, 1.f);
  c.host.contiguous.scales = s.inputs->normal(DType::f32, {s["kv"]}, 0.3f);
  c.there.contiguous.keys = s.place->put(c.host.contiguous.keys);
  c.there.contiguous.scales = s.place->put(c.host.contiguous.scales);
  return c;
}

// The judge's scores of the first rows.
std::vector<float> judged_scores(const Setting& s, const Scoring& c) {
  const Backend judge = judge_of(s.backend);
  std::vector<float> logits(static_cast<std::size_t>(c.some * c.width));
  IndexScoreArgs args = c.host;
  args.logits = tensor(logits.data(), {c.some, c.width});
  Place room(judge);
  index_scores(judge, args, room.workspace(index_scores_workspace_bytes(judge, {c.some, args.q.dim(1), c.width})));
  return logits;
}

// Of those rows' scores, the columns that they see: the others are left as they are.
std::vector<float> seen_scores(const Scoring& c, const std::vector<float>& scores) {
  std::vector<float> seen;
  for (std::int64_t t = 0; t < c.some; ++t)
    seen.insert(seen.end(), scores.begin() + t * c.width,
                scores.begin() + t * c.width + base::load_int(c.host.lengths, t));
  return seen;
}

double score_flops(const Setting& s, const Scoring& c) { return 2.0 * kIndexDim * as_double(s["h"] * c.pairs); }

Job score_job(const Setting& s, Scoring c, double bytes_a_pair) {
  c.there.logits = s.place->poisoned(DType::f32, {c.rows, c.width});
  c.there.fill = false;  // selection reads none of it, and the peers write none
  const Workspace workspace = s.place->workspace(index_scores_workspace_bytes(s.backend, {c.rows, s["h"], c.width}));
  Job job;
  job.flops = score_flops(s, c);
  job.bytes = bytes_a_pair * as_double(c.pairs);
  job.call = [s, c, workspace](Stream stream) { index_scores(s.backend, c.there, workspace, stream); };
  job.error = [s, c, judged = once([s, c] { return seen_scores(c, judged_scores(s, c)); })] {
    return base::relative_error(seen_scores(c, floats(s.place->here(narrow(c.there.logits, 0, c.some)))), judged());
  };
  job.bound = tolerance(s.backend, note(job, stage::indexer::index_scores_kernels(), s.backend, c.there));
  return job;
}

Job index_decode(const Setting& s) { return score_job(s, decode_scoring(s), kIndexKeyBytes); }
Job index_prefill(const Setting& s) { return score_job(s, prefill_scoring(s), sizeof(float)); }

// 64 requests: one with 131,072 keys and 63 with 2,048; or as many keys, evenly.
constexpr std::int64_t kMixed = 64, kLongest = 131072, kShort = 2048;
Job index_mixed(const Setting& s) {
  std::vector<std::int64_t> lengths(kMixed, kShort);
  lengths[0] = kLongest;
  return score_job(s, paged_scoring(s, lengths), kIndexKeyBytes);
}
Job index_even(const Setting& s) {
  const std::vector<std::int64_t> lengths(kMixed, (kLongest + (kMixed - 1) * kShort) / kMixed);
  return score_job(s, paged_scoring(s, lengths), kIndexKeyBytes);
}

// ---- top-k, and stages together ---------------------------------------------------------------------

// The ids that the reference selects from the very scores.
std::vector<std::int32_t> judged_ids(const TensorView& scores, const TensorView& lengths, std::int64_t k) {
  const Backend reference = Backend::reference();
  const std::int64_t rows = scores.dim(0);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * k));
  TopkArgs args;
  args.scores = scores;
  args.lengths = lengths;
  args.positions = tensor(ids.data(), {rows, k});
  Place room(reference);
  topk(reference, args, room.workspace(topk_workspace_bytes(reference, {rows, scores.dim(1), k})));
  return ids;
}

// How far below the k-th best of the judge's scores a selected one lies, over the largest score: scores that are equal
// within rounding may change places. Infinity unless the ids are ascending and as many as there have to be.
double selection_error(const TensorView& got, const std::vector<float>& scores, const TensorView& lengths) {
  const std::int64_t rows = got.dim(0), k = got.dim(1), width = std::ssize(scores) / rows;
  double worst = 0;
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int64_t length = base::load_int(lengths, t), n = std::min(k, length);
    std::vector<float> row(scores.begin() + t * width, scores.begin() + t * width + length), sorted = row;
    if (n == 0) continue;
    std::nth_element(sorted.begin(), sorted.begin() + n - 1, sorted.end(), std::greater<>());
    const double kth = sorted[static_cast<std::size_t>(n - 1)];
    const double largest =
        std::abs(*std::max_element(row.begin(), row.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
    for (std::int64_t i = 0, before = -1; i < k; ++i) {
      const std::int64_t id = base::load_int(got, t, i);
      if (i < n ? id <= before || id >= length : id != -1) return std::numeric_limits<double>::infinity();
      if (i < n) worst = std::max(worst, (kth - row[static_cast<std::size_t>(id)]) / std::max(largest, 1e-30));
      before = id;
    }
  }
  return worst;
}

Job topk_rows(const Setting& s) {
  const std::int64_t rows = s["rows"], width = s["len"], k = s["k"], some = std::min(rows, kDrawn);
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(rows), width);
  const Rows scores = random_rows(s, DType::f32, rows, width, 1.f);
  const TensorView seen = s.inputs->ints(lengths, {rows});
  TopkArgs args;
  args.scores = scores.there;
  args.lengths = s.place->put(seen);
  args.positions = s.place->poisoned(DType::i32, {rows, k});
  const Workspace workspace = s.place->workspace(topk_workspace_bytes(s.backend, {rows, width, k}));
  Job job;
  job.bytes = 4.0 * as_double(rows * width);
  job.call = [s, args, workspace](Stream stream) { topk(s.backend, args, workspace, stream); };
  note(job, stage::topk::topk_kernels(), s.backend, args);
  const auto judged = once([scores, seen, some, k] { return judged_ids(scores.host, narrow(seen, 0, some), k); });
  job.error = [s, args, some, judged] {
    const TensorView got = s.place->here(narrow(args.positions, 0, some));
    const bool same = std::equal(judged().begin(), judged().end(), base::at<std::int32_t>(got, 0));
    return same ? 0 : std::numeric_limits<double>::infinity();
  };
  return job;
}

// Scores and top-k in one call; slots too, where there are pages.
Job select_job(const Setting& s, const Scoring& c, std::int64_t k, double bytes_a_pair, TensorView slots = {}) {
  SelectArgs args;
  args.score = c.there;
  args.width = c.width;
  args.positions = s.place->poisoned(DType::i32, {c.rows, k});
  args.slots = slots;
  args.map.block_table = c.there.paged.block_table;
  args.map.page_size = kPage;
  const Workspace workspace = s.place->workspace(select_workspace_bytes(s.backend, {c.rows, s["h"], c.width, k}));
  Job job;
  job.flops = score_flops(s, c);
  job.bytes = bytes_a_pair * as_double(c.pairs);
  job.call = [s, args, workspace](Stream stream) { select(s.backend, args, workspace, stream); };
  job.error = [s, args, c, judged = once([s, c] { return judged_scores(s, c); })] {
    return selection_error(s.place->here(narrow(args.positions, 0, c.some)), judged(), c.host.lengths);
  };
  const TensorView scores = tensor(static_cast<const float*>(nullptr), {c.rows, c.width});
  const TopkArgs selection{scores, {}, c.there.lengths, args.positions, args.slots, args.map};
  job.bound = tolerance(s.backend, note(job, stage::indexer::index_scores_kernels(), s.backend, c.there));
  note(job, stage::topk::topk_kernels(), s.backend, selection);
  return job;
}

Job chain(const Setting& s) { return select_job(s, decode_scoring(s), s["k"], kIndexKeyBytes); }
Job select_prefill(const Setting& s) { return select_job(s, prefill_scoring(s), s["k"], sizeof(float)); }

// chain to slots, then attention over the rows of the same pages.
Job step(const Setting& s) {
  const Scoring c = decode_scoring(s);
  const std::int64_t b = s["b"], k = s["k"];
  const TensorView slots = s.place->poisoned(DType::i32, {b, k});
  const Job first = select_job(s, c, k, kIndexKeyBytes, slots);
  Setting attended = s;
  attended.n["h"] = s["H"];
  attended.format = info(KvFormat::fp8_ds_mla).name;
  Attend a = attention_over(attended, b, c.host.paged.cache.slots());
  a.there.rows = Slots{slots, {}};
  const Job second = attend(attended, a, b * k, k);
  Job job;
  job.flops = first.flops + second.flops;
  job.bytes = first.bytes + second.bytes;
  job.kernels = first.kernels + " + " + second.kernels;
  job.isa = second.isa;
  job.call = [first, second](Stream stream) {
    first.call(stream);
    second.call(stream);
  };
  job.error = [first, second] { return first.error() + second.error(); };
  job.bound = first.bound + second.bound;
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
  job.call = [s, there = s.place->put_all(args)](Stream stream) { write_latent(s.backend, there, stream); };
  job.error = [s, args, want = row_cache(s, {})] {
    s.place->take_back(args.cache.pages);
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
  job.call = [s, there = s.place->put_all(args)](Stream stream) { gather_latent(s.backend, there, stream); };
  job.error = [s, args] {
    s.place->take_back(args.out);
    GatherLatentArgs want = args;
    want.out = s.inputs->poisoned(DType::bf16, {args.out.dim(0), args.out.dim(1)});
    gather_latent(Backend::reference(), want);
    return bits_error(args.out, want.out);
  };
  note(job, kv::gather_latent_kernels(), s.backend, args);
  return job;
}

// All that a layer writes for new tokens: by one call, or by the two writers of its caches alone.
Job layer_write(const Setting& s, bool one_call) {
  constexpr std::int64_t kPositions = 4096, kTopk = 2048;
  const std::int64_t n = s["n"];
  std::vector<std::int64_t> positions(static_cast<std::size_t>(n));
  for (std::int64_t& p : positions) p = s.inputs->below(kPositions);
  WriteLayerArgs args;
  args.latent.latent = s.inputs->normal(DType::bf16, {n, kLatent}, 1.f / 3);
  args.latent.cache = row_cache(s, {});
  if (args.latent.cache.rope > 0) args.latent.rope = s.inputs->normal(DType::bf16, {n, kRope}, 1.f / 3);
  args.latent.slots = row_slots(s);
  args.latent_weight = s.inputs->normal(DType::bf16, {kLatent}, 1.f), args.latent_eps = 1e-6f;
  args.keys.k = s.inputs->normal(DType::bf16, {n, kIndexDim}, 1.f);
  args.keys.norm_weight = s.inputs->normal(DType::f32, {kIndexDim}, 1.f);
  args.keys.norm_bias = s.inputs->normal(DType::f32, {kIndexDim}, 1.f);
  args.keys.rope = {RopeStyle::interleaved, s.inputs->ints(positions, {n}),
                    s.inputs->normal(DType::f32, {kPositions, kIndexRope}, 0.7f)};
  if (args.latent.cache.rope > 0) args.rope = args.keys.rope;
  else args.rope.style = RopeStyle::none;
  args.keys.slots = args.latent.slots;
  args.keys.cache = s.inputs->index_cache(IndexFormat::fp8, kBenchSlots / kPage, kPage, {});
  args.indices = s.inputs->poisoned(DType::i32, {n, kTopk});
  Job job;
  job.bytes = row_bytes(s, args.latent.cache) + as_double(n * (2 * kIndexDim + kIndexKeyBytes));
  if (one_call) job.bytes += as_double(n * kTopk) * sizeof(std::int32_t);
  const auto run = [one_call](const Backend& backend, const WriteLayerArgs& a, Stream stream) {
    if (one_call) return write_layer(backend, a, stream);
    write_latent(backend, a.latent, stream), write_index_keys(backend, a.keys, stream);
  };
  job.call = [s, run, there = s.place->put_all(args)](Stream stream) { run(s.backend, there, stream); };
  job.error = [s, run, args, want = row_cache(s, {}),
               keys = s.inputs->index_cache(IndexFormat::fp8, kBenchSlots / kPage, kPage, {})] {
    s.place->take_back(args.latent.cache.pages), s.place->take_back(args.keys.cache.pages);
    WriteLayerArgs again = args;
    again.latent.cache = want, again.keys.cache = keys;
    run(Backend::reference(), again, {});
    return bits_error(args.latent.cache.pages, want.pages) + bits_error(args.keys.cache.pages, keys.pages);
  };
  if (one_call) note(job, stage::indexer::write_layer_kernels(), s.backend, args);
  else
    note(job, kv::write_latent_kernels(), s.backend, args.latent),
        note(job, stage::indexer::write_index_keys_kernels(), s.backend, args.keys);
  return job;
}
Job layer_in_one(const Setting& s) { return layer_write(s, true); }
Job layer_in_parts(const Setting& s) { return layer_write(s, false); }

// ---- the list ----------------------------------------------------------------------------------------

const Family kFamilies[] = {
    {"attend.decode", "", {"h", "b", "topk"}, attend_decode},
    {"attend.prefill", "", {"h", "s", "kv", "topk"}, attend_prefill},
    {"attend.dense", "", {"h", "b", "ctx"}, attend_dense},
    {"index.decode", "fp8", {"h", "b", "ctx"}, index_decode},
    {"index.decode", "fp8", {"h", "=mixed"}, index_mixed},
    {"index.decode", "fp8", {"h", "=even"}, index_even},
    {"index.prefill", "fp8", {"h", "s", "kv"}, index_prefill},
    {"topk", "f32", {"rows", "len", "k"}, topk_rows},
    {"select.prefill", "fp8", {"h", "s", "kv", "k"}, select_prefill},
    {"chain", "fp8", {"h", "b", "ctx", "k"}, chain},
    {"step", "fp8", {"h", "H", "b", "ctx", "k"}, step},
    {"kv.write", "", {"n"}, kv_write},
    {"kv.gather", "", {"n"}, kv_gather},
    {"kv.layer", "", {"n"}, layer_in_one},
    {"kv.layer", "", {"n", "=parts"}, layer_in_parts},
};

}  // namespace

std::span<const Family> families() { return kFamilies; }

std::int64_t decode_span(std::int64_t requests) { return std::max(kSpan, kBenchSlots / requests); }

}  // namespace sievemla::cli
