// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/safetensors.h -- tensors of a golden file.
//
// It trusts the file; the reader that validates is in src/model.
#pragma once
#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace sievemla::test {

class Safetensors {
 public:
  // Relative to tests/golden.
  explicit Safetensors(const std::string& name) {
    std::ifstream file(std::string(SIEVEMLA_GOLDEN_DIR "/") + name, std::ios::binary);
    if (!file) throw std::runtime_error("cannot open golden " + name);
    std::uint64_t header_bytes = 0;
    file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
    std::string header(header_bytes, '\0');
    file.read(header.data(), static_cast<std::streamsize>(header_bytes));
    header_ = nlohmann::json::parse(header);
    data_.assign(std::istreambuf_iterator<char>(file), {});
  }

  std::vector<std::int64_t> shape(const std::string& tensor) const {
    return header_.at(tensor).at("shape").get<std::vector<std::int64_t>>();
  }

  // T is the caller's knowledge of the dtype; checked by size alone.
  template <class T>
  std::vector<T> values(const std::string& tensor) const {
    const auto range = header_.at(tensor).at("data_offsets").get<std::vector<std::size_t>>();
    std::size_t elements = 1;
    for (std::int64_t extent : shape(tensor)) elements *= static_cast<std::size_t>(extent);
    if (range.at(1) - range.at(0) != elements * sizeof(T) || range.at(1) > data_.size())
      throw std::runtime_error(tensor + " has another dtype, or the file is cut");
    std::vector<T> out(elements);
    std::memcpy(out.data(), data_.data() + range.at(0), elements * sizeof(T));
    return out;
  }

 private:
  nlohmann::json header_;
  std::vector<char> data_;
};

}  // namespace sievemla::test
