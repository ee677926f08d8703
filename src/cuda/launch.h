// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/launch.h -- small things that host launch code shares. Plain C++: kernels' plans are tested without CUDA.
#pragma once
#include <array>
#include <cstdint>

namespace sievemla::cuda {

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Whether kernels of a config can be launched while the ones before them run (programmatic dependent launch).
constexpr bool starts_early(int sm) { return sm >= 90; }

// How many clusters of 1 .. 8 CTAs run at a time, with a CTA a multiprocessor; [0] is nothing. A cluster stays within a
// part of the GPU, and a share of a GPU (MIG, MPS) may hold none.
using ClusterCounts = std::array<int, 9>;
inline constexpr ClusterCounts kH200Clusters = {0, 132, 66, 39, 30, 22, 17, 15, 15};

// Tickets lie at the front of a workspace, apart from data; each stage has its own. workspace_init zeroes them, and the
// last to arrive at one resets it.
inline constexpr int kAttentionTickets = 8192, kTopkTickets = 64;
inline constexpr int kFirstTopkTicket = kAttentionTickets;
inline constexpr std::int64_t kTicketBytes = 4 * std::int64_t{kAttentionTickets + kTopkTickets};

}  // namespace sievemla::cuda
