// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/inputs.h -- seeded inputs for verify and bench. Memory that no call may read holds NaN.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <random>
#include <span>
#include <vector>

#include "sievemla/kv_format.h"
#include "sievemla/tensor.h"

namespace sievemla::cli {

// Bytes of a tensor that nothing has written: NaN as f32, bf16 and e4m3, -1 as an integer.
inline constexpr std::byte kPoison{0xFF};
void poison(const TensorView& contiguous);

// Makes tensors and owns their memory. The same seed and the same calls give the same tensors.
class Inputs {
 public:
  explicit Inputs(std::uint64_t seed) : random_(seed) {}

  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<std::int64_t>(choices.size()))];
  }

  TensorView poisoned(DType dtype, std::initializer_list<std::int64_t> shape);
  TensorView normal(DType dtype, std::initializer_list<std::int64_t> shape, float deviation);  // f32, bf16, u8 = e4m3
  TensorView ints(std::span<const std::int64_t> values, std::initializer_list<std::int64_t> shape,
                  DType dtype = DType::i32);
  std::vector<std::int64_t> distinct(std::int64_t n, std::int64_t limit);  // n different numbers below limit, shuffled

  // [requests, widest] i32: a physical page of its own for every page that `lengths` needs, shuffled, then -1.
  TensorView block_table(std::span<const std::int64_t> lengths, std::int64_t page_size);

  // Caches with normal values in `slots`, and poison everywhere else.
  KvCache kv_cache(KvFormat format, int latent, int rope, std::int64_t pages, std::int64_t page_size,
                   std::span<const std::int64_t> slots);
  IndexCache index_cache(IndexFormat format, std::int64_t pages, std::int64_t page_size,
                         std::span<const std::int64_t> slots);

 private:
  void* memory(std::int64_t bytes);
  void draw_codes(void* to, std::int64_t n, const std::array<std::byte, 256>& codes);

  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  std::vector<std::int64_t> numbers_;  // that distinct() draws from
  std::deque<std::vector<std::byte>> memory_;
};

// The slots of positions 0 .. lengths[r] - 1 of every request.
std::vector<std::int64_t> slots_of(const TensorView& block_table, std::span<const std::int64_t> lengths,
                                   std::int64_t page_size);

// view[first, first + count) of the first dimension.
TensorView narrow(TensorView view, std::int64_t first, std::int64_t count);

}  // namespace sievemla::cli
