// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/doctor_print.cc -- what doctor found, as text and as JSON.
#include <algorithm>

#include "cli/doctor.h"
#include "cli/machine.h"

namespace sievemla::cli::doctor {
namespace {

constexpr const char* kLevels[] = {"blocker", "warning", "note"};
constexpr const char* kServes[] = {"yes", "no", "unclear"};

double gib(std::int64_t bytes) { return static_cast<double>(bytes) / 0x1p30; }
std::string cuda_version(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }
std::string capability_text(int c) { return fmt::format("{}.{}", c / 10, c % 10); }

std::string name_of_model(const Model& m) {
  const std::string known = fmt::format("{}", fmt::join(m.names, ", "));
  const std::string type = m.type.empty() ? "a model without a type" : m.type;
  if (!known.empty()) return fmt::format("{} ({})", known, type);
  return m.refused.empty() ? type + " with sizes of its own" : type;
}

std::string name_of_target(const Target& t) {
  if (t.backend == BackendKind::cpu) return "the CPU";
  const std::string arch = "sm_" + std::to_string(t.gpu.capability);
  return fmt::format("{} x {}", t.count, t.gpu.name.empty() ? arch : t.gpu.name + " (" + arch + ")");
}

std::string cell_of(const StageVerdict& s) {
  return s.missing.empty() ? fmt::format("{}", fmt::join(s.kernels, ", ")) : "missing: " + s.missing;
}

// ---- text -------------------------------------------------------------------------------------------

std::string stages_text(const Target& t) {
  const FormatVerdict& f = t.format();
  std::string text = fmt::format("stages on {}, {} cache, {} indexer keys{}\n", name_of_target(t), info(f.cache).name,
                                 name_of(f.index), t.image.empty() ? "" : ", " + t.image);
  Table table({{"  stage"}, {"kernel"}});
  for (const StageVerdict& s : f.stages) table.row({"  " + std::string(s.stage), cell_of(s)});
  text += table.text();
  for (const FormatVerdict& other : t.formats)
    if (&other != &f) {
      std::string missing;
      for (const StageVerdict& s : other.stages)
        if (!s.missing.empty()) missing += (missing.empty() ? "" : ", ") + std::string(s.stage);
      text += fmt::format("  {} cache: {}\n", info(other.cache).name,
                          missing.empty() ? "every stage has a kernel" : "missing " + missing);
    }
  for (const Measured* time : t.times)
    text += fmt::format("  measured on {}, attention of one layer at batch {}: {:.1f} us ({})\n", time->device,
                        time->batch, time->us, time->name);
  double together = 0;
  for (std::size_t i = 0; i < t.floors.size(); ++i) {
    const Floor& floor = t.floors[i];
    const bool first = i == 0 || t.floors[i - 1].batch != floor.batch;
    if (first)
      text += fmt::format("  at the {} ceilings of {} ({} TB/s, {} TFLOP/s in bf16), a layer at batch {}, {} tokens:",
                          floor.on->basis == "measured" ? "measured" : "published, not measured", floor.on->device,
                          floor.on->tbps, floor.on->bf16_tflops, floor.batch, floor.context);
    text += fmt::format("{} {} {}", first ? "" : ",", floor.stage, time_text(floor.us));
    together = (first ? 0 : together) + floor.us;
    if (i + 1 == t.floors.size() || t.floors[i + 1].batch != floor.batch)
      text += fmt::format("; together {}\n", time_text(together));
  }
  return text + "\n";
}

std::string model_text(const Report& r) {
  const Model& m = *r.model;
  const Geometry& g = m.sizes;
  const Plan& p = r.plan;
  const FormatVerdict& f = r.target().format();
  std::string text = fmt::format("model      {}\n", name_of_model(m));
  const std::size_t all = m.sparse.size(), sparse = static_cast<std::size_t>(g.layers);
  text += fmt::format("layers     {}{}: {} with an indexer of their own, {} sharing a selection{}\n", g.layers,
                      all > sparse ? fmt::format(" sparse of {}", all) : "", g.full_layers, g.layers - g.full_layers,
                      m.mtp_layers > 0 ? fmt::format("; {} for MTP", m.mtp_layers) : "");
  text += fmt::format("attention  {} heads, {} per rank at --tp {}; rows {} + {}; softmax scale {}^-0.5\n", g.heads,
                      p.heads_per_rank > 0 ? std::to_string(p.heads_per_rank) : "none", p.tp, g.latent, g.rope,
                      g.nope + g.rope);
  text += fmt::format("indexer    {} heads of {}, top-k {}{}, rope {} (by {})\n", g.index_heads, kIndexDim,
                      g.index_topk, g.index_kpool > 1 ? fmt::format(" in pools of {} tokens", g.index_kpool) : "",
                      name_of(g.index_rope), m.rope_source);
  text += fmt::format("norm eps   {:g}\n", m.norm_eps);
  if (m.weight_bytes > 0)
    text += fmt::format("weights    {}, {:.1f} GiB ({}); {:.1f} GiB per GPU at --tp {} --pp {}\n", m.weights,
                        gib(m.weight_bytes), m.weight_source, gib(p.weight_bytes), p.tp, p.pp);
  else text += fmt::format("weights    {}\n", m.weights);
  text += fmt::format(
      "cache      {} bytes per token as {} with {} keys, {} on the fullest GPU (each rank of --tp holds "
      "all of it)\n",
      f.bytes_per_token, info(f.cache).name, name_of(f.index), p.cache_bytes_per_token);
  if (p.context)
    text +=
        fmt::format("context    {} tokens in all fit beside the weights, activations aside; the model's limit is {}\n",
                    *p.context, m.max_position);
  return text + "\n";
}

std::string engine_text(const Report& r, const Question& q) {
  if (!r.engine) return "";
  const EngineAnswer& e = *r.engine;
  if (e.rows.empty())
    return fmt::format("{} by itself: the table of {} says nothing of this GPU and model\n\n", q.engine,
                       engine_table_date());
  std::string text = fmt::format("{} {} by itself (read {}): {}\n", q.engine, e.version, engine_table_date(),
                                 e.serves    ? "serves it"
                                 : e.refuses ? "refuses"
                                             : "unclear");
  for (const EngineRow* row : e.rows)
    text += fmt::format("  {:<9}  {:<7}  {} [{}]\n", row->stage, kServes[static_cast<int>(row->serves)], row->says,
                        row->source);
  return text + "\n";
}

std::string patches_text(const Machine& m, const Question& q) {
  if (q.engine != "vllm" || m.patches.empty()) return "";
  std::string text = "what the plugin replaces in vLLM, none of it under SIEVEMLA_VLLM=off\n";
  for (const Patch& patch : m.patches) text += fmt::format("  {} at {}: {}\n", patch.what, patch.when, patch.why);
  return text + "\n";
}

std::string machine_text(const Machine& m) {
  std::string text =
      fmt::format("driver     {}\n",
                  m.driver.empty() ? m.driver_problem
                                   : m.driver + (m.driver_cuda > 0 ? ", CUDA " + cuda_version(m.driver_cuda) : ""));
  for (const Gpu& gpu : m.gpus)
    text += fmt::format("GPU        {}, compute {}, {:.1f} GiB\n", gpu.name, capability_text(gpu.capability),
                        gib(gpu.memory_bytes));
  text += fmt::format("CUDA       {}\n", m.cuda_toolkit.empty() ? "no toolkit found" : "toolkit " + m.cuda_toolkit);
  std::string packages;
  for (const Package& p : m.packages)
    packages += fmt::format("{}{} {}", packages.empty() ? "" : ", ", p.name, p.version);
  text += fmt::format("Python     {}: {}\n", m.python.empty() ? "none on PATH" : m.python,
                      packages.empty() ? "nothing of interest installed" : packages);
  const sievemla::cli::Machine cpu = this_machine();
  return text + fmt::format("CPU        {}, {} cores, {:.1f} GiB, tier {}\n", cpu.cpu, cpu.cores,
                            gib(m.host_memory_bytes), cpu.best_tier);
}

std::string known_models_text() {
  Table table({{"known model"}, {"model_type"}, {"served"}});
  for (const Geometry& g : geometries())
    table.row({std::string(g.name), std::string(g.model_type), "where its stages run"});
  for (const NotYet& row : not_yet())
    table.row({std::string(row.name), std::string(row.model_type), "not yet: " + std::string(row.reason)});
  return "\n" + table.text();
}

// ---- JSON -------------------------------------------------------------------------------------------

Json stages_json(const FormatVerdict& f) {
  Json json = Json::object();
  for (const StageVerdict& s : f.stages)
    if (s.missing.empty()) json[std::string(s.stage)] = {{"kernel", s.kernels.front()}, {"kernels", s.kernels}};
    else json[std::string(s.stage)] = {{"missing", s.missing}};
  return json;
}

Json target_json(const Target& t) {
  Json json = {{"backend", name_of(t.backend)}};
  if (t.backend == BackendKind::cuda)
    json.update({{"name", t.gpu.name},
                 {"capability", capability_text(t.gpu.capability)},
                 {"count", t.count},
                 {"memory_bytes", t.gpu.memory_bytes},
                 {"image", t.image}});
  json["formats"] = Json::array();
  for (const FormatVerdict& f : t.formats)
    json["formats"].push_back({{"kv_format", info(f.cache).name},
                               {"index_format", name_of(f.index)},
                               {"runs", f.runs()},
                               {"cache_bytes_per_token", f.bytes_per_token},
                               {"stages", stages_json(f)}});
  json["measured"] = Json::array();
  for (const Measured* time : t.times)
    json["measured"].push_back({{"stage", "attention"},
                                {"device", time->device},
                                {"case", time->name},
                                {"batch", time->batch},
                                {"us", time->us}});
  json["floors"] = Json::array();
  for (const Floor& f : t.floors)
    json["floors"].push_back({{"stage", f.stage},
                              {"device", f.on->device},
                              {"basis", f.on->basis},
                              {"source", f.on->source},
                              {"batch", f.batch},
                              {"context", f.context},
                              {"us", f.us}});
  return json;
}

Json model_json(const Report& r) {
  const Model& m = *r.model;
  const Geometry& g = m.sizes;
  const Plan& p = r.plan;
  Json json = {{"model_type", m.type}, {"names", m.names}};
  if (!m.refused.empty()) return json;
  json.update({{"layers", m.sparse.empty() ? static_cast<std::size_t>(g.layers) : m.sparse.size()},
               {"sparse_layers", g.layers},
               {"full_layers", g.full_layers},
               {"shared_layers", g.layers - g.full_layers},
               {"mtp_layers", m.mtp_layers},
               {"heads", g.heads},
               {"heads_per_rank", p.heads_per_rank},
               {"latent", g.latent},
               {"rope", g.rope},
               {"index_heads", g.index_heads},
               {"index_topk", g.index_topk},
               {"index_kpool", g.index_kpool},
               {"index_rope", name_of(g.index_rope)},
               {"index_rope_source", m.rope_source},
               {"norm_eps", m.norm_eps},
               {"max_position", m.max_position},
               {"weights", m.weights},
               {"weight_bytes", m.weight_bytes},
               {"weight_source", m.weight_source},
               {"kv_dtype", m.kv_dtype},
               {"kv_source", m.kv_source}});
  return json;
}

Json plan_json(const Report& r) {
  const Plan& p = r.plan;
  return {{"gpus", p.gpus},
          {"nodes", p.nodes},
          {"tp", p.tp},
          {"pp", p.pp},
          {"partition", p.partition},
          {"weight_bytes_per_gpu", p.weight_bytes},
          {"cache_bytes_per_token_per_gpu", p.cache_bytes_per_token},
          {"memory_bytes", p.memory_bytes},
          {"context_that_fits", p.context ? Json(*p.context) : Json(nullptr)}};
}

Json engine_json(const EngineAnswer& e, const std::string& name) {
  Json json = {{"name", name},
               {"version", e.version},
               {"read", engine_table_date()},
               {"serves", e.serves    ? "yes"
                          : e.refuses ? "no"
                                      : "unclear"},
               {"rows", Json::array()}};
  for (const EngineRow* row : e.rows)
    json["rows"].push_back({{"stage", row->stage},
                            {"serves", kServes[static_cast<int>(row->serves)]},
                            {"says", row->says},
                            {"source", row->source}});
  return json;
}

Json machine_json(const Machine& m) {
  Json json = {{"driver", m.driver},
               {"driver_cuda", m.driver_cuda > 0 ? cuda_version(m.driver_cuda) : ""},
               {"driver_problem", m.driver_problem},
               {"cuda_toolkit", m.cuda_toolkit},
               {"python", m.python},
               {"packages", Json::object()},
               {"gpus", Json::array()},
               {"host_memory_bytes", m.host_memory_bytes}};
  for (const Package& p : m.packages) json["packages"][p.name] = p.version;
  json["vllm_patches"] = Json::array();
  for (const Patch& p : m.patches) json["vllm_patches"].push_back({{"what", p.what}, {"when", p.when}, {"why", p.why}});
  for (const Gpu& gpu : m.gpus)
    json["gpus"].push_back(
        {{"name", gpu.name}, {"capability", capability_text(gpu.capability)}, {"memory_bytes", gpu.memory_bytes}});
  return json;
}

}  // namespace

std::string text_of_report(const Report& r, const Machine& machine, const Question& q) {
  const bool sizes = !r.model || r.model->refused.empty();
  std::string text =
      fmt::format("{} on {}: {}\n", r.model ? name_of_model(*r.model) : "Sparse MLA", name_of_target(r.target()),
                  !r.runs              ? "does not run here"
                  : r.by == "sievemla" ? "runs"
                                       : "runs by " + r.by + " itself");
  for (const Finding& f : r.findings) text += fmt::format("  {}: {}\n", kLevels[static_cast<int>(f.level)], f.text);
  if (!r.command.empty()) text += fmt::format("  run it: {}\n", r.command);
  text += '\n';
  if (sizes)
    for (const Target& t : r.targets) text += stages_text(t);
  text += engine_text(r, q) + patches_text(machine, q);
  if (r.model && sizes) text += model_text(r);
  text += machine_text(machine);
  if (!r.model || !sizes) text += known_models_text();
  return text;
}

Json json_of_report(const Report& r, const Machine& machine, const Question& q) {
  Json json = envelope("doctor");
  const bool sizes = !r.model || r.model->refused.empty();
  json["runs"] = r.runs;
  json["by"] = r.by.empty() ? Json(nullptr) : Json(r.by);
  if (sizes) {
    json["kv_format"] = info(r.target().format().cache).name;
    json["stages"] = stages_json(r.target().format());
  } else {
    json["stages"] = Json::object();
    for (const char* stage : {"write", "indexer", "topk", "attention", "combine"})
      json["stages"][stage] = {{"missing", r.model->refused}};
  }
  json["targets"] = Json::array();
  for (const Target& t : r.targets) json["targets"].push_back(target_json(t));
  if (r.model) json["model"] = model_json(r), json["plan"] = plan_json(r);
  if (r.engine) json["engine"] = engine_json(*r.engine, q.engine);
  json["findings"] = Json::array();
  for (const Finding& f : r.findings)
    json["findings"].push_back({{"level", kLevels[static_cast<int>(f.level)]}, {"text", f.text}});
  json["command"] = r.command.empty() ? Json(nullptr) : Json(r.command);
  json["machine"] = machine_json(machine);
  json["known_models"] = Json::array();
  for (const Geometry& g : geometries())
    json["known_models"].push_back({{"name", g.name}, {"model_type", g.model_type}});
  for (const NotYet& row : not_yet())
    json["known_models"].push_back({{"name", row.name}, {"model_type", row.model_type}, {"not_yet", row.reason}});
  return json;
}

}  // namespace sievemla::cli::doctor
