// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/verify.h -- every kernel that runs here against its stage's reference kernel, over seeded shapes.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/kernel_lists.h"
#include "sievemla/backend.h"

namespace sievemla::cli {

struct VerifyOptions {
  std::vector<Backend> backends;                 // whose kernels are checked
  std::uint64_t seed = 1;                        // of the first case; case i has seed + i
  int cases = 24;                                // a function
  std::filesystem::path trace_dir;               // where a failing case is written, empty = nowhere
  std::function<void(std::string_view)> step{};  // after each case, with the function's name
};

// What became of one kernel.
struct Verdict {
  std::string stage, kernel, backend;
  int cases = 0;                      // that it ran
  int unserved = 0;                   // that it does not serve
  double worst = 0;                   // largest error over bound: above 1 is a mismatch
  std::vector<double> shares;         // that of each compared output
  std::vector<std::string> failures;  // "<rule>: got <x> (<where>)"
  std::vector<std::string> traces;    // files written
};

std::vector<Verdict> verify_attention(std::span<const stage::attention::AttentionKernel> kernels,
                                      const VerifyOptions& options);
std::vector<Verdict> verify_index_scores(std::span<const stage::indexer::IndexScoresKernel> kernels,
                                         const VerifyOptions& options);
// All stages of this build.
std::vector<Verdict> verify_all(const VerifyOptions& options);

// Stages together, with a top-k of at least the context: three verdicts a backend. All rows have to be selected (else
// the selection is at fault), dense attention has to match the reference (else the attention), and sparse attention the
// dense (else its row source).
std::vector<Verdict> verify_bisect(const VerifyOptions& options);

}  // namespace sievemla::cli
