// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/refused.h -- a right call, broken in one way, is refused with the rule's words and nothing is written.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sievemla/backend.h"

namespace sievemla::test {

template <class Call>
struct Refusal {
  const char* name;
  const char* words;  // of the message
  void (*break_it)(Call&);
};

template <class Error, class Call, class Run>
void expect_refused(const std::vector<Backend>& backends, const Refusal<Call>& bad, Run&& run) {
  for (const Backend& backend : backends) {
    Call call;
    run(backend, call);  // right as it is
    Call wrong;
    bad.break_it(wrong);
    try {
      run(backend, wrong);
      ADD_FAILURE() << bad.name << " was accepted by " << backend.name();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(bad.words), std::string::npos) << bad.name << ": " << error.what();
    }
    EXPECT_TRUE(wrong.untouched()) << bad.name;
  }
}

}  // namespace sievemla::test
