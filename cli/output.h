// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/output.h -- what a command says: results on stdout, one line on stderr if it fails, a progress bar on a terminal.
#pragma once
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sievemla/error.h"

namespace sievemla::cli {

// What the process returns. The help text of the program lists them.
enum Exit : int {
  kGood = 0,
  kCheckFailed = 1,  // the program ran, and a result is not what it should be
  kWrongUse = 2,     // arguments, files, or a request that no kernel here serves
  kDevice = 3,       // the device refused, memory ran out, or an exception that nothing here throws on purpose
};

// The results are out, and one of them is not what it should be: kCheckFailed.
struct CheckFailed : Error {
  using Error::Error;
};

using Json = nlohmann::ordered_json;

// {"schema": 1, "kind": KIND, "version": …, "commit": …}: how every JSON output of this program starts.
Json envelope(std::string_view kind);
// An error as JSON: a number, "inf" where it is infinite (JSON has no such number), null where nothing was compared.
// Beside it stands "checked".
Json error_json(std::optional<double> error);
// Indented, with a newline. Bytes that are no UTF-8 become U+FFFD; infinities and NaN become null, as JSON has neither.
std::string text_of(const Json& json);

// Makes the standard streams safe to use: closed ones stay closed to us, so that no file we open takes their place, and
// a reader that leaves early does not kill the process (the exit status still says how the command ended).
void prepare_streams();

void print(std::string_view text);
template <class... T>
void print(fmt::format_string<T...> format, T&&... values) {
  print(std::string_view(fmt::format(format, std::forward<T>(values)...)));
}
// Sends out what was printed. Throws Error if stdout could not be written; a reader that left early is no error.
void flush();

// With code points that would move the cursor, start a line or turn the direction written as \x...
std::string printable(std::string_view message);
// "sievemla: MESSAGE" on stderr, as one line whatever bytes it holds, and of a long one its two ends.
void complain(std::string_view message);

// Columns with two spaces between; numbers are aligned right, words left.
class Table {
 public:
  enum Align : char { left = '<', right = '>' };
  struct Column {
    std::string head;
    Align align = left;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;
  std::string markdown() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string error_text(double error);        // "3.1e-07", "0"
std::string time_text(double microseconds);  // "812 us", "1.53 ms", "2.10 s"

// One line on stderr, rewritten in place and wiped at the end; nothing at all unless stderr is a terminal.
class Progress {
 public:
  Progress(std::string label, std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(std::string_view what = {});

 private:
  std::string label_;
  std::int64_t total_, done_ = 0;
  bool shown_;
  std::chrono::steady_clock::time_point drawn_{};
};

}  // namespace sievemla::cli
