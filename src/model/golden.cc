// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/golden.cc -- end to end where the arithmetic is the golden's; block by block where it is not.
#include "model/golden.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "base/compare.h"
#include "base/view.h"
#include "model/json.h"
#include "model/memory.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

std::span<const float> floats(const TensorView& view) {
  return {static_cast<const float*>(view.data), static_cast<std::size_t>(view.elements())};
}

std::vector<std::int32_t> token_ids(const SafeTensors& file, std::string_view name, const Config& config) {
  const TensorView& view = file.tensor(name).view;
  const std::string where = file.name() + ": tensor " + std::string(name);
  check_tensor(view, DType::i32, {view.dim(0)}, where);
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < view.dim(0); ++i) {
    ids.push_back(*base::at<std::int32_t>(view, i));
    if (ids[static_cast<std::size_t>(i)] < 0 || ids[static_cast<std::size_t>(i)] >= config.vocab)
      throw BadFile(
          error_message("an id lies in the vocabulary of " + std::to_string(config.vocab), where, ids.back()));
  }
  if (ids.empty()) throw BadFile(error_message("a golden has a prompt and generated tokens", where, "none"));
  return ids;
}

Tolerance load_tolerance(const std::filesystem::path& path) {
  Tolerance tolerance;
  std::error_code error;
  if (std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::not_found) return tolerance;
  const nlohmann::json meta = load_json(path);
  const auto given = meta.is_object() ? meta.find("verified_tolerance") : meta.end();
  if (!meta.is_object() || given == meta.end()) return tolerance;
  struct Field {
    const char* key;
    double Tolerance::* member;
  };
  for (const Field& field : {Field{"attn_output", &Tolerance::attn_output},
                             Field{"index_scores", &Tolerance::index_scores}, Field{"logits", &Tolerance::logits}}) {
    const nlohmann::json value = given->is_object() ? given->value(field.key, nlohmann::json()) : nlohmann::json();
    if (!value.is_number() || !(value.get<double>() > 0 && value.get<double>() < 1))
      throw BadFile(error_message("a tolerance is a number between 0 and 1",
                                  path.string() + ": verified_tolerance." + field.key, shown(value)));
    tolerance.*(field.member) = value.get<double>();
  }
  return tolerance;
}

// What the check gathers of one layer, over all chunks.
struct Seen {
  std::vector<float> output;           // [rows, hidden]
  std::vector<float> scores;           // [rows, rows], -inf where not seen
  std::vector<std::int32_t> selected;  // [rows, index_topk], -1 where there is none
  std::vector<bool> too_wide;          // [rows] selected more than index_topk
  double combine_error = 0;
  decltype(BlockTrace::us) us{};
};

// As the reference takes it: the decoder's tensors lie at addresses of the host, whatever the backend.
TensorView on_host(TensorView view) {
  view.device = {};
  return view;
}

// What the block's ranks gave, merged in double.
std::vector<float> merged(const CombineArgs& parts) {
  std::vector<float> out(static_cast<std::size_t>(parts.out.elements()));
  combine(Backend::reference(), {.partial_out = on_host(parts.partial_out),
                                 .partial_lse = on_host(parts.partial_lse),
                                 .sink = {},
                                 .out = tensor(out.data(), {parts.out.dim(0), parts.out.dim(1), parts.out.dim(2)}),
                                 .lse = {}});
  return out;
}
double combine_error(const BlockCalls& calls) {
  return base::relative_error(floats(calls.attention_out), merged(*calls.combine));
}

void gather(const BlockTrace& trace, std::int64_t rows, std::int64_t topk, Seen& seen) {
  const std::span<const float> output = floats(trace.output);
  seen.output.insert(seen.output.end(), output.begin(), output.end());
  for (std::size_t i = 0; i < seen.us.size(); ++i) seen.us[i] += trace.us[i];
  if (trace.calls.combine) seen.combine_error = std::max(seen.combine_error, combine_error(trace.calls));
  for (std::int64_t t = 0; t < trace.positions.dim(0); ++t) {
    bool too_wide = false;
    for (std::int64_t k = 0; k < std::max(topk, trace.positions.dim(1)); ++k) {
      const std::int32_t id = k < trace.positions.dim(1) ? *base::at<std::int32_t>(trace.positions, t, k) : -1;
      if (k < topk) seen.selected.push_back(id);
      else too_wide |= id >= 0;
    }
    seen.too_wide.push_back(too_wide);
    if (!trace.scores) continue;
    const float* row = base::at<float>(trace.scores, t);
    seen.scores.insert(seen.scores.end(), row, row + trace.scores.dim(1));
    seen.scores.resize(static_cast<std::size_t>((trace.first + t + 1) * rows), -INFINITY);
  }
}

double share_of_different_rows(const Seen& seen, const TensorView& want) {
  const std::int64_t rows = want.dim(0), k = want.dim(1);
  std::int64_t different = 0;
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int32_t* got = seen.selected.data() + t * k;
    different +=
        seen.too_wide[static_cast<std::size_t>(t)] || !std::equal(got, got + k, base::at<std::int32_t>(want, t));
  }
  return static_cast<double>(different) / static_cast<double>(rows);
}

class Check {
 public:
  Check(const Config& config, const Checkpoint& checkpoint, const Golden& golden, const DecoderOptions& options)
      : golden_(golden), decoder_(config, checkpoint, options) {}

  CheckReport run() {
    const DecoderOptions& options = decoder_.options();
    report_.tokens_judged = options.kv_format == KvFormat::f32 && options.index_format == IndexFormat::f32;
    if (report_.tokens_judged) {
      end_to_end();
    } else {
      for (int l = 0; l < static_cast<int>(golden_.layers.size()); ++l) block(l);
      feed({});
    }
    return std::move(report_);
  }

 private:
  void add(int layer, std::string stage, double error, double bound, double us) {
    const bool passed = error <= bound;
    if (!passed)
      report_.failures.push_back(error_message(
          "the error must be at most " + number(bound),
          (layer < 0 ? std::string("the model") : "layer " + std::to_string(layer)) + ": " + stage, number(error)));
    report_.rows.push_back({layer, std::move(stage), error, bound, us, passed});
  }
  static std::string number(double x) {
    std::ostringstream text;
    text.precision(3);
    text << x;
    return text.str();
  }

  // Prefill and decode with the golden's tokens; returns the logits that the golden has.
  std::vector<float> feed(const Observer& observer) {
    const std::size_t vocab = static_cast<std::size_t>(decoder_.config().vocab);
    decoder_.reset();
    const std::vector<float> prefill = decoder_.forward(golden_.prompt, Decoder::Logits::all, observer);
    const std::size_t steps = golden_.generated.size() - 1;
    const std::size_t kept = golden_.logits.size() - steps * vocab;  // of the prefill
    std::vector<float> logits(prefill.end() - static_cast<std::ptrdiff_t>(kept), prefill.end());
    const auto choose = [&] {
      report_.tokens.push_back(greedy(std::span(logits).last(vocab)));
      report_.tokens_equal += report_.tokens.back() == golden_.generated[report_.tokens.size() - 1];
    };
    choose();
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < steps; ++i) {
      const std::vector<float> step =
          decoder_.forward(std::span(&golden_.generated[i], 1), Decoder::Logits::last, observer);
      logits.insert(logits.end(), step.begin(), step.end());
      choose();
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (steps > 0) report_.tokens_per_s = static_cast<double>(steps) / seconds.count();
    return logits;
  }

  void end_to_end() {
    const std::int64_t rows = golden_.rows(), topk = decoder_.config().index_topk;
    std::vector<Seen> seen(golden_.layers.size());
    const Observer observer{
        .block =
            [&](const BlockTrace& trace) { gather(trace, rows, topk, seen[static_cast<std::size_t>(trace.layer)]); },
        .scores = true};
    const std::vector<float> logits = feed(observer);

    for (std::size_t l = 0; l < seen.size(); ++l) {
      const Golden::Layer& want = golden_.layers[l];
      const int layer = static_cast<int>(l);
      const auto us = [&](Stage stage) { return seen[l].us[static_cast<std::size_t>(stage)]; };
      if (want.index_scores)
        add(layer, "indexer",
            base::relative_error(std::span<const float>(seen[l].scores).last(floats(want.index_scores).size()),
                                 floats(want.index_scores)),
            golden_.tolerance.index_scores, us(Stage::indexer));
      add(layer, "topk", share_of_different_rows(seen[l], want.topk), 0, us(Stage::topk));
      add(layer, "attention", base::relative_error(seen[l].output, floats(want.attn_output)),
          golden_.tolerance.attn_output, us(Stage::write) + us(Stage::attention));
      if (decoder_.options().ranks > 1)
        add(layer, "combine", seen[l].combine_error, golden_.tolerance.attn_output, us(Stage::combine));
    }
    add(-1, "logits", base::relative_error(logits, golden_.logits), golden_.tolerance.logits, 0);
    const std::int64_t tokens = static_cast<std::int64_t>(golden_.generated.size());
    if (report_.tokens_equal != tokens)
      report_.failures.push_back(
          error_message("all " + std::to_string(tokens) + " tokens must be equal", "the model", report_.tokens_equal));
  }

  // One block on the golden's input and selection, against double on the bytes that lie in the cache.
  void block(int layer) {
    const Golden::Layer& golden = golden_.layers[static_cast<std::size_t>(layer)];
    const Backend exact = Backend::reference();
    const auto observe = [&](const BlockTrace& trace) {
      const auto us = [&](Stage stage) { return trace.us[static_cast<std::size_t>(stage)]; };
      if (const auto& indexer = trace.calls.ranks[0].indexer) {
        add(layer, "indexer", base::relative_error(floats(trace.scores), exact_scores(indexer->select, trace.scores)),
            kSameBytesTolerance, us(Stage::indexer));
        add(layer, "topk", rows_selected_otherwise(indexer->select, trace.scores), 0, us(Stage::topk));
        const std::span<const float> scores = floats(golden.index_scores);
        add(layer, "indexer_golden", base::relative_error(floats(trace.scores).last(scores.size()), scores),
            kRoundingTolerance, 0);
      }
      std::vector<float> out = exact_attention(trace.calls);
      const TensorView& shape = trace.calls.attention_out;
      const std::vector<float> want =
          decoder_.project_output(exact, layer, tensor(out.data(), {shape.dim(0), shape.dim(1), shape.dim(2)}));
      add(layer, "attention", base::relative_error(floats(trace.output), want), kSameBytesTolerance,
          us(Stage::write) + us(Stage::attention));
      if (trace.calls.combine)
        add(layer, "combine", combine_error(trace.calls), golden_.tolerance.attn_output, us(Stage::combine));
      add(layer, "attention_golden", base::relative_error(floats(trace.output), floats(golden.attn_output)),
          kRoundingTolerance, 0);
    };
    decoder_.attention_block(layer, golden.attn_input, golden.topk, {.block = observe, .scores = true});
  }

  // Scores in double, of the same bytes.
  std::vector<float> exact_scores(const SelectArgs& select, const TensorView& scores) {
    const Backend exact = Backend::reference();
    const IndexScoreArgs& score = select.score;
    std::vector<float> want(static_cast<std::size_t>(scores.elements()));
    IndexScoreArgs args;
    args.q = on_host(score.q), args.weights = on_host(score.weights), args.lengths = on_host(score.lengths);
    args.paged = {{score.paged.cache.format, on_host(score.paged.cache.pages)}, on_host(score.paged.block_table), {}};
    args.logits = tensor(want.data(), {scores.dim(0), scores.dim(1)});
    const IndexScoreBounds bounds{scores.dim(0), args.q.dim(1), scores.dim(1)};
    index_scores(exact, args, workspace_.of(exact, index_scores_workspace_bytes(exact, bounds)));
    return want;
  }

  // The share of rows whose positions or slots are not what the reference makes of the same scores.
  double rows_selected_otherwise(const SelectArgs& select, const TensorView& scores) {
    const Backend exact = Backend::reference();
    const std::int64_t rows = scores.dim(0), k = select.positions.dim(1);
    std::vector<std::int32_t> positions(static_cast<std::size_t>(rows * k)), slots(positions.size());
    TopkArgs args;
    args.scores = on_host(scores), args.lengths = on_host(select.score.lengths), args.map = select.map;
    args.map.block_table = on_host(select.map.block_table);
    args.positions = tensor(positions.data(), {rows, k}), args.slots = tensor(slots.data(), {rows, k});
    sievemla::topk(exact, args, workspace_.of(exact, topk_workspace_bytes(exact, {rows, scores.dim(1), k})));
    std::int64_t different = 0;
    for (std::int64_t t = 0; t < rows; ++t)
      different +=
          !std::equal(positions.data() + t * k, positions.data() + (t + 1) * k,
                      base::at<std::int32_t>(select.positions, t)) ||
          !std::equal(slots.data() + t * k, slots.data() + (t + 1) * k, base::at<std::int32_t>(select.slots, t));
    return static_cast<double>(different) / static_cast<double>(rows);
  }

  // The block's attention over all ranks, in double.
  std::vector<float> exact_attention(const BlockCalls& calls) {
    const Backend exact = Backend::reference();
    const std::int64_t ranks = std::ssize(calls.ranks), rows = calls.attention_out.dim(0);
    const std::int64_t heads = calls.attention_out.dim(1), latent = calls.attention_out.dim(2);
    std::vector<float> out(static_cast<std::size_t>(ranks * rows * heads * latent));
    std::vector<float> lse(static_cast<std::size_t>(ranks * rows * heads));
    for (std::int64_t r = 0; r < ranks; ++r) {
      AttentionArgs attend = calls.ranks[static_cast<std::size_t>(r)].attention;
      const Slots& slots = std::get<Slots>(attend.rows);
      attend.rows = Slots{on_host(slots.indices), on_host(slots.topk_length)};
      attend.q = on_host(attend.q), attend.q_rope = on_host(attend.q_rope);
      attend.kv.pages = on_host(attend.kv.pages);
      attend.out = tensor(out.data() + r * rows * heads * latent, {rows, heads, latent});
      attend.lse = tensor(lse.data() + r * rows * heads, {rows, heads});
      const AttentionBounds bounds{.tokens = rows,
                                   .heads = heads,
                                   .lanes = std::get<Slots>(attend.rows).indices.dim(1),
                                   .latent = attend.kv.latent,
                                   .rope = attend.kv.rope};
      attention(exact, attend, workspace_.of(exact, attention_workspace_bytes(exact, bounds)));
    }
    return merged({.partial_out = tensor(out.data(), {ranks, rows, heads, latent}),
                   .partial_lse = tensor(lse.data(), {ranks, rows, heads}),
                   .sink = {},
                   .out = calls.attention_out,
                   .lse = {}});
  }

  const Golden& golden_;
  Decoder decoder_;
  CheckReport report_;
  WorkspaceMemory workspace_;
};

}  // namespace

Golden load_golden(const std::filesystem::path& path, const Config& config) {
  Golden golden;
  golden.file = std::make_shared<const SafeTensors>(path);
  const SafeTensors& file = *golden.file;
  golden.prompt = token_ids(file, "prompt_ids", config);
  golden.generated = token_ids(file, "generated_ids", config);
  golden.tolerance = load_tolerance(path.parent_path() / "meta.json");
  const auto bad = [&](const std::string& name, std::string_view rule, const auto& got) {
    throw BadFile(error_message(rule, file.name() + ": tensor " + name, got));
  };

  const std::int64_t kept = file.tensor("logits_prompt").view.dim(0);
  if (kept < 1 || kept > static_cast<std::int64_t>(golden.prompt.size()))
    bad("logits_prompt", "it has 1 row to as many as the prompt", kept);
  const TensorView prompt = file.tensor("logits_prompt", DType::f32, {kept, config.vocab});
  const TensorView generated =
      file.tensor("logits_generated", DType::f32, {static_cast<std::int64_t>(golden.generated.size()), config.vocab});
  golden.logits.assign(floats(prompt).begin(), floats(prompt).end());
  golden.logits.insert(golden.logits.end(), floats(generated).begin() + config.vocab, floats(generated).end());

  const std::int64_t rows = golden.rows();
  for (std::int64_t l = 0; l < config.layers; ++l) {
    const std::string at = "layers." + std::to_string(l) + ".";
    Golden::Layer& layer = golden.layers.emplace_back();
    layer.attn_input = file.tensor(at + "attn_input", DType::f32, {rows, config.hidden});
    layer.attn_output = file.tensor(at + "attn_output", DType::f32, {rows, config.hidden});
    layer.topk = file.tensor(at + "topk", DType::i32, {rows, config.index_topk});
    for (std::int64_t t = 0; t < rows; ++t)
      for (std::int64_t k = 0; k < config.index_topk; ++k)
        if (const std::int32_t id = *base::at<std::int32_t>(layer.topk, t, k); id < -1 || id > t)
          bad(at + "topk", "row t selects positions up to t", id);
    if (!config.full_indexer[static_cast<std::size_t>(l)]) continue;
    const std::string name = at + "index_scores";
    const std::int64_t last = file.tensor(name).view.dim(0);
    if (last < 1 || last > rows) bad(name, "it has 1 row to as many as were fed", last);
    layer.index_scores = file.tensor(name, DType::f32, {last, rows});
  }
  return golden;
}

CheckReport check_golden(const Config& config, const Checkpoint& checkpoint, const Golden& golden,
                         DecoderOptions options) {
  options.max_tokens = golden.rows();
  return Check(config, checkpoint, golden, options).run();
}

}  // namespace sievemla::model
