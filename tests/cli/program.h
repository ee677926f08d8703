// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/program.h -- runs the built program, as a shell would.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "model/files.h"

namespace sievemla::test {

struct Outcome {
  int status;  // exit status, or -signal
  std::string out, err;
};

// Where stdout goes.
enum class Stdout { captured, closed, full, pipe_without_reader };

// `meanwhile` gets the process while it runs.
inline Outcome run_program(const std::vector<std::string>& arguments, Stdout kind = Stdout::captured,
                           const std::function<void(pid_t)>& meanwhile = {}) {
  const TempDir dir;
  const fs::path out = dir / "out", err = dir / "err";
  int pipe_ends[2];
  if (kind == Stdout::pipe_without_reader && (pipe(pipe_ends) != 0 || close(pipe_ends[0]) != 0))
    return {-1, "", "pipe"};
  std::vector<char*> argv = {const_cast<char*>("sievemla")};
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);

  const pid_t child = fork();
  if (child == 0) {
    alarm(300);  // survives the exec: a program that hangs is a failure, not a hanging test
    const auto onto = [](int fd, int target) {
      if (fd == target) return;
      dup2(fd, target);
      close(fd);
    };
    onto(open(err.c_str(), O_WRONLY | O_CREAT, 0600),
         2);  // first: what is opened after closing stdout takes its number
    switch (kind) {
      case Stdout::captured: onto(open(out.c_str(), O_WRONLY | O_CREAT, 0600), 1); break;
      case Stdout::closed: close(1); break;
      case Stdout::full: onto(open("/dev/full", O_WRONLY), 1); break;
      case Stdout::pipe_without_reader: onto(pipe_ends[1], 1); break;
    }
    execv(SIEVEMLA_PROGRAM, argv.data());
    _exit(127);
  }
  if (kind == Stdout::pipe_without_reader) close(pipe_ends[1]);
  if (meanwhile) meanwhile(child);
  int status = 0;
  waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_file(out), read_file(err)};
}

// "sievemla: <rule>: got <x> (<where>)", on one line.
inline testing::AssertionResult is_complaint(const std::string& err) {
  const bool good = err.rfind("sievemla: ", 0) == 0 && err.find('\n') == err.size() - 1 &&
                    err.find(": got ") != err.npos && err.size() >= 3 && err.compare(err.size() - 2, 2, ")\n") == 0;
  return good ? testing::AssertionSuccess() : testing::AssertionFailure() << "not one complaint on one line: " << err;
}

// The program fails with `status`, says why in one line that has all of `parts`, and nothing else.
inline void expect_failure(const std::vector<std::string>& arguments, int status,
                           const std::vector<std::string>& parts = {}) {
  std::string line;
  for (const std::string& a : arguments) line += " " + a;
  SCOPED_TRACE("sievemla" + line);
  const Outcome outcome = run_program(arguments);
  EXPECT_EQ(outcome.status, status) << outcome.err;
  EXPECT_TRUE(is_complaint(outcome.err));
  for (const std::string& part : parts)
    EXPECT_NE(outcome.err.find(part), std::string::npos) << part << " in " << outcome.err;
  if (status != 1) {
    EXPECT_EQ(outcome.out, "");
  }
}

// What the program prints as JSON with exit status `status`; null if it does not.
inline Json json_of(const std::vector<std::string>& arguments, const std::string& kind, int status = 0) {
  const Outcome outcome = run_program(arguments);
  EXPECT_EQ(outcome.status, status) << outcome.err;
  Json json = Json::parse(outcome.out, nullptr, false);
  if (json.is_discarded()) {
    ADD_FAILURE() << "no JSON: " << outcome.out.substr(0, 200);
    return {};
  }
  EXPECT_EQ(json.value("schema", 0), 1);
  EXPECT_EQ(json.value("kind", ""), kind);
  EXPECT_FALSE(json.value("version", "").empty());
  EXPECT_FALSE(json.value("commit", "").empty());
  return json;
}

// "trace-glm5/trace.safetensors" as a path.
inline std::string golden(const std::string& name) { return (fs::path(SIEVEMLA_GOLDEN_DIR) / name).string(); }

}  // namespace sievemla::test
