// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/safetensors.h -- safetensors files and sharded checkpoints by mmap. Nothing in a file is trusted.
//
//   file:  u64 little-endian header length | JSON header | raw little-endian row-major data
//   JSON:  {"__metadata__": {string: string}, name: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}}
//
// Source: the safetensors format description (Hugging Face). As it says: a header of at most 100 MB, offsets relative
// to the data, tensors side by side from 0 to the end of the file, without overlap or hole, no duplicate keys.
// Every broken rule is a BadFile that names the rule, what was got, the file and the tensor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sievemla/tensor.h"

namespace sievemla::model {

// A file in memory, read-only. BadFile if it is missing, unreadable, a directory or no regular file. Whoever shrinks it
// takes its pages away: reading them then is a bus error.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();
  std::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// A file's bytes, of a longer one the first `most`. The same rules, and it may change afterwards.
std::string read_file(const std::filesystem::path& path, std::size_t most);

// One entry of a header. F8_E4M3 data is u8 in the view; `dtype` keeps what the file says. A shape [] reads as [1].
// Of a dtype that is not in the list, the view is the bytes alone: who does not need the tensor is not stopped by it.
struct StoredTensor {
  std::string dtype;
  TensorView view;
};

// BadFile unless the tensor has this dtype (none: any) and shape.
void check_tensor(const TensorView& view, std::optional<DType> dtype, std::initializer_list<std::int64_t> shape,
                  const std::string& where);

// One file. Views stay valid as long as this object.
class SafeTensors {
 public:
  explicit SafeTensors(const std::filesystem::path& path);
  // The same rules over bytes in memory, which must outlive this; `name` stands in messages.
  SafeTensors(std::string_view bytes, std::string name);

  const std::string& name() const { return name_; }  // the path, for messages
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::vector<std::string> names() const;                   // sorted
  const StoredTensor* find(std::string_view name) const;    // null: not there
  const StoredTensor& tensor(std::string_view name) const;  // BadFile: not there, or of an unknown dtype
  // The tensor, with this dtype and shape. BadFile otherwise.
  TensorView tensor(std::string_view name, DType dtype, std::initializer_list<std::int64_t> shape) const;

 private:
  void parse(std::string_view bytes);

  std::string name_;
  std::unique_ptr<MappedFile> file_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
  std::vector<std::unique_ptr<std::byte[]>> aligned_;  // copies of tensors that the file holds at odd addresses
};

// A directory with model.safetensors, or with model.safetensors.index.json and the shards it names (files of that very
// directory). Index and shards must name the same tensors.
class Checkpoint {
 public:
  explicit Checkpoint(const std::filesystem::path& directory);

  std::vector<std::string> names() const;                 // sorted
  const StoredTensor* find(std::string_view name) const;  // null: not there
  std::string where(std::string_view name) const;         // "<file>: tensor <name>", for messages
  const std::string& name() const { return name_; }       // the directory

 private:
  std::string name_;
  std::vector<SafeTensors> shards_;
  std::map<std::string, const SafeTensors*, std::less<>> shard_of_;
};

}  // namespace sievemla::model
