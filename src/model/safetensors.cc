// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/safetensors.cc -- the header, rule by rule. It is read as a stream of events, so that no number or nesting
// in it decides how much memory is taken.
#include "model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "model/json.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

struct DTypeName {
  std::string_view name;
  DType dtype;
};
constexpr DTypeName kDTypes[] = {{"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}, {"I32", DType::i32},
                                 {"I64", DType::i64}, {"U8", DType::u8},   {"F8_E4M3", DType::u8}};

const DTypeName* known_dtype(std::string_view name) {
  for (const DTypeName& row : kDTypes)
    if (row.name == name) return &row;
  return nullptr;
}

struct Entry {
  std::string dtype;
  std::vector<std::uint64_t> shape, offsets;
  unsigned seen = 0;  // bits of kFields
};
constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};

// Takes the JSON events of a header. nlohmann calls the functions by these names; `false` would stop it silently, so
// every broken rule throws.
class HeaderReader {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}
  std::map<std::string, std::string> metadata;
  std::map<std::string, Entry, std::less<>> entries;

  bool start_object(std::size_t) {
    if (depth_ == 2 || in_array_) wrong("an object");
    ++depth_;
    return true;
  }
  bool end_object() {
    if (depth_ == 2 && entry_ && entry_->seen != 7) bad("a tensor has dtype, shape and data_offsets", "fewer");
    if (--depth_ == 1) entry_ = nullptr;
    return true;
  }
  bool key(std::string& text) {
    if (depth_ == 1) name_.clear();
    whole(text);
    if (depth_ == 1) {
      name_ = text;
      in_metadata_ = text == "__metadata__";
      if (in_metadata_ ? std::exchange(metadata_seen_, true) : entries.count(text) > 0)
        bad("a name must not occur twice", text);
      if (!in_metadata_) entry_ = &entries[text];
    } else if (in_metadata_) {
      if (!metadata.try_emplace(text).second) bad("a metadata key must not occur twice", text);
      field_ = text;
    } else {
      const auto* found = std::find(std::begin(kFields), std::end(kFields), text);
      if (found == std::end(kFields)) bad("a tensor has dtype, shape and data_offsets alone", "'" + text + "'");
      const unsigned bit = 1u << (found - std::begin(kFields));
      if (entry_->seen & bit) bad("a field must not occur twice", text);
      entry_->seen |= bit;
      field_ = text;
    }
    return true;
  }
  bool string(std::string& text) {
    whole(text);
    if (depth_ == 2 && in_metadata_) metadata[field_] = text;
    else if (depth_ == 2 && field_ == "dtype" && !in_array_) entry_->dtype = text;
    else wrong("a string");
    return true;
  }
  bool start_array(std::size_t) {
    if (depth_ != 2 || in_metadata_ || in_array_ || field_ == "dtype") wrong("an array");
    in_array_ = true;
    return true;
  }
  bool end_array() {
    in_array_ = false;
    if (field_ == "data_offsets" && entry_->offsets.size() != 2)
      bad("data_offsets must be [begin, end]", entry_->offsets.size(), " numbers");
    return true;
  }
  bool number_unsigned(std::uint64_t value) {
    if (!in_array_) wrong("a number");
    const bool shape = field_ == "shape";
    std::vector<std::uint64_t>& list = shape ? entry_->shape : entry_->offsets;
    if (list.size() == TensorView::kMaxRank)
      bad(shape ? "a shape has at most 4 extents" : "data_offsets must be [begin, end]", "more");
    list.push_back(value);
    return true;
  }
  bool number_integer(std::int64_t value) { bad("shape and data_offsets must not be negative", value); }
  bool number_float(double, const std::string& text) { bad("shape and data_offsets must be whole numbers", text); }
  bool null() { wrong("null"); }
  bool boolean(bool) { wrong("a boolean"); }
  bool binary(std::vector<std::uint8_t>&) { wrong("binary"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) {
    throw BadFile(error_message("the header must be valid JSON", file_, "an error at its byte ", position));
  }

 private:
  // A message that quotes a NUL would end there.
  void whole(const std::string& text) {
    if (const std::size_t nul = text.find('\0'); nul != text.npos)
      bad("names and strings must hold no NUL", "one behind '", text.substr(0, nul), "'");
  }
  template <class... Got>
  [[noreturn]] void bad(std::string_view rule, const Got&... got) {
    throw BadFile(error_message(rule, name_.empty() ? file_ + ": header" : file_ + ": tensor " + name_, got...));
  }
  [[noreturn]] void wrong(const char* got) {
    bad("the header must be {name: {dtype: string, shape: [..], data_offsets: [begin, end]}}", got);
  }

  const std::string& file_;
  int depth_ = 0;
  bool in_array_ = false, in_metadata_ = false, metadata_seen_ = false;
  std::string name_, field_;
  Entry* entry_ = nullptr;
};

}  // namespace

SafeTensors::SafeTensors(const std::filesystem::path& path)
    : name_(path.string()), file_(std::make_unique<MappedFile>(path)) {
  parse(file_->bytes());
}

SafeTensors::SafeTensors(std::string_view bytes, std::string name) : name_(std::move(name)) { parse(bytes); }

void SafeTensors::parse(std::string_view bytes) {
  const auto bad = [&](const std::string& tensor, std::string_view rule, const auto&... got) {
    throw BadFile(error_message(rule, tensor.empty() ? name_ : name_ + ": tensor " + tensor, got...));
  };
  std::uint64_t length = 0;
  if (bytes.size() < sizeof length) bad("", "a file starts with 8 bytes of header length", bytes.size(), " bytes");
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kMaxHeaderBytes) bad("", "a header has at most 100000000 bytes", length);
  if (length > bytes.size() - sizeof length)
    bad("", "the header must lie within the file", length, " bytes of header in a file of ", bytes.size());

  const std::string_view header = bytes.substr(sizeof length, length), data = bytes.substr(sizeof length + length);
  if (const std::size_t nul = header.find('\0'); nul != header.npos)  // where the parser would stop
    bad("", "the header must be valid JSON", "a NUL at its byte ", nul + 1);
  HeaderReader reader(name_);
  nlohmann::json::sax_parse(header, &reader);
  metadata_ = std::move(reader.metadata);

  struct Extent {
    std::uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Extent> extents;
  for (const auto& [name, entry] : reader.entries) {
    const std::uint64_t begin = entry.offsets[0], end = entry.offsets[1];
    if (begin > end || end > data.size())
      bad(name, "data_offsets must lie within the data", "[", begin, ", ", end, ") of ", data.size(), " bytes");
    extents.push_back({begin, end, &name});
    const char* from = data.data() + begin;

    const DTypeName* known = known_dtype(entry.dtype);
    if (!known) {
      const auto* first = reinterpret_cast<const std::uint8_t*>(from);
      tensors_.emplace(name,
                       StoredTensor{entry.dtype, sievemla::tensor(first, {static_cast<std::int64_t>(end - begin)})});
      continue;
    }
    std::int64_t size = size_of(known->dtype), widest = size;  // `widest` counts an empty extent as 1: strides fit too
    bool fits = true;
    TensorView view;
    view.dtype = known->dtype;
    view.rank = entry.shape.empty() ? 1 : static_cast<int>(entry.shape.size());
    view.shape[0] = 1;
    for (std::size_t d = 0; d < entry.shape.size(); ++d) {
      fits &= !__builtin_mul_overflow(entry.shape[d], std::int64_t{1}, &view.shape[d]);
      fits &= !__builtin_mul_overflow(widest, std::max<std::int64_t>(view.shape[d], 1), &widest);
      size = fits ? size * view.shape[d] : 0;
    }
    if (!fits) bad(name, "the size of a tensor must fit 63 bits", "an overflow");
    std::int64_t step = 1;
    for (int d = view.rank; d-- > 0; step *= view.dim(d)) view.stride[static_cast<std::size_t>(d)] = step;

    if (end - begin != static_cast<std::uint64_t>(size))
      bad(name, "data_offsets must span shape times dtype", end - begin, " bytes, not ", size);
    if (size > 0 && reinterpret_cast<std::uintptr_t>(from) % static_cast<std::uintptr_t>(size_of(view.dtype)) != 0) {
      aligned_.push_back(std::make_unique<std::byte[]>(static_cast<std::size_t>(size)));
      std::memcpy(aligned_.back().get(), from, static_cast<std::size_t>(size));
      from = reinterpret_cast<const char*>(aligned_.back().get());
    }
    view.data = const_cast<char*>(from);
    tensors_.emplace(name, StoredTensor{entry.dtype, view});
  }

  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t at = 0;
  for (const Extent& e : extents) {
    if (e.begin < at)
      bad(*e.name, "tensors must not overlap", "begin ", e.begin, " before the end ", at, " of another");
    if (e.begin > at) bad(*e.name, "tensors must leave no hole", "begin ", e.begin, " after the end ", at);
    at = e.end;
  }
  if (at != data.size()) bad("", "the tensors must fill the file", at, " of ", data.size(), " bytes");
}

std::vector<std::string> SafeTensors::names() const {
  std::vector<std::string> all;
  for (const auto& [name, tensor] : tensors_) all.push_back(name);
  return all;
}

const StoredTensor* SafeTensors::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const StoredTensor& SafeTensors::tensor(std::string_view name) const {
  const StoredTensor* found = find(name);
  const std::string where = name_ + ": tensor " + std::string(name);
  if (!found) throw BadFile(error_message("the file must have this tensor", where, "none"));
  if (!known_dtype(found->dtype))
    throw BadFile(
        error_message("a dtype is one of F32, F16, BF16, I32, I64, U8, F8_E4M3", where, "'", found->dtype, "'"));
  return *found;
}

TensorView SafeTensors::tensor(std::string_view name, DType dtype, std::initializer_list<std::int64_t> shape) const {
  const TensorView& view = tensor(name).view;
  check_tensor(view, dtype, shape, name_ + ": tensor " + std::string(name));
  return view;
}

void check_tensor(const TensorView& view, std::optional<DType> dtype, std::initializer_list<std::int64_t> shape,
                  const std::string& where) {
  if (dtype && view.dtype != *dtype)
    throw BadFile(error_message(std::string("the dtype must be ") + name_of(*dtype), where, name_of(view.dtype)));
  const auto text = [](const auto* extents, std::size_t n) {
    std::string out = "[";
    for (std::size_t i = 0; i < n; ++i) out += (i ? ", " : "") + std::to_string(extents[i]);
    return out + "]";
  };
  const std::size_t rank = static_cast<std::size_t>(view.rank);
  if (rank != shape.size() || !std::equal(shape.begin(), shape.end(), view.shape.begin()))
    throw BadFile(
        error_message("the shape must be " + text(shape.begin(), shape.size()), where, text(view.shape.data(), rank)));
}

}  // namespace sievemla::model
