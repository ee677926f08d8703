// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/bench.cc -- sievemla bench: times the stages of the cpu backend, case by case. Every result is compared with the
// reference before it is timed.
//
// A case is named by its work, so that files of different programs can be compared:
//   cpu.attend.decode.<rows>.h<heads>.b<requests>.topk<k>.t<threads>
#include <fcntl.h>
#include <fnmatch.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "attention/registry.h"
#include "base/compare.h"
#include "base/view.h"
#include "cli/inputs.h"
#include "cli/machine.h"
#include "cli/measure.h"
#include "cli/options.h"
#include "cli/output.h"
#include "sievemla/error.h"
#include "sievemla/pipeline.h"

namespace sievemla::cli {
namespace {

constexpr int kLatent = 512, kRope = 64;
constexpr std::int64_t kPage = 64;
constexpr std::int64_t kSpan = 32768, kLeastSlots = 65536;  // cache rows: of one request, and in all
constexpr float kScale = 1.f / 24;                          // 576^-0.5
constexpr std::uint64_t kSeed = 1;

// The numbers of a case's name, by their letters.
using Fields = std::map<std::string, std::int64_t, std::less<>>;

// A case, ready to run.
struct Job {
  double flops = 0, bytes = 0;  // useful work: multiply-adds x 2, and what has to be streamed
  std::function<void()> call;
  std::function<double()> error{};  // of the last call, against the reference
  double bound = 0;
};

struct Setting {
  const Backend& backend;
  std::string format;
  Fields n;
  std::shared_ptr<Inputs> inputs = std::make_shared<Inputs>(kSeed);
  std::int64_t operator[](std::string_view name) const { return n.find(name)->second; }
};

double as_double(std::int64_t n) { return static_cast<double>(n); }

std::vector<float> floats(const TensorView& contiguous) {
  TensorView flat = contiguous;
  flat.stride[0] = 1;
  std::vector<float> v;
  for (std::int64_t i = 0; i < contiguous.elements(); ++i) v.push_back(base::load_f32(flat, i));
  return v;
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
  const auto& kernel = base::pick(stage::attention::attention_kernels(), s.backend, args, "bench");
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
  const std::int64_t span = std::max(kSpan, kLeastSlots / s["b"]);
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
  job.bound = tolerance(s.backend);
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
  job.call = [first, second] {
    first.call();
    second.call();
  };
  job.error = [first, second] { return first.error() + second.error(); };
  job.bound = second.bound;
  return job;
}

// ---- names ------------------------------------------------------------------------------------------

// A name is cpu.<family>.<format>.<field><number>... .t<threads>
struct Family {
  const char* name;
  const char* formats;  // the one there is, or the row types by kv_format_by_name if empty
  std::vector<std::string> fields;
  Job (*make)(const Setting&);
};
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
};

// What runs if no case is named; each with one thread and with all.
constexpr const char* kDefaultCases[] = {
    "attend.decode.bf16.h64.b1.topk2048",       "attend.decode.fp8_ds_mla.h64.b1.topk2048",
    "attend.decode.bf16.h16.b1.topk2048",       "attend.decode.bf16.h128.b1.topk2048",
    "attend.decode.fp8_ds_mla.h64.b4.topk2048", "attend.prefill.bf16.h64.s16.kv8192.topk2048",
    "attend.dense.bf16.h64.b1.ctx8192",         "index.decode.fp8.h32.b1.ctx32768",
    "index.decode.fp8.h64.b1.ctx32768",         "index.prefill.fp8.h32.s64.kv8192",
    "topk.f32.rows1.len131072.k2048",           "topk.f32.rows64.len8192.k2048",
    "select.prefill.fp8.h32.s64.kv8192.k2048",  "chain.fp8.h32.b1.ctx32768.k2048",
    "step.fp8.h32.H64.b1.ctx32768.k2048",
};

struct Case {
  std::string name;
  const Family* family;
  std::string format;
  Fields fields;
  int threads;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('.', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string form(const Family& family) {
  std::string text = std::string("cpu.") + family.name + "." + (*family.formats ? family.formats : "<rows>");
  for (const std::string& field : family.fields) text += "." + field + "<n>";
  return text + ".t<n>";
}

// "ctx8192" with the name "ctx" is 8192.
std::optional<std::int64_t> number_in(const std::string& part, const std::string& name) {
  constexpr std::int64_t kMost = 1 << 28;
  if (part.compare(0, name.size(), name) != 0) return {};
  const std::string digits = part.substr(name.size());
  if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) return {};
  const std::int64_t n = std::stoll(digits);
  return n >= 1 && n <= kMost ? std::optional(n) : std::nullopt;
}

// Sizes that no call would take are refused with the name, before anything is allocated for them.
void check_sizes(const Case& c) {
  const auto field = [&](const char* name) {
    const auto found = c.fields.find(name);
    return found == c.fields.end() ? -1 : found->second;
  };
  const bool attends = std::string_view(c.family->name).rfind("attend.", 0) == 0;
  const std::string where = "bench: " + c.name;
  expects((attends ? field("h") : field("H")) <= 128, "heads must be 1 to 128", where,
          attends ? field("h") : field("H"));
  expects(c.threads <= 4096, "threads must be 1 to 4096", where, c.threads);
  const std::int64_t keys =
      std::string_view(c.family->name) == "attend.decode" ? std::max(kSpan, kLeastSlots / field("b")) : field("kv");
  if (keys < 0) return;
  expects(field("s") <= keys || attends, "a prefill has no more tokens than keys", where, field("s"), " of ", keys);
  expects(field("topk") <= keys, "a query's slots are different, so top-k is at most the rows it draws from", where,
          field("topk"), " of ", keys);
}

Case parse_case(const std::string& name) {
  for (const Family& family : kFamilies) {
    const std::string lead = std::string("cpu.") + family.name + ".";
    if (name.rfind(lead, 0) != 0) continue;
    const std::vector<std::string> parts = split(name.substr(lead.size()));
    Case c{name, &family, parts.front(), {}, 0};
    bool good = parts.size() == family.fields.size() + 2 && (!*family.formats || parts.front() == family.formats);
    for (std::size_t i = 0; good && i < family.fields.size(); ++i) {
      const auto n = number_in(parts[i + 1], family.fields[i]);
      good = n.has_value();
      if (good) c.fields[family.fields[i]] = *n;
    }
    const auto threads = good ? number_in(parts.back(), "t") : std::nullopt;
    expects(threads.has_value(), "a case of this kind is named " + form(family), "bench", "'", name, "'");
    if (!*family.formats) {
      const KvFormatInfo& rows = info(kv_format_by_name(parts.front()));  // throws, naming those there are
      expects(rows.rope < 0 || rows.rope == kRope, "the rows of these cases have a rope of 64", "bench: " + name,
              rows.name, " rows with a rope of ", rows.rope);
    }
    c.threads = static_cast<int>(*threads);
    check_sizes(c);
    return c;
  }
  std::string kinds;
  for (const Family& family : kFamilies) kinds += (kinds.empty() ? "cpu." : ", cpu.") + std::string(family.name);
  throw InvalidArgument(
      error_message("a case is one of sievemla bench --list, or of the kinds " + kinds, "bench", "'", name, "'"));
}

// ---- the command ------------------------------------------------------------------------------------

struct Options {
  std::vector<std::string> patterns;
  std::string json;
  std::int64_t threads = 0;
  bool list = false;
};

// The default cases, with one thread and with all, or with the number asked for.
std::vector<std::string> default_cases(const Options& options) {
  std::vector<int> threads = {1, Backend::cpu().threads()};
  if (options.threads > 0) threads = {static_cast<int>(options.threads)};
  if (threads.front() == threads.back()) threads.resize(1);
  std::vector<std::string> names;
  for (const char* name : kDefaultCases)
    for (const int t : threads) names.push_back(fmt::format("cpu.{}.t{}", name, t));
  return names;
}

// The default cases that match a pattern, and every full name that a pattern is.
std::vector<Case> chosen(const Options& options) {
  const std::vector<std::string> defaults = default_cases(options);
  std::vector<std::string> names = options.patterns.empty() ? defaults : std::vector<std::string>();
  const auto add = [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const std::string& pattern : options.patterns) {
    if (pattern.find_first_of("*?[") == std::string::npos) {
      add(pattern);
      continue;
    }
    bool any = false;
    for (const std::string& name : defaults)
      if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0) {
        add(name);
        any = true;
      }
    expects(any, "a pattern matches at least one case of sievemla bench --list", "bench", "'", pattern, "'");
  }
  std::vector<Case> cases;
  for (const std::string& name : names) cases.push_back(parse_case(name));
  return cases;
}

struct Row {
  Case c;
  double flops, bytes, error, bound;
  Timing timing;
  bool right() const { return error <= bound; }
};

Row measure(const Case& c) {
  const Backend backend = Backend::cpu({c.threads, {}});
  const Job job = c.family->make({backend, c.format, c.fields});
  job.call();
  Row row{c, job.flops, job.bytes, job.error(), job.bound, {}};
  if (row.right()) row.timing = median_us(job.call, kBenchEffort);
  return row;
}

double rounded(double x, int digits) {  // to significant digits: a timing has no more
  return x == 0 || !std::isfinite(x) ? x : std::stod(fmt::format("{:.{}g}", x, digits));
}

Json to_json(const std::vector<Row>& rows) {
  Json json = envelope("bench");
  json["cpu"] = this_machine().cpu;
  double load = 0;
  if (getloadavg(&load, 1) == 1) json["load"] = load;  // other work spoils the numbers
  json["cases"] = Json::array();
  json["failed"] = Json::array();
  for (const Row& row : rows) {
    if (!row.right()) {
      json["failed"].push_back({{"case", row.c.name}, {"error", error_json(row.error)}, {"bound", row.bound}});
      continue;
    }
    Json line = {{"case", row.c.name},
                 {"us", rounded(row.timing.us, 5)},
                 {"us_p10", rounded(row.timing.us_p10, 5)},
                 {"us_p90", rounded(row.timing.us_p90, 5)}};
    if (row.flops > 0) line["tflops"] = rounded(row.flops / row.timing.us / 1e6, 4);
    line["tbps"] = rounded(row.bytes / row.timing.us / 1e6, 4);
    line["error"] = rounded(row.error, 2);
    line["runs"] = row.timing.runs;
    json["cases"].push_back(std::move(line));
  }
  return json;
}

// The file of --json. Opened before minutes of work, so that a bad path fails now; what was made and got nothing
// written goes away again, and what was there stays until there is something to write.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path) {
    if (path_.empty()) return;
    int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    made_ = fd >= 0;
    if (fd < 0 && errno == EEXIST) fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) fail();
    close(fd);
  }
  JsonFile(const JsonFile&) = delete;
  ~JsonFile() {
    if (made_) unlink(path_.c_str());
  }
  void write(const std::string& text) {
    if (path_.empty()) return;
    std::FILE* file = std::fopen(path_.c_str(), "wb");
    if (file == nullptr) fail();
    const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0;
    const int reason = errno;
    const bool closed = std::fclose(file) == 0;
    if (!written) errno = reason;
    if (!written || !closed) fail();
    made_ = false;
  }

 private:
  [[noreturn]] void fail() const {
    throw InvalidArgument(
        error_message("the file for --json must be writable", "bench: " + path_, std::strerror(errno)));
  }

  std::string path_;
  bool made_ = false;  // by us, and still empty
};

int run(const Options& options) {
  const std::vector<Case> cases = chosen(options);
  if (options.list) {
    for (const Case& c : cases) print("{}\n", c.name);
    return kGood;
  }
  JsonFile json(options.json);

  std::vector<Row> rows;
  {
    Progress progress("bench", std::ssize(cases));
    for (const Case& c : cases) {
      progress.step(c.name);
      rows.push_back(measure(c));
    }
  }
  Table table({{"case"},
               {"median", Table::right},
               {"10 %", Table::right},
               {"90 %", Table::right},
               {"GFLOP/s", Table::right},
               {"GB/s", Table::right},
               {"error", Table::right},
               {"runs", Table::right}});
  for (const Row& row : rows) {
    const Timing& t = row.timing;
    if (row.right())
      table.row({row.c.name, time_text(t.us), time_text(t.us_p10), time_text(t.us_p90),
                 row.flops > 0 ? fmt::format("{:.1f}", row.flops / t.us * 1e-3) : "-",
                 fmt::format("{:.2f}", row.bytes / t.us * 1e-3), error_text(row.error), std::to_string(t.runs)});
    else table.row({row.c.name, "WRONG", "-", "-", "-", "-", error_text(row.error), "0"});
  }
  print(table.text());
  json.write(text_of(to_json(rows)));
  for (const Row& row : rows)
    if (!row.right())
      throw CheckFailed(
          error_message("a result must match the reference within " + error_text(row.bound) + " before it is timed",
                        "bench: " + row.c.name, "an error of ", error_text(row.error)));
  return kGood;
}

}  // namespace

Action add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Time the stages of the cpu backend");
  command
      ->add_option("CASE", options->patterns,
                   "Cases, or patterns such as 'cpu.attend.*.t1'; a full name may have any numbers; none: --list")
      ->type_name("");
  command->add_option("--json", options->json, "Write the numbers there as JSON")->type_name("FILE");
  add_integer(*command, "--threads", options->threads, 0, 4096, "Threads of the default cases; 0: one, and all");
  command->add_flag("--list", options->list, "Print the names of the cases and exit");
  std::string kinds = "kinds of cases (<rows>: f32, bf16, fp8_ds_mla)\n";
  for (const Family& family : kFamilies) kinds += "  " + form(family) + "\n";
  command->footer(kinds + "us is the median of 50 runs, or of as many as 3 seconds hold (at least 10).");
  return [options] { return run(*options); };
}

}  // namespace sievemla::cli
