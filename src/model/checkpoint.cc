// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/checkpoint.cc -- one file or many: which shard holds which tensor.
#include "model/json.h"
#include "model/safetensors.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

constexpr std::size_t kMaxShards = 4096;

}  // namespace

Checkpoint::Checkpoint(const std::filesystem::path& directory) : name_(directory.string()) {
  std::error_code error;
  const bool is_directory = std::filesystem::is_directory(directory, error);
  if (!is_directory)
    throw BadFile(
        error_message("a checkpoint is a readable directory", name_, error ? error.message() : std::string("none")));
  const std::filesystem::path single = directory / "model.safetensors";
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  // Whatever has such a name, a link that leads nowhere too, is opened, so that it is named if it cannot be.
  const auto there = [&](const std::filesystem::path& path) {
    return std::filesystem::symlink_status(path, error).type() != std::filesystem::file_type::not_found;
  };
  if (there(single) || !there(index)) {
    shards_.emplace_back(single);
    for (const std::string& name : shards_[0].names()) shard_of_[name] = &shards_[0];
    return;
  }

  const nlohmann::json json = load_json(index);
  const std::string where = index.string();
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object())
    throw BadFile(error_message("an index has an object weight_map", where + ": weight_map", "none"));
  std::map<std::string, std::vector<std::string>> tensors_of;  // by file
  for (const auto& [tensor, file] : map->items()) {
    const std::string text = file.is_string() ? file.get<std::string>() : std::string();
    if (text.empty() || text == "." || text == ".." || text.find_first_of(std::string_view("/\\\0", 3)) != text.npos)
      throw BadFile(error_message("a shard is a file of the checkpoint's own directory", where + ": tensor " + tensor,
                                  shown(file)));
    tensors_of[text].push_back(tensor);
  }
  if (tensors_of.size() > kMaxShards)
    throw BadFile(error_message("a checkpoint has at most 4096 shards", where, tensors_of.size()));

  shards_.reserve(tensors_of.size());  // so that pointers into it last
  for (const auto& [file, tensors] : tensors_of) {
    const SafeTensors& shard = shards_.emplace_back(directory / file);
    for (const std::string& tensor : tensors) {
      if (!shard.find(tensor)) shard.tensor(tensor);  // throws
      shard_of_[tensor] = &shard;
    }
  }
  for (const SafeTensors& shard : shards_)
    for (const std::string& tensor : shard.names())
      if (const auto found = shard_of_.find(tensor); found == shard_of_.end() || found->second != &shard)
        throw BadFile(error_message("a tensor of a shard must be in the index, under that shard",
                                    shard.name() + ": tensor " + tensor, "another or no entry"));
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> all;
  for (const auto& [name, shard] : shard_of_) all.push_back(name);
  return all;
}

const StoredTensor* Checkpoint::find(std::string_view name) const {
  const auto found = shard_of_.find(name);
  return found == shard_of_.end() ? nullptr : found->second->find(name);
}

std::string Checkpoint::where(std::string_view name) const {
  const auto found = shard_of_.find(name);
  return (found == shard_of_.end() ? name_ : found->second->name()) + ": tensor " + std::string(name);
}

}  // namespace sievemla::model
