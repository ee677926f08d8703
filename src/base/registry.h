// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/registry.h -- a stage's kernels as data: one row each, best first. Dispatch, info, verify, bench and tests
// all read the same rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <type_traits>

#include "sievemla/backend.h"
#include "sievemla/error.h"

namespace sievemla::base {

// What a kernel runs with, beside its arguments.
struct Exec {
  const Backend& backend;
  Workspace workspace;  // at least workspace_bytes of the kernel; its contents are undefined on entry
  Stream stream;
};

struct NoBounds {};

using Lack = Where;  // what a kernel lacks, in pieces that are joined only in a message; empty = nothing

template <class Args, class Bounds = NoBounds>
struct Kernel {
  const char* name;  // unique in the program: "<function>_<backend>[_<isa or arch>]"
  BackendKind backend;
  const char* needs;    // what the machine must have, in words; "" = nothing special
  bool (*runs_here)();  // null = always
  // The first thing in the (already checked) arguments that this kernel cannot do, in words; "" = serves them. Null =
  // serves all.
  Lack (*lacks)(const Args&);
  void (*run)(const Args&, const Exec&);
  std::int64_t (*workspace_bytes)(const Backend&, const Bounds&);  // null = none
  // How far its outputs may lie from the reference's (base/compare.h), where its arithmetic is coarser than what is
  // usual on its backend.
  double error = 0;
};

// What keeps a row from serving the call.
template <class Args, class Bounds>
Lack lack_of(const Kernel<Args, Bounds>& row, const Args& args) {
  if (row.runs_here && !row.runs_here()) return Lack("this machine lacks ") + row.needs;
  return row.lacks ? row.lacks(args) : Lack("");
}

// The first row of the backend that runs here and serves the arguments, or null. Allocates nothing.
template <class Args, class Bounds>
const Kernel<Args, Bounds>* first_serving(std::span<const Kernel<Args, Bounds>> rows, const Backend& backend,
                                          const std::type_identity_t<Args>& args) {
  for (const auto& row : rows)
    if (row.backend == backend.kind() && lack_of(row, args).empty()) return &row;
  return nullptr;
}

// The same, else Unsupported with each row's reason. Nothing is allocated unless it throws.
template <class Args, class Bounds>
const Kernel<Args, Bounds>& pick(std::span<const Kernel<Args, Bounds>> rows, const Backend& backend, const Args& args,
                                 const char* where) {
  if (const auto* row = first_serving(rows, backend, args)) return *row;
  std::ostringstream reasons;
  for (const auto& row : rows)
    if (row.backend == backend.kind())
      reasons << (reasons.tellp() > 0 ? "; " : "") << row.name << ": " << lack_of(row, args);
  if (reasons.tellp() <= 0) reasons << "no kernel in this build";
  throw Unsupported(error_message("a kernel must serve the call on backend " + backend.name(), where, reasons.str()));
}

// Enough for whichever row is picked.
template <class Args, class Bounds>
std::int64_t workspace_bytes(std::span<const Kernel<Args, Bounds>> rows, const Backend& backend, const Bounds& bounds) {
  std::int64_t most = 0;
  for (const auto& row : rows)
    if (row.backend == backend.kind() && row.workspace_bytes && (!row.runs_here || row.runs_here()))
      most = std::max(most, row.workspace_bytes(backend, bounds));
  return most;
}

}  // namespace sievemla::base
