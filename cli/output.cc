// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "sievemla/backend.h"

namespace sievemla::cli {
namespace {

int stdout_errno = 0;  // of the first write that failed

// Columns a terminal needs: code points, as every name in this program is Latin, Greek or punctuation.
std::size_t width(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string padded(const std::string& cell, std::size_t columns, Table::Align align) {
  const std::string space(columns - std::min(columns, width(cell)), ' ');
  return align == Table::right ? space + cell : cell + space;
}

}  // namespace

Json envelope(std::string_view kind) {
  return Json{{"schema", 1}, {"kind", kind}, {"version", version()}, {"commit", commit()}};
}

std::string text_of(const Json& json) { return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n"; }

void prepare_streams() {
  // Opened the wrong way round on purpose: using it still fails, as using the closed stream would.
  constexpr int kUseless[] = {O_WRONLY, O_RDONLY, O_RDONLY};
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0) static_cast<void>(open("/dev/null", kUseless[fd]));  // takes the lowest free number: fd
  std::signal(SIGPIPE, SIG_IGN);
}

void print(std::string_view text) {
  if (stdout_errno == 0 && std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) stdout_errno = errno;
}

void flush() {
  if (stdout_errno == 0 && std::fflush(stdout) != 0) stdout_errno = errno;
  if (stdout_errno != 0 && stdout_errno != EPIPE)
    throw Error(error_message("the results must be writable", "stdout", std::strerror(stdout_errno)));
}

void complain(std::string_view message) {
  std::string line = "sievemla: ";
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') line += "\\n";
    else if (byte < 0x20 || byte == 0x7F) line += fmt::format("\\x{:02x}", byte);
    else line += c;
  }
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);
}

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    widths.push_back(width(columns_[c].head));
    for (const auto& row : rows_) widths[c] = std::max(widths[c], width(row[c]));
  }
  std::string out;
  const auto line = [&](auto cell) {
    std::string text;
    for (std::size_t c = 0; c < columns_.size(); ++c)
      text += (c ? "  " : "") + padded(cell(c), widths[c], columns_[c].align);
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line([&](std::size_t c) { return columns_[c].head; });
  for (const auto& row : rows_) line([&](std::size_t c) { return row[c]; });
  return out;
}

std::string Table::markdown() const {
  std::string out;
  const auto line = [&](auto cell) {
    for (std::size_t c = 0; c < columns_.size(); ++c) out += "| " + cell(c) + " ";
    out += "|\n";
  };
  line([&](std::size_t c) { return columns_[c].head; });
  line([&](std::size_t c) { return std::string(columns_[c].align == right ? "---:" : "---"); });
  for (const auto& row : rows_) line([&](std::size_t c) { return row[c]; });
  return out;
}

std::string error_text(double error) { return error == 0 ? "0" : fmt::format("{:.1e}", error); }

std::string time_text(double microseconds) {
  if (microseconds < 1e3) return fmt::format("{:.0f} us", microseconds);
  return microseconds < 1e6 ? fmt::format("{:.2f} ms", microseconds / 1e3)
                            : fmt::format("{:.2f} s", microseconds / 1e6);
}

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(std::max<std::int64_t>(total, 1)), shown_(isatty(2) == 1) {}

Progress::~Progress() {
  if (shown_ && drawn_ != std::chrono::steady_clock::time_point{}) std::fputs("\r\033[K", stderr);
}

void Progress::step(std::string_view what) {
  ++done_;
  const auto now = std::chrono::steady_clock::now();
  if (!shown_ || now - drawn_ < std::chrono::milliseconds(50)) return;
  drawn_ = now;
  constexpr std::int64_t kBar = 24;
  const auto full = static_cast<std::size_t>(std::min(kBar, kBar * done_ / total_));
  fmt::print(stderr, "\r{} [{}{}] {}/{} {}\033[K", label_, std::string(full, '#'), std::string(kBar - full, '.'), done_,
             total_, what.substr(0, 60));
}

}  // namespace sievemla::cli
