// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/bench.cc -- sievemla bench: times the stages, case by case; on the CPU beside what the processor computes at
// most. Every result is judged before it is timed.
#include <fcntl.h>
#include <fnmatch.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "cli/bench_jobs.h"
#include "cli/cuda/gpu.h"
#include "cli/machine.h"
#include "cli/measure.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cpu/isa/isa.h"
#include "cuda/device.h"
#include "sievemla/error.h"
#include "sievemla/kv_format.h"

namespace sievemla::cli {
namespace {

// What runs if no case is named. {a,b} stands for either. On the CPU each with one thread and with all.
constexpr const char* kCpuCases[] = {
    "attend.decode.{bf16,fp8_ds_mla}.h{64,32,16,8}.b1.topk2048",
    "attend.decode.f32.h64.b1.topk2048",
    "attend.decode.fp8_ds_mla.h64.b16.topk2048",
    "attend.prefill.bf16.h64.s16.kv8192.topk2048",
    "attend.dense.bf16.h64.b1.ctx8192",
    "index.decode.fp8.h{32,64}.b1.ctx32768",
    "index.prefill.fp8.h32.s64.kv8192",
    "topk.f32.rows1.len131072.k2048",
    "topk.f32.rows64.len8192.k2048",
    "select.prefill.fp8.h32.s64.kv8192.k2048",
    "chain.fp8.h32.b1.ctx32768.k2048",
    "step.fp8.h32.H64.b{1,16}.ctx32768.k2048",
    "kv.{write,gather}.fp8_ds_mla.n1024",
};
constexpr const char* kGpuCases[] = {
    "attend.decode.fp8_ds_mla.h{64,128}.b{1,4,16,64,128,256}.topk2048",
    "attend.decode.fp8_ds_mla.h{8,16,32}.b{1,16,64,128,256}.topk2048",
    "attend.decode.fp8_ds_mla.h{16,64,128}.b1.topk2048.graph",
    "attend.decode.fp8_ds_mla.h64.b{1,16}.topk2048.warm",
    "attend.decode.bf16.h{64,128}.b{1,4,16,64,128}.topk2048",
    "attend.decode.bf16.h64.b1.topk2048.graph",
    "attend.prefill.bf16.h{64,128}.s4096.kv{8192,32768,131072}.topk2048",
    "attend.dense.bf16.h64.b64.ctx8192",
    "attend.dense.bf16.h64.b1.ctx131072",
    "index.prefill.fp8.h{32,64}.s{2048,4096}.kv32768",
    "index.prefill.fp8.h{32,64}.s2048.kv131072",
    "index.decode.fp8.h{32,64}.b{1,16,64,128}.ctx{8192,65536}",
    "index.decode.fp8.h{32,64}.b{1,16,64}.ctx131072",
    "index.decode.fp8.h32.{mixed,even}",
    "index.decode.fp8.h32.b1.ctx65536.warm",
    "topk.f32.rows1.len{8192,65536,131072,1048576}.k2048",
    "topk.f32.rows16.len65536.k2048",
    "topk.f32.rows64.len{8192,65536}.k2048",
    "topk.f32.rows{128,256}.len131072.k2048",
    "topk.f32.rows4096.len{8192,32768}.k2048",
    "topk.f32.rows1.len{65536,131072}.k2048.graph",
    "topk.f32.rows16.len65536.k2048.warm",
    "kv.layer.fp8_ds_mla.n{1,64,4096}",
    "kv.layer.fp8_ds_mla.n{1,64,4096}.parts",
    "select.prefill.fp8.h32.s4096.kv131072.k2048",
    "chain.fp8.h32.b1.ctx131072.k2048.graph",
    "chain.fp8.h32.b64.ctx65536.k2048",
    "step.fp8.h32.H64.b1.ctx131072.k2048.graph",
    "step.fp8.h32.H64.b64.ctx65536.k2048",
};

struct Case {
  std::string name;
  const Family* family;
  std::string format;
  Fields fields;
  int threads;  // 0: on CUDA
  gpu::L2 l2;   // CUDA alone
};

constexpr std::pair<const char*, gpu::L2> kEnds[] = {{".graph", gpu::L2::graph}, {".warm", gpu::L2::warm}};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('.', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// "a{1,2}.b{3,4}" as a1.b3, a1.b4, a2.b3, a2.b4.
void expand(const std::string& pattern, std::vector<std::string>& names) {
  const std::size_t open = pattern.find('{'), close = pattern.find('}');
  if (open == pattern.npos) return names.push_back(pattern);
  for (std::size_t begin = open + 1; begin <= close;) {
    const std::size_t end = std::min(pattern.find(',', begin), close);
    expand(pattern.substr(0, open) + pattern.substr(begin, end - begin) + pattern.substr(close + 1), names);
    begin = end + 1;
  }
}

std::string form(const Family& family, const char* lead, const char* end) {
  std::string text = std::string(lead) + family.name + "." + (*family.formats ? family.formats : "<rows>");
  for (const std::string& field : family.fields) text += "." + (field[0] == '=' ? field.substr(1) : field + "<n>");
  return text + end;
}
constexpr std::int64_t kMost = 1 << 28;  // that a field may be
std::string forms(const Family& family) {
  return form(family, "cpu.", ".t<n>") + " or " + form(family, "", "[.graph | .warm]") + ", n from 1 to " +
         std::to_string(kMost);
}

// "ctx8192" with the name "ctx" is 8192.
std::optional<std::int64_t> number_in(const std::string& part, const std::string& name) {
  if (part.compare(0, name.size(), name) != 0) return {};
  const std::string digits = part.substr(name.size());
  if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) return {};
  const std::int64_t n = std::stoll(digits);
  return n >= 1 && n <= kMost ? std::optional(n) : std::nullopt;
}

// What a case takes at least: its caches, its queries and outputs, its scores, its slots.
double least_bytes(const Case& c) {
  const auto n = [&](const char* field) {
    const auto found = c.fields.find(field);
    return found == c.fields.end() ? 0. : static_cast<double>(found->second);
  };
  const bool attends = std::string_view(c.family->name).rfind("attend.", 0) == 0;
  const double queries = std::max({n("b"), n("s"), n("rows")});
  const double rows = c.fields.contains("ctx") ? n("b") * n("ctx")
                      : std::string_view(c.family->name) == "attend.decode"
                          ? n("b") * static_cast<double>(decode_span(c.fields.at("b")))
                          : n("kv");
  const auto row_bytes = [](KvFormat format) { return static_cast<double>(info(format).row_bytes(512, kBenchRope)); };
  const double row = attends ? row_bytes(kv_format_by_name(c.format))
                             : kIndexKeyBytes + (n("H") > 0 ? row_bytes(KvFormat::fp8_ds_mla) : 0);
  const double heads = attends ? n("h") : n("H");
  const bool keeps_scores = std::string_view(c.family->name).rfind("index.", 0) == 0;
  return rows * row + queries * (heads * 2176 + 4 * (n("topk") + n("k") + n("len"))) +
         (keeps_scores ? 4 * queries * std::max(n("kv"), n("ctx")) : 0);
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
  check_threads(c.threads, where);
  expects(field("n") <= kBenchSlots, "rows lie in different slots", where, field("n"), " of ", kBenchSlots);
  const std::int64_t keys = std::string_view(c.family->name) == "attend.decode" ? decode_span(field("b")) : field("kv");
  if (keys < 0) return;
  expects(field("s") <= keys || attends, "a prefill has no more tokens than keys", where, field("s"), " of ", keys);
  expects(field("topk") <= keys, "a query's slots are different, so top-k is at most the rows it draws from", where,
          field("topk"), " of ", keys);
}

// The numbers of a name's fields; none where they are not the family's.
std::optional<Fields> fields_of(const Family& family, const std::vector<std::string>& parts) {
  if (parts.size() != family.fields.size() + 1 || (*family.formats && parts.front() != family.formats)) return {};
  Fields fields;
  for (std::size_t i = 0; i < family.fields.size(); ++i) {
    const std::string &field = family.fields[i], &part = parts[i + 1];
    if (field[0] == '=') {
      if (part != field.substr(1)) return {};
      continue;
    }
    const auto n = number_in(part, field);
    if (!n) return {};
    fields[field] = *n;
  }
  return fields;
}

Case parse_case(const std::string& name) {
  const bool cpu = name.starts_with("cpu.");
  std::string body = name.substr(cpu ? 4 : 0);
  Case c{name, nullptr, "", {}, 0, gpu::L2::cold};
  bool good = true;
  if (cpu) {
    const std::size_t dot = body.rfind(".t");
    const auto threads = dot == body.npos ? std::nullopt : number_in(body.substr(dot + 1), "t");
    good = threads.has_value();
    if (good) c.threads = static_cast<int>(*threads), body.resize(dot);
  } else {
    for (const auto& [end, l2] : kEnds)
      if (body.ends_with(end)) c.l2 = l2, body.resize(body.size() - std::strlen(end));
  }
  std::string kinds;
  const Family* close = nullptr;  // of the right kind, whatever else is wrong
  for (const Family& family : families()) {
    const std::string lead = std::string(family.name) + ".";
    kinds += (kinds.empty() ? "" : ", ") + std::string(cpu ? "cpu." : "") + family.name;
    if (!body.starts_with(lead)) continue;
    if (!close) close = &family;
    const std::vector<std::string> parts = split(body.substr(lead.size()));
    const auto fields = good ? fields_of(family, parts) : std::nullopt;
    if (!fields) continue;
    c.family = &family, c.fields = *fields, c.format = parts.front();
    break;
  }
  if (!c.family && close)
    throw InvalidArgument(error_message("a case of this kind is named " + forms(*close), "bench", "'", name, "'"));
  if (!c.family)
    throw InvalidArgument(
        error_message("a case is one of sievemla bench --list, or of the kinds " + kinds, "bench", "'", name, "'"));
  if (!*c.family->formats) {
    const KvFormatInfo& rows = info(kv_format_by_name(c.format));  // throws, naming those there are
    expects(rows.rope < 0 || rows.rope == kBenchRope, "the rows of these cases have a rope of 64", "bench: " + name,
            rows.name, " rows with a rope of ", rows.rope);
  }
  check_sizes(c);
  return c;
}

// ---- the command ------------------------------------------------------------------------------------

struct Options {
  std::vector<std::string> patterns;
  std::string backend = "auto", json;
  std::int64_t threads = 0, ms = 3000;
  bool list = false, resume = false;
};

std::vector<std::string> gpu_cases() {
  std::vector<std::string> names;
  for (const char* pattern : kGpuCases) expand(pattern, names);
  return names;
}

// With one thread and with all, or with the number asked for.
std::vector<std::string> cpu_cases(const Options& options) {
  std::vector<int> threads = {1, Backend::cpu().threads()};
  if (options.threads > 0) threads = {static_cast<int>(options.threads)};
  if (threads.front() == threads.back()) threads.resize(1);
  std::vector<std::string> bodies, names;
  for (const char* pattern : kCpuCases) expand(pattern, bodies);
  for (const std::string& body : bodies)
    for (const int t : threads) names.push_back(fmt::format("cpu.{}.t{}", body, t));
  return names;
}

// What runs if no case is named: one backend's. What patterns choose from: `all` that can run.
std::vector<std::string> default_cases(const Options& options, bool all) {
  const bool gpu = options.backend == "cuda" || (options.backend == "auto" && cuda::any_device());
  std::vector<std::string> names = gpu ? gpu_cases() : std::vector<std::string>();
  if (!gpu || (all && options.backend == "auto"))
    for (std::string& name : cpu_cases(options)) names.push_back(std::move(name));
  return names;
}

// The default cases that match a pattern, and every full name that a pattern is.
std::vector<Case> chosen(const Options& options) {
  const std::vector<std::string> defaults = default_cases(options, !options.patterns.empty());
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
  double peak = 0;  // GFLOP/s of the kernel's tier on the case's threads; 0 = not of arithmetic, or on CUDA
  gpu::Clocks clocks{};
  double setup_s = 0, check_s = 0, timing_s = 0;  // what the case took of the bench's own time
  bool right() const { return error <= job.bound; }
  // Work over the time of the fastest run, as the peak is that of the fastest.
  double gflops() const { return job.flops / timing.us_min * 1e-3; }
};

class Watch {
 public:
  double lap() {  // seconds since the last
    const auto now = Clock::now(), before = std::exchange(begin_, now);
    return std::chrono::duration<double>(now - before).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

// Linux promises more memory than there is, and ends whoever takes it at its word.
void check_memory(const Case& c) {
  const auto memory = static_cast<double>(host_memory_bytes());
  if (memory == 0 || least_bytes(c) <= memory) return;
  throw DeviceError(error_message("memory must suffice for the request",
                                  fmt::format("bench: {}; this machine has {:.1f} GiB", c.name, memory / 0x1p30),
                                  fmt::format("at least {:.1f} GiB", least_bytes(c) / 0x1p30)));
}

Row measure(const Case& c, const Effort& effort) {
  if (c.threads > 0) check_memory(c);
  Watch watch;
  const Backend backend = c.threads > 0 ? Backend::cpu({c.threads, {}}) : Backend::cuda();
  backend.prepare();
  Row row{c, c.family->make({backend, c.format, c.fields}), 0, {}};
  row.setup_s = watch.lap();
  row.job.call({});
  row.error = row.job.error();
  row.check_s = watch.lap();
  if (row.right() && c.threads > 0) {
    if (row.job.isa && row.job.flops > 0) row.peak = peak_gflops(peak_of(*row.job.isa), backend);
    row.timing = median_us([&] { row.job.call({}); }, effort);
    row.timing_s = watch.lap();
  } else if (row.right()) {
    row.timing = gpu::time(backend.device(), row.job.call, c.l2);
    row.clocks = gpu::clocks(backend.device());
    row.timing_s = watch.lap();
    row.error = std::max(row.error, row.job.error());  // of the last replay too
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

std::string rate_text(double x) { return fmt::format("{:.{}f}", x, x < 10 ? 2 : x < 1000 ? 1 : 0); }

double rounded(double x, int digits) {  // to significant digits: a timing has no more
  return x == 0 || !std::isfinite(x) ? x : std::stod(fmt::format("{:.{}g}", x, digits));
}

// What the cases run on; of the CPU where any does, and of the GPU.
void add_machine(std::span<const Case> cases, Json& json) {
  const auto on_cpu = [](const Case& c) { return c.threads > 0; };
  if (std::any_of(cases.begin(), cases.end(), on_cpu)) {
    json["cpu"] = this_machine().cpu;
    json["tier"] = cpu::info(cpu::isa()).name;  // the highest that kernels could be of
    double load = 0;
    if (getloadavg(&load, 1) == 1) json["load"] = load;  // other work spoils the numbers
  }
  if (std::all_of(cases.begin(), cases.end(), on_cpu)) return;
  static_cast<void>(Backend::cuda());  // or says why there is none
  const cuda::Machine machine = cuda::machine();
  const cuda::DeviceInfo& device = machine.devices.at(0);
  const auto text = [](int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); };
  json["gpu"] = device.name;
  json["config"] = device.config;
  json["image"] = device.image;
  json["multiprocessors"] = device.multiprocessors;
  json["cuda"] = text(machine.runtime_version);
  json["driver"] = text(machine.driver_version);
}

constexpr const char* l2_of(gpu::L2 l2) {
  return l2 == gpu::L2::cold ? "cold" : l2 == gpu::L2::warm ? "warm" : "graph";
}

Json to_json(const Row& row) {
  Json line = {{"case", row.c.name},
               {"variant", row.job.kernels},
               {"us", rounded(row.timing.us, 5)},
               {"us_min", rounded(row.timing.us_min, 5)},
               {"us_p10", rounded(row.timing.us_p10, 5)},
               {"us_p90", rounded(row.timing.us_p90, 5)}};
  if (row.c.threads > 0) line["tier"] = cpu::info(cpu::isa()).name, line["threads"] = row.c.threads;
  else line["l2"] = l2_of(row.c.l2);
  if (row.clocks.sm_mhz > 0) line["sm_mhz"] = row.clocks.sm_mhz, line["memory_mhz"] = row.clocks.memory_mhz;
  line["flops"] = row.job.flops;
  line["bytes"] = row.job.bytes;
  if (row.job.flops > 0) line["tflops"] = rounded(row.job.flops / row.timing.us / 1e6, 4);
  line["tbps"] = rounded(row.job.bytes / row.timing.us / 1e6, 4);
  if (row.peak > 0) {
    line["peak"] = peak_of(*row.job.isa).what;
    line["peak_gflops"] = rounded(row.peak, 4);
    line["of_peak"] = rounded(row.gflops() / row.peak, 3);
  }
  line["error"] = rounded(row.error, 2);
  line["bound"] = rounded(row.job.bound, 2);
  line["runs"] = row.timing.runs;
  line["spent"] = {
      {"setup", rounded(row.setup_s, 3)}, {"check", rounded(row.check_s, 3)}, {"timing", rounded(row.timing_s, 3)}};
  return line;
}

// `report`: the envelope and the machine, and the cases of a file that this run goes on with.
Json to_json(Json report, const std::vector<Row>& rows) {
  report["failed"] = Json::array();
  for (const Row& row : rows)
    if (row.right()) report["cases"].push_back(to_json(row));
    else report["failed"].push_back({{"case", row.c.name}, {"error", error_json(row.error)}, {"bound", row.job.bound}});
  return report;
}

// The cases of a file that --resume goes on with; `report` is what this run would write, without its cases.
Json cases_of(const std::string& path, Json report) {
  std::ifstream file(path);
  if (!file || file.peek() == std::ifstream::traits_type::eof()) return Json::array();
  Json before = Json::parse(file, nullptr, false);
  Json cases = before.is_object() && before.contains("cases") ? before["cases"] : Json();
  const auto named = [](const Json& line) { return line.is_object() && line.value("case", Json()).is_string(); };
  expects(cases.is_array() && std::all_of(cases.begin(), cases.end(), named),
          "--resume goes on with a file of sievemla bench --json", "bench: " + path, "another file");
  for (const char* changing : {"load", "cases", "failed"}) report.erase(changing), before.erase(changing);
  for (const auto& [key, value] : report.items())
    expects(before.value(key, Json()) == value, "--resume goes on with a file of this program on this machine",
            "bench: " + path, "another ", key);
  return cases;
}

// The file of --json. Opened before minutes of work, so that a bad path fails now; what was made and got nothing
// written goes away again, and what was there stays until there is something to write.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path) {
    if (path_.empty()) return;
    struct stat found{};
    expects(stat(path_.c_str(), &found) != 0 || !S_ISFIFO(found.st_mode),
            "--json takes a file, which is written anew after each case", "bench: " + path_, "a pipe");
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

// The word behind --json is a file, even if it was meant to be a case.
void check_json(const std::string& path) {
  const std::string body = path.starts_with("cpu.") ? path.substr(4) : path;
  bool a_case = false;
  for (const Family& family : families()) a_case |= body.starts_with(std::string(family.name) + "." + family.formats);
  expects(!a_case || path.ends_with(".json"), "--json takes a file, and this looks like a case", "bench", "'", path,
          "'");
}

int run(const Options& options) {
  check_json(options.json);
  expects(!options.resume || !options.json.empty(), "--resume goes on with the file of --json", "bench", "no --json");
  std::vector<Case> cases = chosen(options);
  if (options.list) {
    for (const Case& c : cases) print("{}\n", c.name);
    return kGood;
  }
  const double seconds = static_cast<double>(options.ms) * 1e-3;
  const Effort effort{10, 50, std::min(0.1, seconds), seconds};
  JsonFile json(options.json);
  Json report = envelope("bench");
  if (!options.json.empty()) add_machine(cases, report);
  report["cases"] = options.resume ? cases_of(options.json, report) : Json::array();
  for (const Json& line : report["cases"])
    std::erase_if(cases, [&](const Case& c) { return line.value("case", "") == c.name; });

  std::vector<Row> rows;
  {
    Progress progress("bench", std::ssize(cases));
    for (const Case& c : cases) {
      progress.step(c.name);
      rows.push_back(measure(c, effort));
      json.write(text_of(to_json(report, rows)));  // a run that is stopped leaves what it has
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
      table.row({row.c.name, time_text(t.us), time_text(t.us_min), row.job.flops > 0 ? rate_text(row.gflops()) : "-",
                 row.peak > 0 ? fmt::format("{:.0f}", row.peak) : "-",
                 row.peak > 0 ? fmt::format("{:.0f} %", row.gflops() / row.peak * 100) : "-",
                 rate_text(row.job.bytes / t.us_min * 1e-3), error_text(row.error), std::to_string(t.runs)});
    else table.row({row.c.name, "WRONG", "-", "-", "-", "-", "-", error_text(row.error), "0"});
  }
  print(table.text());
  json.write(text_of(to_json(report, rows)));
  for (const Row& row : rows)
    if (!row.right())
      throw CheckFailed(
          error_message("a result must match the judge's within " + error_text(row.job.bound) + " before it is timed",
                        "bench: " + row.c.name, "an error of ", error_text(row.error)));
  return kGood;
}

}  // namespace

Action add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("bench", "Time the stages, on a CUDA device where there is one, else on the CPU");
  command
      ->add_option("CASE", options->patterns,
                   "Cases, or patterns such as 'cpu.attend.*.t1'; a full name may have any numbers; none: --list")
      ->type_name("");
  add_choice(*command, "--backend", options->backend, {"auto", "cpu", "cuda"},
             "Whose cases, where none is named in full");
  command->add_option("--json", options->json, "Write the numbers there as JSON")->type_name("FILE");
  add_integer(*command, "--threads", options->threads, 0, 4096, "Threads of the CPU's default cases; 0: one, and all");
  add_integer(*command, "--ms", options->ms, 0, 1000000,
              "Milliseconds that a case on the CPU may take, beside its set-up");
  command->add_flag("--resume", options->resume, "Keep the cases that the file of --json has, and run the others");
  command->add_flag("--list", options->list, "Print the names of the cases and exit");
  std::string kinds = "kinds of cases (<rows>: f32, bf16, fp8_ds_mla)\n";
  for (const Family& family : families()) kinds += "  " + form(family, "[cpu.]", "[.t<n>]") + "\n";
  command->footer(
      kinds +
      "On a GPU a case runs 50 times with a cold L2 and the host ahead; .graph: 20 calls in a CUDA graph, a twentieth\n"
      "of each replay; .warm: L2 as the call before left it. docs/bench.md has the rules and the JSON.\n"
      "On the CPU it runs 50 times (at least 0.1 s), or as often as --ms allows (at least 10 times).\n"
      "GFLOP/s, GB/s and the share of the peak are those of the fastest run. The peak is what the\n"
      "threads compute on registers alone, measured beside each case: the best of this process.\n"
      "SIEVEMLA_CPU_ISA names the instruction set (sievemla info).");
  return [options] { return run(*options); };
}

}  // namespace sievemla::cli
