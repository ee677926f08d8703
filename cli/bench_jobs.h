// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/bench_jobs.h -- what bench times: the kinds of work, and a job of each for given sizes.
//
// A case is named by its work, so that files of different programs can be compared:
//   attend.decode.<rows>.h<heads>.b<requests>.topk<k>[.graph | .warm]     on a GPU
//   cpu.attend.decode.<rows>.h<heads>.b<requests>.topk<k>.t<threads>
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/inputs.h"
#include "cli/place.h"
#include "cpu/isa/isa.h"
#include "sievemla/backend.h"

namespace sievemla::cli {

// The numbers of a case's name, by their letters.
using Fields = std::map<std::string, std::int64_t, std::less<>>;

// A case, ready to run.
struct Job {
  double flops = 0, bytes = 0;    // useful work: multiply-adds x 2, and what has to be streamed
  std::string kernels{};          // that do it, joined by " + "
  std::optional<cpu::Isa> isa{};  // the tier of the kernel that does most of the flops
  std::function<void(Stream)> call{};
  std::function<double()> error{};  // of the last call, against the judge
  double bound = 0;
};

// Sizes and memory of a job.
struct Setting;

// A name is <family>.<format>.<field><number>...; a field that begins with '=' is a word that stands there as it is.
struct Family {
  const char* name;
  const char* formats;  // the one there is, or the row types by kv_format_by_name if empty
  std::vector<std::string> fields;
  Job (*make)(const Setting&);
};
std::span<const Family> families();

struct Setting {
  const Backend& backend;
  std::string format;
  Fields n;
  std::shared_ptr<Place> place = std::make_shared<Place>(backend);
  std::shared_ptr<Inputs> inputs = std::make_shared<Inputs>(1);
  std::int64_t operator[](std::string_view name) const { return n.find(name)->second; }
};

constexpr std::int64_t kBenchSlots = 65536;  // cache rows that a case has at least
constexpr int kBenchRope = 64;               // of the rows that these cases attend to
// Cache rows that a query of attend.decode draws its slots from.
std::int64_t decode_span(std::int64_t requests);

}  // namespace sievemla::cli
