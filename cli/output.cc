// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
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

std::string printable(std::string_view message) {
  struct Range {
    std::string_view first, last;  // UTF-8, of one length
  };
  constexpr Range kHidden[] = {{{"\x00", 1}, "\x1F"},
                               {"\x7F", "\x7F"},
                               {"\xC2\x80", "\xC2\x9F"},           // C1 controls
                               {"\xE2\x80\x8E", "\xE2\x80\x8F"},   // direction marks
                               {"\xE2\x80\xA8", "\xE2\x80\xAE"},   // line and paragraph separators, directions
                               {"\xE2\x81\xA6", "\xE2\x81\xA9"}};  // isolated directions
  std::string text;
  for (std::size_t i = 0; i < message.size();) {
    const auto* hidden = std::find_if(std::begin(kHidden), std::end(kHidden), [&](const Range& range) {
      const std::string_view here = message.substr(i, range.first.size());
      return here.size() == range.first.size() && here >= range.first && here <= range.last;
    });
    const std::size_t bytes = hidden == std::end(kHidden) ? 0 : hidden->first.size();
    if (message[i] == '\n') text += "\\n";
    else if (bytes == 0) text += message[i];
    else
      for (const char c : message.substr(i, bytes)) text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    i += std::max<std::size_t>(bytes, 1);
  }
  return text;
}

Json envelope(std::string_view kind) {
  return Json{{"schema", 1}, {"kind", kind}, {"version", version()}, {"commit", commit()}};
}

Json error_json(std::optional<double> error) {
  if (!error) return nullptr;
  return std::isfinite(*error) ? Json(*error) : Json("inf");
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
  // A file chooses what a message quotes. Of a long one the ends stay: the rule, and the place.
  constexpr std::size_t kHead = 340, kTail = 160;
  const std::string text = printable(message);
  std::string line = "sievemla: ";
  if (text.size() <= kHead + kTail) {
    line += text;
  } else {
    const auto inside = [&](std::size_t at) { return (text[at] & 0xC0) == 0x80; };  // of a code point
    std::size_t head = kHead, tail = text.size() - kTail;
    while (head > kHead - 4 && inside(head)) --head;
    while (tail < text.size() - kTail + 4 && inside(tail)) ++tail;
    line += text.substr(0, head) + "…" + text.substr(tail);
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
  if (microseconds < 100) return fmt::format("{:.1f} us", microseconds);
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
