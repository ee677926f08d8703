// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/deadline.h -- ends the program if its scope takes too long: a call that hangs never comes back to fail
// its test.
//
//   { const Deadline deadline(std::chrono::seconds(10), "call 7"); call(7); }
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

namespace sievemla::test {

class Deadline {
 public:
  Deadline(std::chrono::seconds limit, std::string what)
      : watcher_([this, limit, text = std::move(what)] {
          std::unique_lock lock(mutex_);
          if (done_.wait_for(lock, limit, [this] { return over_; })) return;
          std::fprintf(stderr, "%s: not done after %lld s\n", text.c_str(), static_cast<long long>(limit.count()));
          std::_Exit(EXIT_FAILURE);
        }) {}
  ~Deadline() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    done_.notify_one();
    watcher_.join();
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread watcher_;  // last: it uses the others
};

}  // namespace sievemla::test
