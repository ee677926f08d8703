// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/error.h -- everything the library throws. It never prints, aborts or exits.
//
// The type says who is at fault; the message reads "<rule>: got <value> (<where>)".
#pragma once
#include <array>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sievemla {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The call is wrong. Nothing was written. (Python: ValueError)
struct InvalidArgument : Error {
  using Error::Error;
};

// A file breaks its format: the message names file, byte or tensor, and the rule.
struct BadFile : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

// The call is right, but no kernel here serves it: the message lists each candidate kernel and the first thing it
// lacks. (Python: NotImplementedError)
struct Unsupported : Error {
  using Error::Error;
};

// The device or its driver refused. (Python: RuntimeError)
struct DeviceError : Error {
  using Error::Error;
};

// Where a value stands, in up to four pieces that are joined only when a message is made: a good call allocates
// nothing. It keeps views, so the pieces have to outlive it.
class Where {
 public:
  constexpr Where(const char* piece) : pieces_{piece} {}
  constexpr Where(std::string_view piece) : pieces_{piece} {}
  Where(const std::string& piece) : pieces_{piece} {}

  constexpr Where operator+(std::string_view piece) const {
    Where longer = *this;
    for (std::string_view& free : longer.pieces_) {
      if (!free.empty()) continue;
      free = piece;
      break;
    }
    return longer;
  }
  constexpr bool empty() const { return pieces_[0].empty(); }
  friend std::ostream& operator<<(std::ostream& out, const Where& where) {
    for (const std::string_view piece : where.pieces_) out << piece;
    return out;
  }

 private:
  std::array<std::string_view, 4> pieces_;
};

// "<rule>: got <got...> (<where>)"
template <class... Got>
std::string error_message(std::string_view rule, const Where& where, const Got&... got) {
  std::ostringstream text;
  text << rule << ": got ";
  (text << ... << got);
  text << " (" << where << ')';
  return text.str();
}

// Throws InvalidArgument("<rule>: got <got...> (<where>)") unless `ok`. Host code only, before any launch.
template <class... Got>
void expects(bool ok, std::string_view rule, const Where& where, const Got&... got) {
  if (!ok) throw InvalidArgument(error_message(rule, where, got...));
}

}  // namespace sievemla
