// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/bench.cc -- sievemla bench: times the stages of the cpu backend, case by case, beside what the processor computes
// at most. Every result is compared with the reference before it is timed.
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

#include "cli/bench_jobs.h"
#include "cli/machine.h"
#include "cli/measure.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cpu/isa/isa.h"
#include "sievemla/error.h"
#include "sievemla/kv_format.h"

namespace sievemla::cli {
namespace {

// What runs if no case is named; each with one thread and with all.
constexpr const char* kDefaultCases[] = {
    "attend.decode.bf16.h64.b1.topk2048",
    "attend.decode.bf16.h32.b1.topk2048",
    "attend.decode.bf16.h16.b1.topk2048",
    "attend.decode.bf16.h8.b1.topk2048",
    "attend.decode.fp8_ds_mla.h64.b1.topk2048",
    "attend.decode.fp8_ds_mla.h32.b1.topk2048",
    "attend.decode.fp8_ds_mla.h16.b1.topk2048",
    "attend.decode.fp8_ds_mla.h8.b1.topk2048",
    "attend.decode.f32.h64.b1.topk2048",
    "attend.decode.fp8_ds_mla.h64.b16.topk2048",
    "attend.prefill.bf16.h64.s16.kv8192.topk2048",
    "attend.dense.bf16.h64.b1.ctx8192",
    "index.decode.fp8.h32.b1.ctx32768",
    "index.decode.fp8.h64.b1.ctx32768",
    "index.prefill.fp8.h32.s64.kv8192",
    "topk.f32.rows1.len131072.k2048",
    "topk.f32.rows64.len8192.k2048",
    "select.prefill.fp8.h32.s64.kv8192.k2048",
    "chain.fp8.h32.b1.ctx32768.k2048",
    "step.fp8.h32.H64.b1.ctx32768.k2048",
    "step.fp8.h32.H64.b16.ctx32768.k2048",
    "kv.write.fp8_ds_mla.n1024",
    "kv.gather.fp8_ds_mla.n1024",
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
  expects(field("n") <= kBenchSlots, "rows lie in different slots", where, field("n"), " of ", kBenchSlots);
  const std::int64_t keys = std::string_view(c.family->name) == "attend.decode" ? decode_span(field("b")) : field("kv");
  if (keys < 0) return;
  expects(field("s") <= keys || attends, "a prefill has no more tokens than keys", where, field("s"), " of ", keys);
  expects(field("topk") <= keys, "a query's slots are different, so top-k is at most the rows it draws from", where,
          field("topk"), " of ", keys);
}

Case parse_case(const std::string& name) {
  for (const Family& family : families()) {
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
      expects(rows.rope < 0 || rows.rope == kBenchRope, "the rows of these cases have a rope of 64", "bench: " + name,
              rows.name, " rows with a rope of ", rows.rope);
    }
    c.threads = static_cast<int>(*threads);
    check_sizes(c);
    return c;
  }
  std::string kinds;
  for (const Family& family : families()) kinds += (kinds.empty() ? "cpu." : ", cpu.") + std::string(family.name);
  throw InvalidArgument(
      error_message("a case is one of sievemla bench --list, or of the kinds " + kinds, "bench", "'", name, "'"));
}

// ---- the command ------------------------------------------------------------------------------------

struct Options {
  std::vector<std::string> patterns;
  std::string json;
  std::int64_t threads = 0, ms = 3000;
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
  Job job;
  double error;
  Timing timing;
  double peak = 0;  // GFLOP/s of the kernel's tier on the case's threads; 0 = not of arithmetic
  bool right() const { return error <= job.bound; }
  // Work over the time of the fastest run, as the peak is that of the fastest.
  double gflops() const { return job.flops / timing.us_min * 1e-3; }
};

Row measure(const Case& c, const Effort& effort) {
  const Backend backend = Backend::cpu({c.threads, {}});
  Row row{c, c.family->make({backend, c.format, c.fields}), 0, {}};
  row.job.call();
  row.error = row.job.error();
  if (row.right()) {
    if (row.job.isa && row.job.flops > 0) row.peak = peak_gflops(peak_of(*row.job.isa), backend);
    row.timing = median_us(row.job.call, effort);
  }
  row.job.call = nullptr;  // lets go of its memory
  row.job.error = nullptr;
  return row;
}

// A peak is what was reached at best, beside whichever case.
void share_peaks(std::vector<Row>& rows) {
  std::map<std::pair<cpu::Isa, int>, double> best;
  for (const Row& row : rows)
    if (row.peak > 0) best[{*row.job.isa, row.c.threads}] = std::max(best[{*row.job.isa, row.c.threads}], row.peak);
  for (Row& row : rows)
    if (row.peak > 0) row.peak = best[{*row.job.isa, row.c.threads}];
}

double rounded(double x, int digits) {  // to significant digits: a timing has no more
  return x == 0 || !std::isfinite(x) ? x : std::stod(fmt::format("{:.{}g}", x, digits));
}

Json to_json(const std::vector<Row>& rows) {
  Json json = envelope("bench");
  json["cpu"] = this_machine().cpu;
  json["tier"] = cpu::info(cpu::isa()).name;  // the highest that kernels could be of
  double load = 0;
  if (getloadavg(&load, 1) == 1) json["load"] = load;  // other work spoils the numbers
  json["cases"] = Json::array();
  json["failed"] = Json::array();
  for (const Row& row : rows) {
    if (!row.right()) {
      json["failed"].push_back({{"case", row.c.name}, {"error", error_json(row.error)}, {"bound", row.job.bound}});
      continue;
    }
    Json line = {{"case", row.c.name},
                 {"tier", cpu::info(cpu::isa()).name},
                 {"variant", row.job.kernels},
                 {"threads", row.c.threads},
                 {"us", rounded(row.timing.us, 5)},
                 {"us_min", rounded(row.timing.us_min, 5)},
                 {"us_p10", rounded(row.timing.us_p10, 5)},
                 {"us_p90", rounded(row.timing.us_p90, 5)}};
    if (row.job.flops > 0) line["tflops"] = rounded(row.job.flops / row.timing.us / 1e6, 4);
    line["tbps"] = rounded(row.job.bytes / row.timing.us / 1e6, 4);
    if (row.peak > 0) {
      line["peak"] = peak_of(*row.job.isa).what;
      line["peak_gflops"] = rounded(row.peak, 4);
      line["of_peak"] = rounded(row.gflops() / row.peak, 3);
    }
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
  const double seconds = static_cast<double>(options.ms) * 1e-3;
  const Effort effort{10, 50, std::min(0.1, seconds), seconds};
  JsonFile json(options.json);

  std::vector<Row> rows;
  {
    Progress progress("bench", std::ssize(cases));
    for (const Case& c : cases) {
      progress.step(c.name);
      rows.push_back(measure(c, effort));
    }
  }
  share_peaks(rows);
  Table table({{"case"},
               {"median", Table::right},
               {"least", Table::right},
               {"GFLOP/s", Table::right},
               {"peak", Table::right},
               {"of it", Table::right},
               {"GB/s", Table::right},
               {"error", Table::right},
               {"runs", Table::right}});
  for (const Row& row : rows) {
    const Timing& t = row.timing;
    if (row.right())
      table.row({row.c.name, time_text(t.us), time_text(t.us_min),
                 row.job.flops > 0 ? fmt::format("{:.1f}", row.gflops()) : "-",
                 row.peak > 0 ? fmt::format("{:.0f}", row.peak) : "-",
                 row.peak > 0 ? fmt::format("{:.0f} %", row.gflops() / row.peak * 100) : "-",
                 fmt::format("{:.2f}", row.job.bytes / t.us_min * 1e-3), error_text(row.error),
                 std::to_string(t.runs)});
    else table.row({row.c.name, "WRONG", "-", "-", "-", "-", "-", error_text(row.error), "0"});
  }
  print(table.text());
  json.write(text_of(to_json(rows)));
  for (const Row& row : rows)
    if (!row.right())
      throw CheckFailed(
          error_message("a result must match the reference within " + error_text(row.job.bound) + " before it is timed",
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
  add_integer(*command, "--ms", options->ms, 0, 1000000, "Milliseconds that a case may take, beside its set-up");
  command->add_flag("--list", options->list, "Print the names of the cases and exit");
  std::string kinds = "kinds of cases (<rows>: f32, bf16, fp8_ds_mla)\n";
  for (const Family& family : families()) kinds += "  " + form(family) + "\n";
  command->footer(kinds +
                  "A case runs 50 times (at least 0.1 s), or as often as --ms allows (at least 10 times).\n"
                  "GFLOP/s, GB/s and the share of the peak are those of the fastest run. The peak is what the\n"
                  "threads compute on registers alone, measured beside each case: the best of this process.\n"
                  "SIEVEMLA_CPU_ISA names the instruction set (sievemla info).");
  return [options] { return run(*options); };
}

}  // namespace sievemla::cli
