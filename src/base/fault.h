// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/base/fault.h -- known mistakes, made on purpose: tests prove that a check which passes would have caught them.
//
// Only the test library `sievemla_faulty` is built with SIEVEMLA_FAULTS=1; elsewhere `fault()` is a constant false.
#pragma once

namespace sievemla::base {

enum class Fault {
  none,
  indexer_rope_style,    // the other style than the model's
  indexer_rope_last_64,  // rotates the last 64 of 128 instead of the first
  attention_rope_style,  // half-split instead of interleaved
  k_norm_without_mean,
  k_norm_without_bias,
  no_relu,
  dense,  // attends to every visible position
  no_yarn,
  no_mscale,
  no_expert_groups,
  latent_norm_eps,  // 1e-5 in the norms of q_a and kv_a, where Hugging Face has 1e-6
};

#if defined(SIEVEMLA_FAULTS) && SIEVEMLA_FAULTS
inline Fault active_fault = Fault::none;  // set by a test before it runs; not thread-safe
inline bool fault(Fault f) { return active_fault == f; }
#else
constexpr bool fault(Fault) { return false; }
#endif

}  // namespace sievemla::base
