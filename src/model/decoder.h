// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/decoder.h -- a small decoder for one sequence: the four stages inside a whole model, over a paged cache.
//
//   embed -> [ norm -> attention block -> + -> norm -> MLP or experts -> + ] x layers -> norm -> lm_head
//   attention block:  projections -> write -> indexer -> topk -> attention [ -> combine ] -> projections
//                                                                              (sievemla/pipeline.h, combine.h)
//
// MLA is absorbed: q_nope goes through the key half of kv_b_proj into latent space, the attention's output through the
// value half. Physical pages lie in a scrambled order, so that a mistake with pages shows.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/safetensors.h"
#include "sievemla/combine.h"
#include "sievemla/pipeline.h"

namespace sievemla::model {

// Which eps the RMSNorms behind q_a_proj and kv_a_proj_with_mqa use. Transformers has 1e-6 there whatever the
// config says; serving engines use the config's rms_norm_eps.
enum class NormEps : std::uint8_t { config, hf };

struct DecoderOptions {
  Backend backend = Backend::cpu();
  KvFormat kv_format = KvFormat::f32;
  IndexFormat index_format = IndexFormat::f32;
  NormEps norm_eps = NormEps::config;
  std::int64_t page_size = 64;
  std::int64_t chunk = 0;          // rows of a prefill that go through together, 0 = all
  std::int64_t max_tokens = 4096;  // room in the cache
  // Decode-context-parallel ranks, all simulated here, 1 to 64. Each holds the latent rows of its Shard (interleave 1)
  // in pages of its own and attends to those alone; combine() merges. Indexer keys and the selection are whole.
  int ranks = 1;
};

// The stages whose time is taken.
enum class Stage : std::uint8_t { write, indexer, topk, attention, combine };
inline constexpr std::array<std::string_view, 5> kStageNames = {"write", "indexer", "topk", "attention", "combine"};

// The calls of one attention block.
struct BlockCalls {
  std::vector<SparseLayerArgs> ranks;  // each writes and attends to its own rows; the indexer of the first is for all
  std::optional<CombineArgs> combine;  // of what they give; absent with one rank
  TensorView attention_out;            // [rows, heads, latent] f32, of all rows
};

// What one layer's attention block did with one chunk of rows. Views live during the call.
struct BlockTrace {
  int layer;
  std::int64_t first;       // position of the first row
  TensorView input;         // [rows, hidden] f32, after input_layernorm
  TensorView output;        // [rows, hidden] f32, before the residual is added
  TensorView positions;     // [rows, k] i32, ascending, then -1; k = min(index_topk, max_tokens)
  TensorView scores;        // [rows, first + rows] f32, -inf where not visible; absent on layers that share, and
                            // unless Observer::scores
  const BlockCalls& calls;  // as they ran
  std::array<double, kStageNames.size()> us;  // by Stage
};

struct Observer {
  std::function<void(const BlockTrace&)> block;
  bool scores = false;  // keep the scores: memory for rows x context
};

class Decoder {
 public:
  // Checks every tensor of the checkpoint, which must outlive this. BadFile: missing, extra, wrong dtype or shape, not
  // finite. Unsupported: sizes or formats that no kernel of the backend serves.
  Decoder(const Config& config, const Checkpoint& checkpoint, const DecoderOptions& options);
  Decoder(Decoder&&) noexcept;
  ~Decoder();

  enum class Logits : std::uint8_t { last, all };
  // Feeds tokens at positions length() .. and returns logits [vocab] of the last, or [ids, vocab] of all.
  // InvalidArgument: an id outside the vocabulary, no ids, or more than fit.
  std::vector<float> forward(std::span<const std::int32_t> ids, Logits logits = Logits::last,
                             const Observer& observer = {});
  std::int64_t length() const;
  void reset();  // to an empty sequence

  // The attention block of one layer alone, on `input` [rows, hidden] f32 at positions 0 .. rows - 1, in a sequence of
  // its own (so this resets). With `positions` [rows, <= k] i32 that selection is used instead of the block's own.
  // Returns the output [rows, hidden].
  std::vector<float> attention_block(int layer, const TensorView& input, const TensorView& positions,
                                     const Observer& observer = {});
  // The block's last step: [rows, heads, latent] f32 -> [rows, hidden], by the given backend's arithmetic.
  std::vector<float> project_output(const Backend& backend, int layer, const TensorView& attention_out) const;

  const Config& config() const;
  const DecoderOptions& options() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The id of the largest logit, ties to the lowest id. NaN is below everything.
std::int32_t greedy(std::span<const float> logits);

struct GenerateOptions {
  std::int64_t tokens = 16;
  bool ignore_eos = false;
  Observer observer{};
  std::function<void(std::int32_t)> on_token{};  // each token as it comes
};
struct Generated {
  std::vector<std::int32_t> tokens;  // an end-of-text token is the last of them
  std::vector<double> logprobs;      // of each token: log-softmax over the vocabulary
  double prefill_us = 0, decode_us = 0;
  double tokens_per_s = 0;  // of the decode steps; 0 if there was none
};
// Greedy continuation of `prompt`. The decoder is reset first.
Generated generate(Decoder& decoder, std::span<const std::int32_t> prompt, const GenerateOptions& options);

}  // namespace sievemla::model
