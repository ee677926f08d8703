// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/json.h -- small JSON files, read with suspicion.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sievemla::model {

// BadFile if it is not valid JSON, nests deeper than 16, or has a key twice. `where` names it in messages.
nlohmann::json parse_json(std::string_view text, const std::string& where);
std::string load_text(const std::filesystem::path& path);  // for parse_json: as much of a file as that takes, or more
nlohmann::json load_json(const std::filesystem::path& path);

// A value as messages show it: at most 60 characters.
std::string shown(const nlohmann::json& value);

}  // namespace sievemla::model
