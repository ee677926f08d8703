// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/doctor.h -- the parts of sievemla doctor: facts of the model, facts of the machine, what engines do, the verdict.
//
//   read_model ────┐
//   look_at_machine┴─► examine ─► text_of_report | json_of_report
//
// Nothing here starts a process, opens a socket or loads weights.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/kernel_lists.h"
#include "cli/output.h"
#include "cuda/config.h"
#include "sievemla/geometry.h"
#include "sievemla/kv_format.h"

namespace sievemla::cli::doctor {

// ---- findings ---------------------------------------------------------------------------------------

enum class Level : std::uint8_t { blocker, warning, note };
// Whom a blocker stops: everybody, or this library alone (the engine may still serve the model by itself).
enum class Stops : std::uint8_t { all, ours };

struct Finding {
  Level level;
  std::string text;
  Stops stops = Stops::all;
};

// ---- the model: doctor_model.cc ---------------------------------------------------------------------

// A model that is known by name and has no kernels here, and why.
struct NotYet {
  std::string_view name, model_type, reason;
};
std::span<const NotYet> not_yet();

struct Model {
  std::string path;                // the checkpoint's directory, as given; empty: a row of geometries()
  std::string type;                // model_type of the config
  std::vector<std::string> names;  // known models of exactly these sizes
  std::string refused;             // why no kernel here can serve it, whatever the machine; the sizes are unset then

  Geometry sizes{};
  std::vector<bool> sparse, full;  // [layers] attends by sparse MLA; has an indexer of its own. Empty without a file.
  int mtp_layers = 0;
  std::int64_t max_position = 0;
  double norm_eps = 0;
  std::string rope_source;  // where the indexer's rope style is from

  std::string weights;  // "BF16", "FP8", "NVFP4", "AWQ 4 bit"
  bool quantised = false;
  std::int64_t weight_bytes = 0;  // of the whole checkpoint; 0: not known
  std::string weight_source;
  std::string kv_dtype = "bfloat16";  // what `auto` becomes in an engine: bfloat16, fp8, or a name of its own
  std::string kv_source = "no KV dtype in the checkpoint";
  std::string run_refuses;  // why `sievemla run` does not take it; empty: it does

  std::vector<Finding> findings;
};

// A config.json, or a directory with one. BadFile where it cannot be read; an unknown model type is no error.
Model read_model(const std::string& path);
Model known_model(const Geometry& sizes);

// ---- the machine: doctor_machine.cc -----------------------------------------------------------------

struct Gpu {
  std::string name;               // empty: asked for by architecture
  int capability = 0;             // 10 * major + minor
  std::int64_t memory_bytes = 0;  // 0: not known
};

struct Package {
  std::string name, version;
};

// An attribute of vLLM that the installed plugin replaces.
struct Patch {
  std::string what, when, why;
};

// A release of vLLM that the installed plugin was written for, or refuses.
struct Release {
  std::string version, build;       // build: cuda | cpu
  std::vector<std::string> models;  // model types that it serves there
  std::string refused;              // why it serves none; empty: it does
};

struct Machine {
  std::string driver;          // "580.159.04"; empty: none
  int driver_cuda = 0;         // newest CUDA that the driver serves, 1000 * major + 10 * minor
  std::string driver_problem;  // why there is none, or why it does not answer
  std::vector<Gpu> gpus;       // those that CUDA_VISIBLE_DEVICES shows
  std::string cuda_toolkit;    // "13.0.2"; empty: none found
  std::string python;          // its interpreter, else that on PATH; empty: none
  std::vector<Package> packages;
  std::vector<Patch> patches;     // by sievemla/vllm/patches.json, the plugin's own list
  std::vector<Release> releases;  // by sievemla/vllm/versions.json, likewise
  std::int64_t host_memory_bytes = 0;
};

Machine look_at_machine();

// ---- engines: doctor_engines.cc ---------------------------------------------------------------------

enum class Serves : std::uint8_t { yes, no, unclear };

// What one engine's release does on some GPUs for one stage.
struct EngineRow {
  std::string_view engine;   // vllm | sglang
  std::string_view version;  // of the release that was read
  std::string_view gpus;     // exact capabilities, "80 86 89", or "cpu": never a family or a bound
  std::string_view models;   // model types, "any" = all
  std::string_view kv;       // bfloat16 | fp8 | any
  std::string_view stage;
  Serves serves;
  std::string_view says;    // what runs, or why nothing does
  std::string_view source;  // where that stands
  int index_topk = 0;       // the only one that the row is about; 0: any
};
std::span<const EngineRow> engine_rows();
std::string_view engine_table_date();

// What an engine does with a model on a GPU (capability 0: the CPU): the first row of each stage that applies.
struct EngineAnswer {
  std::string version;
  bool serves = false, refuses = false;  // neither: the table does not say
  std::vector<const EngineRow*> rows;
};
EngineAnswer ask_engine(std::string_view engine, int capability, const Model& model);

// A time of attention that docs/measurements/h200.json holds; read once.
struct Measured {
  int capability;
  std::string device, cache;
  int heads, batch;
  double us;
  std::string name;  // of the case
};
const std::vector<Measured>& measured_attention();

// What a device reaches at most (bench/ceilings.json); read once.
struct Ceiling {
  int capability;
  std::string device, basis, source;  // basis: "measured", or "published" by its vendor
  double tbps, bf16_tflops, e4m3_tflops;
};
const std::vector<Ceiling>& ceilings();

extern const char* const kCeilingsJson;  // the two files, as they were when this was built
extern const char* const kMeasuredJson;

// ---- the verdict: doctor_verdict.cc -----------------------------------------------------------------

// The kernels that a verdict may name: the lists that dispatch reads.
struct Kernels {
  std::span<const kv::WriteLatentKernel> write_latent = kv::write_latent_kernels();
  std::span<const stage::indexer::WriteIndexKeysKernel> write_index_keys = stage::indexer::write_index_keys_kernels();
  std::span<const stage::indexer::IndexQueriesKernel> index_queries = stage::indexer::index_queries_kernels();
  std::span<const stage::indexer::IndexScoresKernel> index_scores = stage::indexer::index_scores_kernels();
  std::span<const stage::topk::TopkKernel> topk = stage::topk::topk_kernels();
  std::span<const stage::topk::PositionsToSlotsKernel> positions_to_slots = stage::topk::positions_to_slots_kernels();
  std::span<const stage::topk::ExpandPoolsKernel> expand_pools = stage::topk::expand_pools_kernels();
  std::span<const stage::attention::AttentionKernel> attention = stage::attention::attention_kernels();
  std::span<const stage::combine::CombineKernel> combine = stage::combine::combine_kernels();
  std::span<const cuda::Config> configs = cuda::configs();
};

struct StageVerdict {
  std::string_view stage;            // write | indexer | topk | attention | combine
  std::vector<std::string> kernels;  // one per function of the stage, the stage's own first
  std::string missing;               // the first function without a kernel, and why; empty: the stage runs
};

// The stages of a layer whose cache has one row type.
struct FormatVerdict {
  KvFormat cache;
  IndexFormat index;
  std::int64_t bytes_per_token = 0;  // of all layers
  std::vector<StageVerdict> stages;
  bool runs() const;  // combine aside: it merges ranks of decode context parallelism, which a model runs without
};

// The time of a stage of a layer at a device's ceilings.
struct Floor {
  const Ceiling* on;
  std::string_view stage;
  std::int64_t batch, context;
  double us;
};

struct Target {
  BackendKind backend = BackendKind::cpu;
  Gpu gpu;            // cuda only
  int count = 1;      // such GPUs
  std::string image;  // what of this build loads there: "sm_86 machine code"; empty: nothing
  std::vector<FormatVerdict> formats;
  std::size_t chosen = 0;  // the format that the checkpoint asks for, else the backend's default
  std::vector<const Measured*> times;
  std::vector<Floor> floors;  // of a decode step
  const FormatVerdict& format() const { return formats[chosen]; }
};

struct Question {
  std::string model;                       // path; empty: none
  std::string gpu = "auto";                // auto | cpu | sm_90
  std::int64_t gpus = 0;                   // a node; 0: what there is, or what --tp and --pp need
  std::int64_t nodes = 1, tp = 0, pp = 0;  // 0: from gpus and nodes
  std::int64_t memory_gib = 0;             // of each GPU; 0: as found
  std::string engine;                      // vllm | sglang; empty: none
  std::string partition;                   // VLLM_PP_LAYER_PARTITION
};

struct Plan {
  std::int64_t gpus = 1, nodes = 1, tp = 1, pp = 1;
  std::vector<std::int64_t> partition;     // layers of each pipeline stage; empty: not known
  std::int64_t heads_per_rank = 0;         // 0: they do not divide
  std::int64_t cache_bytes_per_token = 0;  // on the fullest GPU
  std::int64_t weight_bytes = 0;           // of each GPU, shared out evenly; 0: not known
  std::int64_t memory_bytes = 0;           // of the smallest GPU, or of the host; 0: not known
  std::optional<std::int64_t> context;     // tokens that fit beside the weights
};

struct Report {
  bool runs = false;
  std::string by;  // sievemla, or the engine by itself
  std::optional<Model> model;
  Plan plan;
  std::vector<Target> targets;  // one per kind of GPU, or the CPU
  std::size_t worst = 0;        // the target whose stages are reported: the first that does not run, else the first
  std::optional<EngineAnswer> engine;  // of the worst target
  std::vector<Finding> findings;       // blockers first
  std::string command;                 // empty: none
  const Target& target() const { return targets[worst]; }
};

// The image of this build that a GPU of this capability runs: "sm_86 machine code", "compute_80 PTX". Empty: none.
std::string image_for(std::span<const cuda::Config> configs, int capability);
// "sm_120" or "12.0" as 120. InvalidArgument otherwise.
int parse_architecture(const std::string& text);
// InvalidArgument where the question contradicts itself.
Report examine(const Question& question, const Machine& machine, const std::optional<Model>& model,
               const Kernels& kernels = {});

// ---- printing: doctor_print.cc ----------------------------------------------------------------------

std::string text_of_report(const Report& report, const Machine& machine, const Question& question);
Json json_of_report(const Report& report, const Machine& machine, const Question& question);

}  // namespace sievemla::cli::doctor
