// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cpu/threads_test.cc -- parallel_for in a child of fork(), which has none of its parent's OpenMP threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "cpu/threads.h"

namespace sievemla::test {
namespace {

bool calls_each_once(const Backend& backend) {
  std::array<int, 100> calls{};
  cpu::parallel_for(backend, 100, [&](std::int64_t i, int worker) {
    calls[static_cast<std::size_t>(i)] += worker >= 0 && worker < backend.threads();
  });
  for (const int n : calls)
    if (n != 1) return false;
  return true;
}

// Its exit status; a child that hangs is ended by its alarm, and has none.
template <class F>
int status_of_child(F&& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    _exit(child() ? 0 : 1);
  }
  int status = 0;
  return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Threads, AForkedChildDoesNotWaitForItsParents) {
#ifdef __has_feature
#if __has_feature(thread_sanitizer)
  GTEST_SKIP() << "the sanitizer ends a child that has threads";
#endif
#endif
  const Backend backend = Backend::cpu({4, {}});
  EXPECT_TRUE(calls_each_once(backend));
  EXPECT_EQ(status_of_child([&] { return calls_each_once(backend) && calls_each_once(backend); }), 0);
  EXPECT_EQ(status_of_child([&] { return status_of_child([&] { return calls_each_once(backend); }) == 0; }), 0);
#ifndef __aarch64__                // qemu-user makes no threads in a child
  EXPECT_EQ(status_of_child([&] {  // a new thread may have threads of its own
              bool good = false;
              std::thread([&] { good = calls_each_once(backend); }).join();
              return good && calls_each_once(backend);
            }),
            0);
#endif
  EXPECT_TRUE(calls_each_once(backend));
}

}  // namespace
}  // namespace sievemla::test
