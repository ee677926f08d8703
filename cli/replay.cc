// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/replay.cc -- sievemla replay: runs one traced call on every backend, and compares with what the trace says.
#include "attention/registry.h"
#include "base/compare.h"
#include "base/view.h"
#include "cli/cuda/gpu.h"
#include "cli/measure.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/place.h"
#include "model/trace.h"
#include "sievemla/attention.h"
#include "sievemla/error.h"
#include "sievemla/indexer.h"
#include "sievemla/topk.h"

namespace sievemla::cli {
namespace {

struct Options {
  std::string trace, backend = "all";
  std::int64_t threads = 0;
  bool json = false;
};

// One stage on one backend. `cache` is the part of the trace it ran on.
struct Row {
  std::string backend, stage, cache;
  std::optional<double> error;  // none: nothing to compare with
  double bound;
  double us, gflops, gbps;
  std::string lack;  // not empty: the backend cannot serve it, and why
  bool passed() const { return !error || *error <= bound; }
};

std::span<const float> floats(const TensorView& view) {
  return {base::at<float>(view, 0), static_cast<std::size_t>(view.elements())};
}
std::span<const std::int32_t> ints(const TensorView& view) {
  return {base::at<std::int32_t>(view, 0), static_cast<std::size_t>(view.elements())};
}

// The share of rows of [rows, k] that differ anywhere.
double rows_that_differ(std::span<const std::int32_t> got, std::span<const std::int32_t> want, std::int64_t rows) {
  const std::size_t k = want.size() / static_cast<std::size_t>(rows);
  std::int64_t differing = 0;
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::size_t first = static_cast<std::size_t>(t) * k;
    differing += !std::equal(got.begin() + first, got.begin() + first + k, want.begin() + first);
  }
  return static_cast<double>(differing) / static_cast<double>(rows);
}

Row timed_row(const Backend& backend, const char* stage, std::string cache, double flops, double bytes,
              const std::function<void(Stream)>& call) {
  const double us = backend.kind() == BackendKind::cuda ? gpu::time(backend.device(), call, gpu::L2::cold).us
                                                        : median_us([&] { call({}); }, kReplayEffort).us;
  return {backend.name(),    stage, std::move(cache), {}, tolerance(backend), us, flops / us * 1e-3,
          bytes / us * 1e-3, ""};
}

// ---- sparse_mla_trace -------------------------------------------------------------------------------

// Queries for the backend: traces hold bf16 ones as f32, which CUDA does not take.
TensorView queries_for(const Backend& backend, const TensorView& q, std::vector<bf16>& memory) {
  if (backend.kind() != BackendKind::cuda || q.dtype != DType::f32) return q;
  for (const float x : floats(q)) memory.push_back(base::to_bf16(x));
  for (std::size_t i = 0; i < memory.size(); ++i)
    if (base::to_f32(memory[i]) != floats(q)[i]) return q;
  TensorView exact = q;
  exact.data = memory.data(), exact.dtype = DType::bf16;
  return exact;
}

Row replay_cache(const Backend& backend, const model::SparseMlaTrace& trace,
                 const model::SparseMlaTrace::Cache& cache) {
  const std::int64_t tokens = trace.q.dim(0), heads = trace.q.dim(1), latent = trace.latent;
  std::vector<float> out(static_cast<std::size_t>(tokens * heads * latent));
  std::vector<float> lse(static_cast<std::size_t>(tokens * heads));
  AttentionArgs args;
  std::vector<bf16> q;
  args.q = queries_for(backend, trace.q, q);
  args.kv = cache.kv;
  args.rows = Slots{trace.indices, trace.topk_length};
  args.scale = trace.scale;
  args.sink = trace.sink;
  args.out = tensor(out.data(), {tokens, heads, latent});
  args.lse = tensor(lse.data(), {tokens, heads});
  Place place(backend);
  const AttentionArgs there = place.put_all(args);
  const Workspace workspace = place.workspace(
      attention_workspace_bytes(backend, {tokens, heads, trace.indices.dim(1), trace.latent, trace.rope}));

  const double pairs = static_cast<double>(trace.selected(cache));
  const double row_bytes = static_cast<double>(info(cache.kv.format).row_bytes(trace.latent, trace.rope));
  Row row = timed_row(backend, "attention", cache.name,
                      2.0 * static_cast<double>(heads) * pairs * static_cast<double>(2 * latent + trace.rope),
                      pairs * row_bytes, [&](Stream stream) { attention(backend, there, workspace, stream); });
  row.bound = tolerance(backend, base::pick(stage::attention::attention_kernels(), backend, there, "replay"));
  place.take_back(args.out);
  place.take_back(args.lse);
  for (const auto& [got, want] : {std::pair(&out, cache.out), std::pair(&lse, cache.lse)})
    if (want) row.error = std::max(row.error.value_or(0), base::relative_error(*got, floats(want)));
  return row;
}

// ---- indexer_trace ----------------------------------------------------------------------------------

Row replay_scores(const Backend& backend, const model::IndexerTrace& trace, std::vector<float>& logits) {
  const std::int64_t rows = trace.q.dim(0), heads = trace.q.dim(1);
  logits.resize(static_cast<std::size_t>(rows * trace.width));
  IndexScoreArgs args;
  args.q = trace.q;
  args.weights = trace.weights;
  args.paged = {trace.keys, trace.block_table, trace.row_request};
  args.lengths = trace.row_lens;
  args.logits = tensor(logits.data(), {rows, trace.width});
  Place place(backend);
  const IndexScoreArgs there = place.put_all(args);
  const Workspace workspace = place.workspace(index_scores_workspace_bytes(backend, {rows, heads, trace.width}));

  const double pairs = static_cast<double>(trace.visible());
  const double key_bytes = static_cast<double>(trace.keys.pages.dim(2) * size_of(trace.keys.pages.dtype));
  Row row = timed_row(backend, "indexer", std::string(name_of(trace.keys.format)),
                      2.0 * kIndexDim * static_cast<double>(heads) * pairs, pairs * key_bytes,
                      [&](Stream stream) { index_scores(backend, there, workspace, stream); });
  place.take_back(args.logits);
  if (trace.logits) row.error = base::relative_error(logits, floats(trace.logits));
  return row;
}

// Selects from the trace's own logits where it has them: top-k is exact, so its ids must be equal.
Row replay_topk(const Backend& backend, const model::IndexerTrace& trace, const std::vector<float>& logits) {
  const std::int64_t rows = trace.q.dim(0);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(rows * trace.k)), slots(positions.size());
  TopkArgs args;
  args.scores = trace.logits ? trace.logits : tensor(logits.data(), {rows, trace.width});
  args.lengths = trace.row_lens;
  args.positions = tensor(positions.data(), {rows, trace.k});
  args.slots = tensor(slots.data(), {rows, trace.k});
  args.map.block_table = trace.block_table;
  args.map.row_request = trace.row_request;
  args.map.page_size = trace.keys.page_size();
  Place place(backend);
  const TopkArgs there = place.put_all(args);
  const Workspace workspace = place.workspace(topk_workspace_bytes(backend, {rows, trace.width, trace.k}));

  Row row = timed_row(backend, "topk", "f32", 0, 4.0 * static_cast<double>(trace.visible()),
                      [&](Stream stream) { topk(backend, there, workspace, stream); });
  place.take_back(args.positions);
  place.take_back(args.slots);
  row.bound = 0;
  for (const auto& [got, want] : {std::pair(&positions, trace.topk), std::pair(&slots, trace.topk_slots)})
    if (want) row.error = std::max(row.error.value_or(0), rows_that_differ(*got, ints(want), rows));
  return row;
}

// ---- the command ------------------------------------------------------------------------------------

using Replay = std::function<Row()>;
std::vector<Replay> parts(const Backend& backend, const model::SparseMlaTrace& trace) {
  std::vector<Replay> all;
  for (const auto& cache : trace.caches) all.push_back([&] { return replay_cache(backend, trace, cache); });
  return all;
}
std::vector<Replay> parts(const Backend& backend, const model::IndexerTrace& trace) {
  const auto logits = std::make_shared<std::vector<float>>();
  return {[&, logits] { return replay_scores(backend, trace, *logits); },
          [&, logits] { return replay_topk(backend, trace, *logits); }};
}

std::vector<Row> replay(const model::Trace& trace, const Options& options) {
  std::vector<Row> rows;
  for (const Backend& backend : backends_named(options.backend, cpu_options(options.threads))) {
    backend.prepare();
    for (const Replay& part : std::visit([&](const auto& call) { return parts(backend, call); }, trace.call)) {
      try {
        rows.push_back(part());
      } catch (const Unsupported& why) {
        if (options.backend != "all") throw;  // asked for by name
        rows.push_back({backend.name(), "", "", {}, 0, 0, 0, 0, why.what()});
      }
    }
  }
  return rows;
}

Json to_json(const Options& options, const std::vector<Row>& rows) {
  Json json = envelope("replay");
  json["trace"] = options.trace;
  json["rows"] = Json::array();
  for (const Row& row : rows) {
    if (!row.lack.empty()) {
      json["rows"].push_back({{"backend", row.backend}, {"unsupported", row.lack}});
      continue;
    }
    json["rows"].push_back({{"backend", row.backend},
                            {"stage", row.stage},
                            {"cache", row.cache},
                            {"error", error_json(row.error)},
                            {"bound", row.bound},
                            {"us", row.us},
                            {"gflops", row.gflops},
                            {"gbps", row.gbps},
                            {"checked", row.error.has_value()},
                            {"passed", row.passed()}});
  }
  return json;
}

std::string to_text(const std::vector<Row>& rows) {
  Table table({{"backend"},
               {"stage"},
               {"cache"},
               {"error", Table::right},
               {"bound", Table::right},
               {"time", Table::right},
               {"GFLOP/s", Table::right},
               {"GB/s", Table::right},
               {"ok"}});
  std::string lacks;
  for (const Row& row : rows) {
    if (row.lack.empty())
      table.row({row.backend, row.stage, row.cache, row.error ? error_text(*row.error) : "-", error_text(row.bound),
                 time_text(row.us), row.gflops > 0 ? fmt::format("{:.1f}", row.gflops) : "-",
                 fmt::format("{:.2f}", row.gbps),
                 !row.error     ? "not checked"
                 : row.passed() ? "yes"
                                : "NO"});
    else lacks += "not run: " + row.lack + "\n";
  }
  return table.text() + lacks;
}

int run(const Options& options) {
  const model::Trace trace = model::load_trace(options.trace);
  const std::vector<Row> rows = replay(trace, options);
  print(options.json ? text_of(to_json(options, rows)) : to_text(rows));
  for (const Row& row : rows)
    if (!row.passed())
      throw CheckFailed(error_message(
          fmt::format("{} on {} must match the trace within {}", row.stage, row.backend, error_text(row.bound)),
          fmt::format("{}: {}", options.trace, row.cache), "an error of ", error_text(*row.error)));
  return kGood;
}

}  // namespace

Action add_replay(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("replay", "Run one traced call on every backend, and compare with its outputs");
  command->add_option("TRACE", options->trace, "A safetensors file: a sparse_mla_trace or an indexer_trace")
      ->required()
      ->type_name("");
  add_backend(*command, options->backend, "reference, cpu, cuda, or all that run here");
  add_threads(*command, options->threads);
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(
      "error = max |a - b| / max |b| over outputs and lse, for topk the share of rows that differ; infinities must\n"
      "stand at equal places. Bounds: 1e-6 for the reference, 1e-4 for CPU kernels in f32, 2e-3 for those in bf16,\n"
      "0 for topk. A trace without outputs is timed only.");
  return [options] { return run(*options); };
}

}  // namespace sievemla::cli
