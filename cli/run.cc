// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/run.cc -- sievemla run: a checkpoint as Hugging Face writes it, prefilled and decoded through all four stages.
#include <map>
#include <numeric>
#include <optional>

#include "cli/options.h"
#include "cli/output.h"
#include "model/decoder.h"
#include "model/golden.h"
#include "sievemla/error.h"

namespace sievemla::cli {
namespace {

constexpr std::int64_t kBytes = 256;  // vocabulary of a model whose tokens are bytes

struct Options {
  std::string directory, prompt_ids, prompt, golden;
  bool has_ids = false, has_prompt = false, has_golden = false;
  std::int64_t tokens = 16, page_size = 64, ranks = 1, threads = 0;
  std::string backend = "auto", kv_format, index_format, norm_eps = "config", chunk = "all";
  bool ignore_eos = false, json = false;
};

// One line of the table: a stage of a layer, or of the whole model.
struct StageRow {
  int layer;  // -1: the whole model
  std::string stage;
  std::optional<double> error, bound;
  double us;
  bool passed = true;
};

struct Result {
  std::vector<std::int32_t> prompt, tokens;
  std::vector<double> logprobs;  // of the tokens; empty with --check
  double tokens_per_s = 0, prefill_us = 0;
  std::vector<StageRow> rows;
  std::optional<model::CheckReport> check;
};

// ---- what was asked for -----------------------------------------------------------------------------

std::vector<std::int32_t> parse_ids(const std::string& text, std::int64_t vocab) {
  std::vector<std::int32_t> ids;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    ids.push_back(
        static_cast<std::int32_t>(parse_integer(std::string_view(text).substr(begin, end - begin), 0, vocab - 1,
                                                "a token id of this vocabulary", "run: --prompt-ids")));
    begin = end + 1;
  }
  return ids;
}

std::vector<std::int32_t> prompt_of(const Options& options, const model::Config& config) {
  if (options.has_ids) return parse_ids(options.prompt_ids, config.vocab);
  expects(config.vocab == kBytes, "--prompt takes a vocabulary of 256 bytes; no tokenizer here, use --prompt-ids",
          "run", "a vocabulary of ", config.vocab);
  expects(!options.prompt.empty(), "a prompt holds at least one token", "run: --prompt", "''");
  std::vector<std::int32_t> ids;
  for (const char c : options.prompt) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

model::DecoderOptions decoder_options(const Options& options) {
  model::DecoderOptions decoder;
  decoder.backend = Backend::by_name(options.backend, cpu_options(options.threads));
  const bool device = decoder.backend.kind() == BackendKind::cuda;
  decoder.kv_format =
      options.kv_format.empty() ? device ? KvFormat::bf16 : KvFormat::f32 : kv_format_by_name(options.kv_format);
  decoder.index_format = options.index_format.empty() ? device ? IndexFormat::fp8 : IndexFormat::f32
                                                      : index_format_by_name(options.index_format);
  decoder.norm_eps = options.norm_eps == "hf" ? model::NormEps::hf : model::NormEps::config;
  decoder.page_size = options.page_size;
  decoder.ranks = static_cast<int>(options.ranks);
  if (options.chunk != "all")
    decoder.chunk =
        parse_integer(options.chunk, 1, std::numeric_limits<std::int32_t>::max(), "--chunk, unless 'all',", "run");
  return decoder;
}

// ---- doing it ---------------------------------------------------------------------------------------

Result generate(const Options& options, const model::Config& config, const model::Checkpoint& checkpoint,
                model::DecoderOptions decoder_options) {
  Result result;
  result.prompt = prompt_of(options, config);
  const std::int64_t rows = static_cast<std::int64_t>(result.prompt.size()) + options.tokens - 1;  // the last token
                                                                                                   // is not fed back
  expects(rows <= config.max_position,
          "prompt and new tokens must fit max_position_embeddings " + std::to_string(config.max_position), "run: -n",
          result.prompt.size(), " + ", options.tokens);
  decoder_options.max_tokens = rows;
  model::Decoder decoder(config, checkpoint, decoder_options);

  std::map<std::pair<int, std::size_t>, double> us;  // by layer and stage
  Progress progress("run", options.tokens);
  model::GenerateOptions how;
  how.tokens = options.tokens;
  how.ignore_eos = options.ignore_eos;
  how.on_token = [&](std::int32_t) { progress.step(); };
  how.observer.block = [&](const model::BlockTrace& block) {
    for (std::size_t stage = 0; stage < block.us.size(); ++stage) us[{block.layer, stage}] += block.us[stage];
  };
  model::Generated generated = model::generate(decoder, result.prompt, how);
  result.tokens = std::move(generated.tokens);
  result.logprobs = std::move(generated.logprobs);
  result.tokens_per_s = generated.tokens_per_s;
  result.prefill_us = generated.prefill_us;
  for (const auto& [key, time] : us)
    if (time > 0) result.rows.push_back({key.first, std::string(model::kStageNames[key.second]), {}, {}, time});
  return result;
}

Result check(const Options& options, const model::Config& config, const model::Checkpoint& checkpoint,
             const model::DecoderOptions& decoder_options) {
  const model::Golden golden = model::load_golden(options.golden, config);
  Result result;
  result.prompt = golden.prompt;
  result.check = model::check_golden(config, checkpoint, golden, decoder_options);
  result.tokens = result.check->tokens;
  result.tokens_per_s = result.check->tokens_per_s;
  for (const model::CheckRow& row : result.check->rows)
    result.rows.push_back({row.layer, row.stage, row.error, row.bound, row.us, row.passed});
  return result;
}

// ---- saying it --------------------------------------------------------------------------------------

// Where f32 arithmetic misses a golden of transformers by its eps alone.
bool hints_at_hf(const model::DecoderOptions& options, const Result& result) {
  return result.check && !result.check->passed() && options.norm_eps == model::NormEps::config &&
         options.kv_format == KvFormat::f32 && options.index_format == IndexFormat::f32;
}
constexpr const char* kHint =
    "transformers norms the latents with eps 1e-6 whatever the config says: try --norm-eps hf";

Json to_json(const Options& options, const model::Config& config, const model::DecoderOptions& decoder,
             const Result& result) {
  Json json = envelope("run");
  json["model_type"] = config.model_type;
  json["backend"] = decoder.backend.name();
  json["threads"] = decoder.backend.threads();
  json["kv_format"] = info(decoder.kv_format).name;
  json["index_format"] = name_of(decoder.index_format);
  json["norm_eps"] = options.norm_eps;
  json["ranks"] = decoder.ranks;
  json["prompt_tokens"] = result.prompt.size();
  json["tokens"] = result.tokens;
  json["logprobs"] = result.logprobs;
  json["tokens_per_s"] = result.tokens_per_s;
  json["layers"] = Json::array();
  for (const StageRow& row : result.rows) {
    Json line = {{"layer", nullptr},
                 {"stage", row.stage},
                 {"error", error_json(row.error)},
                 {"us", row.us},
                 {"checked", row.error.has_value()}};
    if (row.layer >= 0) line["layer"] = row.layer;
    if (row.error) {
      line["bound"] = *row.bound;
      line["passed"] = row.passed;
    }
    json["layers"].push_back(std::move(line));
  }
  if (result.check) {
    json["check"] = {{"passed", result.check->passed()},
                     {"tokens_equal", result.check->tokens_equal},
                     {"tokens_judged", result.check->tokens_judged},
                     {"failures", result.check->failures}};
    if (hints_at_hf(decoder, result)) json["check"]["hint"] = kHint;
  }
  return json;
}

// Bytes as a C string literal would have them.
std::string quoted(const std::vector<std::int32_t>& bytes) {
  std::string text = "\"";
  for (const std::int32_t b : bytes) {
    if (b == '"' || b == '\\') text += '\\';
    if (b >= 0x20 && b < 0x7F) text += static_cast<char>(b);
    else if (b == '\n') text += "\\n";
    else text += fmt::format("\\x{:02x}", b);
  }
  return text + '"';
}

std::string to_text(const model::Config& config, const model::DecoderOptions& decoder, const Result& result) {
  const auto full = std::count(config.full_indexer.begin(), config.full_indexer.end(), true);
  std::string text = fmt::format("model   {}, {} layers ({} with an indexer), {} heads, top-k {}\n", config.model_type,
                                 config.layers, full, config.heads, config.index_topk);
  text += fmt::format("cache   {} rows, {} indexer keys, pages of {}; backend {}, threads {}\n",
                      info(decoder.kv_format).name, name_of(decoder.index_format), decoder.page_size,
                      decoder.backend.name(), decoder.backend.threads());
  if (decoder.ranks > 1)
    text += fmt::format("ranks   {}, each with its part of the latent rows, merged by combine\n", decoder.ranks);
  text += fmt::format("prompt  {} tokens{}\n", result.prompt.size(),
                      result.prefill_us > 0 ? " in " + time_text(result.prefill_us) : "");
  text += fmt::format("tokens  {}\n", fmt::join(result.tokens, ","));
  if (config.vocab == kBytes) text += fmt::format("text    {}\n", quoted(result.tokens));
  if (result.tokens_per_s > 0) text += fmt::format("speed   {:.0f} tokens/s\n", result.tokens_per_s);

  std::vector<Table::Column> columns = {{"layer", Table::right}, {"stage"}};
  if (result.check) columns.insert(columns.end(), {{"error", Table::right}, {"bound", Table::right}});
  columns.push_back({"time", Table::right});
  if (result.check) columns.push_back({"ok"});
  Table table(columns);
  for (const StageRow& row : result.rows) {
    std::vector<std::string> cells = {row.layer < 0 ? "all" : std::to_string(row.layer), row.stage};
    if (result.check) cells.insert(cells.end(), {error_text(*row.error), error_text(*row.bound)});
    cells.push_back(row.us > 0 ? time_text(row.us) : "-");
    if (result.check) cells.push_back(row.passed ? "yes" : "NO");
    table.row(cells);
  }
  text += "\n" + table.text();
  if (!result.check) return text;

  const model::CheckReport& check = *result.check;
  text +=
      fmt::format("\ntokens equal: {} of {}{}\n", check.tokens_equal, check.tokens.size(),
                  check.tokens_judged ? "" : " (reported, not judged: quantised or rounded caches may change a token)");
  for (const std::string& failure : check.failures) text += "failure: " + failure + "\n";
  if (hints_at_hf(decoder, result)) text += std::string("hint: ") + kHint + "\n";
  return text + (check.passed() ? "check passed\n" : "check FAILED\n");
}

int run(const Options& options) {
  const int sources = options.has_ids + options.has_prompt + options.has_golden;
  expects(sources == 1, "exactly one of --prompt-ids, --prompt and --check says what to run", "run", sources,
          " of them");
  const model::DecoderOptions decoder = decoder_options(options);
  const model::Config config = model::load_config(options.directory);
  const model::Checkpoint checkpoint(options.directory);
  decoder.backend.prepare();
  const Result result =
      options.has_golden ? check(options, config, checkpoint, decoder) : generate(options, config, checkpoint, decoder);
  print(options.json ? text_of(to_json(options, config, decoder, result)) : to_text(config, decoder, result));
  if (result.check && !result.check->passed()) {
    const std::vector<std::string>& failures = result.check->failures;
    throw CheckFailed(error_message("the run must match its golden", "run: --check " + options.golden, failures.size(),
                                    failures.size() == 1 ? " failure: " : " failures, first: ", failures.front(),
                                    hints_at_hf(decoder, result) ? std::string("; ") + kHint : ""));
  }
  return kGood;
}

}  // namespace

Action add_run(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "run", "Prefill and decode a Hugging Face checkpoint (glm_moe_dsa, deepseek_v32) through all stages");
  command->add_option("DIR", options->directory, "Directory with config.json and model.safetensors (or its shards)")
      ->required()
      ->type_name("");

  CLI::Option_group* source = command->add_option_group("What to run", "Exactly one of");
  auto* ids = source->add_option("--prompt-ids", options->prompt_ids, "Token ids, e.g. 1,2,3")->type_name("IDS");
  auto* prompt =
      source->add_option("--prompt", options->prompt, "Text, for vocabularies of 256 bytes")->type_name("TEXT");
  auto* golden =
      source->add_option("--check", options->golden, "A golden.safetensors, which says prompt and length too")
          ->type_name("FILE");

  auto* tokens = add_integer(*command, "-n,--tokens", options->tokens, 1, std::numeric_limits<std::int32_t>::max(),
                             "New tokens, greedy, ties to the lowest id");
  command->add_flag("--ignore-eos", options->ignore_eos, "Go on behind an end-of-text token");
  add_backend(*command, options->backend, "reference, cpu, cuda, cuda:N, or auto: a CUDA device, else the cpu");
  add_threads(*command, options->threads);
  std::vector<std::string> formats;
  for (const KvFormatInfo& format : kv_formats()) formats.emplace_back(format.name);
  add_choice(*command, "--kv-format", options->kv_format, formats, "Latent cache rows (f32; on cuda bf16)");
  add_choice(*command, "--index-format", options->index_format,
             {std::string(name_of(IndexFormat::f32)), std::string(name_of(IndexFormat::bf16)),
              std::string(name_of(IndexFormat::fp8))},
             "Indexer key cache (f32; on cuda fp8)");
  add_choice(*command, "--norm-eps", options->norm_eps, {"config", "hf"},
             "eps of the norms behind q_a and kv_a: the config's, as in engines, or 1e-6, as in transformers");
  add_integer(*command, "--page-size", options->page_size, 1, 65536, "Tokens a cache page");
  add_integer(*command, "--ranks", options->ranks, 1, 64,
              "Decode-context-parallel ranks, simulated in this process: token p's latent row is on rank p % N,\n"
              "each rank attends to its own rows, and combine merges what they give");
  command->add_option("--chunk", options->chunk, "Prompt tokens that go through together")
      ->type_name("N|all")
      ->default_str(options->chunk);
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(
      "--check compares with a run of Hugging Face transformers on the same checkpoint: f32 caches end to end "
      "(tokens,\n"
      "selections, outputs; with --norm-eps hf, as transformers has it), other formats block by block on the golden's "
      "own\n"
      "inputs and selections, tokens only reported. Exit status 1 if anything is out of its bound.");

  return [options, ids, prompt, golden, tokens] {
    options->has_ids = ids->count() > 0;
    options->has_prompt = prompt->count() > 0;
    options->has_golden = golden->count() > 0;
    expects(!(options->has_golden && tokens->count() > 0), "--check takes the number of tokens from its file", "run",
            "-n beside it");
    return run(*options);
  };
}

}  // namespace sievemla::cli
