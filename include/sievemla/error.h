// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/error.h -- everything the library throws. It never prints, aborts or exits.
//
// The type says who is at fault; the message reads "<rule>: got <value> (<where>)".
#pragma once
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

// "<rule>: got <got...> (<where>)"
template <class... Got>
std::string error_message(std::string_view rule, std::string_view where, const Got&... got) {
  std::ostringstream text;
  text << rule << ": got ";
  (text << ... << got);
  text << " (" << where << ')';
  return text.str();
}

// Throws InvalidArgument("<rule>: got <got...> (<where>)") unless `ok`. Host code only, before any launch.
template <class... Got>
void expects(bool ok, std::string_view rule, std::string_view where, const Got&... got) {
  if (!ok) throw InvalidArgument(error_message(rule, where, got...));
}

}  // namespace sievemla
