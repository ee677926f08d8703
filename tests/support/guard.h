// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/guard.h -- a buffer between two guards: 4 KiB of 0xA5 before and after it, which nobody may write.
//
//   Guarded<float> out(tokens * heads, kNan);
//   call(..., tensor(out.data(), {tokens, heads}));
//   EXPECT_TRUE(out.intact());
#pragma once
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace sievemla::test {

template <class T>
class Guarded {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr std::byte kGuard{0xA5};

  // Every element starts as `fill`: poison it with what the call must overwrite.
  Guarded(std::int64_t n, T fill)
      : size_(static_cast<std::size_t>(n)), bytes_(2 * kGuardBytes + size_ * sizeof(T), kGuard) {
    for (std::size_t i = 0; i < size_; ++i) std::memcpy(bytes_.data() + kGuardBytes + i * sizeof(T), &fill, sizeof(T));
  }

  T* data() { return reinterpret_cast<T*>(bytes_.data() + kGuardBytes); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + kGuardBytes); }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }

  testing::AssertionResult intact() const {
    const std::size_t after = bytes_.size() - kGuardBytes;
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      if (bytes_[i] != kGuard)
        return testing::AssertionFailure() << "byte " << kGuardBytes - i << " before the buffer was written";
      if (bytes_[after + i] != kGuard) return testing::AssertionFailure() << "byte " << i << " after it was written";
    }
    return testing::AssertionSuccess();
  }

 private:
  std::size_t size_;
  std::vector<std::byte> bytes_;
};

}  // namespace sievemla::test
