// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/json.cc -- nlohmann's parser behind our rules.
#include "model/json.h"

#include <set>
#include <vector>

#include "model/safetensors.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr std::size_t kMaxBytes = std::size_t{64} << 20;  // the index of a 700 GB checkpoint has 10 MB

}  // namespace

std::string shown(const json& value) {
  constexpr std::size_t kMost = 60;
  if (value.is_structured() && value.size() > 8)
    return std::string(value.type_name()) + " of " + std::to_string(value.size());
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kMost) text = text.substr(0, kMost - 3) + "...";
  return text;
}

std::string load_text(const std::filesystem::path& path) { return read_file(path, kMaxBytes + 1); }

json parse_json(std::string_view text, const std::string& where) {
  if (text.size() > kMaxBytes) throw BadFile(error_message("a JSON file has at most 64 MiB", where, "more"));
  if (const std::size_t nul = text.find('\0'); nul != text.npos)  // where the parser would stop, whatever follows
    throw BadFile(error_message("the file must be valid JSON", where, "a NUL at its byte ", nul + 1));
  std::vector<std::set<std::string>> keys;  // of each open object
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    const bool opens = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    if (opens && depth >= kMaxDepth) throw BadFile(error_message("JSON nests at most 16 deep", where, "more"));
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw BadFile(error_message("a key must not occur twice", where, shown(parsed)));
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..." -> from "parse error" on
    const std::string what = e.what();
    throw BadFile(error_message("the file must be valid JSON", where, what.substr(what.find(']') + 2)));
  }
}

json load_json(const std::filesystem::path& path) { return parse_json(load_text(path), path.string()); }

}  // namespace sievemla::model
