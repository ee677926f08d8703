// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/model/files.h -- safetensors files and checkpoints, taken apart and written anew with a change.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "sievemla/error.h"

namespace sievemla::test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

inline fs::path golden_dir(const std::string& name) { return fs::path(SIEVEMLA_GOLDEN_DIR) / name; }

class TempDir {
 public:
  TempDir() {
    std::string name = (fs::temp_directory_path() / "sievemla_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = name;
  }
  TempDir(const TempDir&) = delete;
  ~TempDir() {
    std::error_code error;
    fs::permissions(path_, fs::perms::owner_all, error);
    fs::remove_all(path_, error);
  }
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}
inline std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A file of this header and data; `length` says something else than the header's own length if it is given.
inline std::string safetensors(const std::string& header, const std::string& data = "",
                               std::uint64_t length = UINT64_MAX) {
  if (length == UINT64_MAX) length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + data;
}

struct Tensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;

inline Tensors read_tensors(const fs::path& path) {
  const model::SafeTensors file(path);
  Tensors tensors;
  for (const std::string& name : file.names()) {
    const model::StoredTensor& t = file.tensor(name);
    tensors[name] = {
        t.dtype,
        {t.view.shape.begin(), t.view.shape.begin() + t.view.rank},
        {static_cast<const char*>(t.view.data), static_cast<std::size_t>(t.view.elements() * size_of(t.view.dtype))}};
  }
  return tensors;
}

inline std::string to_file(const Tensors& tensors, const Json& metadata = nullptr) {
  Json header = Json::object();
  if (!metadata.is_null()) header["__metadata__"] = metadata;
  std::string data;
  for (const auto& [name, t] : tensors) {
    header[name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.bytes.size()}}};
    data += t.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return safetensors(text, data);
}

// A copy of glm5-tiny's directory with changes.
struct Model {
  Json config = Json::parse(read_file(golden_dir("glm5-tiny") / "config.json"));
  Tensors tensors = read_tensors(golden_dir("glm5-tiny") / "model.safetensors");
  void write(const TempDir& dir) const {
    write_file(dir / "config.json", config.dump());
    write_file(dir / "model.safetensors", to_file(tensors));
  }
};

// The message of the E that `call` throws: one line, with all of `parts`.
template <class E = BadFile>
std::string refused(const std::function<void()>& call, std::initializer_list<std::string_view> parts) {
  try {
    call();
  } catch (const E& e) {
    const std::string message = e.what();
    EXPECT_EQ(message.find('\n'), message.npos) << message;
    for (const std::string_view part : parts)
      EXPECT_NE(message.find(part), message.npos) << "'" << part << "' in: " << message;
    return message;
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another exception: " << e.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace sievemla::test
