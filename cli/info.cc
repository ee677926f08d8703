// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/info.cc -- sievemla info: what this build is, what this machine is, and which kernels run here.
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cuda/device.h"
#include "sievemla/error.h"
#include "sievemla/geometry.h"
#include "sievemla/kv_format.h"

namespace sievemla::cli {
namespace {

struct Options {
  bool json = false, markdown = false;
};

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

struct BackendState {
  std::string name;
  std::string state;  // empty: usable; else why not
};

std::vector<BackendState> backends() {
  std::vector<BackendState> all;
  for (const BackendKind kind : {BackendKind::reference, BackendKind::cpu, BackendKind::cuda}) {
    const std::string name(name_of(kind));
    try {
      Backend::by_name(name);
      all.push_back({name, ""});
    } catch (const Error& why) {
      all.push_back({name, why.what()});
    }
  }
  return all;
}

std::string count(int n) { return n < 0 ? "any" : std::to_string(n); }
std::string latent_width(const KvFormatInfo& f) { return f.latent == 0 ? "any" : std::to_string(f.latent); }

// Bytes of a row at the format's own widths, or at 512 | 64 where any will do.
std::int64_t row_bytes(const KvFormatInfo& f) {
  return f.row_bytes(f.latent ? f.latent : 512, f.rope < 0 ? 64 : f.rope);
}

// 12040 -> "12.4"; empty if there is none.
std::string version_text(int version) {
  return version == 0 ? "" : fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// What CUDA finds here, line by line: versions, and each device with the image that runs on it.
std::string devices_text() {
  const cuda::Machine gpus = cuda::machine();
  if (!gpus.built_with_cuda)
    return "devices    a CPU build: no CUDA in it. With a CUDA 13 toolkit, cmake -DSIEVEMLA_CUDA=ON\n"
           "           (pip install . -C cmake.define.SIEVEMLA_CUDA=ON) builds it in, GPU or not\n";
  std::string text = fmt::format("devices    CUDA runtime {}, driver {}{}\n", version_text(gpus.runtime_version),
                                 gpus.driver_version == 0 ? "none" : version_text(gpus.driver_version),
                                 gpus.problem.empty() ? "" : ": " + gpus.problem);
  for (const cuda::DeviceInfo& d : gpus.devices)
    text += fmt::format("cuda:{:<4}  {}, compute {}.{}, {} multiprocessors, {:.1f} GiB: {}\n", d.index, d.name,
                        d.capability / 10, d.capability % 10, d.multiprocessors,
                        static_cast<double>(d.memory_bytes) / 0x1p30,
                        d.config.empty() ? d.problem : d.config + ", " + d.image);
  return text;
}

Json to_json() {
  Json json = envelope("info");
  json["compiler"] = kCompiler;
  const Machine machine = this_machine();
  json["cpu"] = {{"name", machine.cpu},
                 {"cores", machine.cores},
                 {"isa", machine.isa},
                 {"tiers", machine.tiers},
                 {"best_tier", machine.best_tier}};
  const cuda::Machine gpus = cuda::machine();
  Json& found = json["cuda"] = {{"built_with_cuda", gpus.built_with_cuda},
                                {"runtime", version_text(gpus.runtime_version)},
                                {"driver", version_text(gpus.driver_version)},
                                {"problem", gpus.problem},
                                {"devices", Json::array()}};
  for (const cuda::DeviceInfo& d : gpus.devices)
    found["devices"].push_back({{"index", d.index},
                                {"name", d.name},
                                {"capability", d.capability},
                                {"multiprocessors", d.multiprocessors},
                                {"memory_bytes", d.memory_bytes},
                                {"smem_bytes", d.smem_bytes},
                                {"config", d.config},
                                {"image", d.image},
                                {"problem", d.problem}});
  json["backends"] = Json::array();
  for (const BackendState& b : backends())
    json["backends"].push_back({{"name", b.name}, {"usable", b.state.empty()}, {"reason", b.state}});
  json["kernels"] = Json::array();
  for (const KernelInfo& k : kernels())
    json["kernels"].push_back({{"stage", k.stage},
                               {"name", k.name},
                               {"backend", name_of(k.backend)},
                               {"runs_here", k.runs_here},
                               {"needs", k.needs}});
  json["kv_formats"] = Json::array();
  for (const KvFormatInfo& f : kv_formats())
    json["kv_formats"].push_back(
        {{"name", f.name}, {"storage", name_of(f.storage)}, {"row_bytes", row_bytes(f)}, {"source", f.source}});
  json["geometries"] = Json::array();
  for (const Geometry& g : geometries())
    json["geometries"].push_back({{"name", g.name},
                                  {"model_type", g.model_type},
                                  {"layers", g.layers},
                                  {"full_layers", g.full_layers},
                                  {"heads", g.heads},
                                  {"latent", g.latent},
                                  {"rope", g.rope},
                                  {"nope", g.nope},
                                  {"v", g.v},
                                  {"index_heads", g.index_heads},
                                  {"index_topk", g.index_topk},
                                  {"index_kpool", g.index_kpool},
                                  {"index_rope", name_of(g.index_rope)}});
  return json;
}

Table kernel_table() {
  Table table({{"stage"}, {"kernel"}, {"backend"}, {"runs here"}, {"needs"}});
  for (const KernelInfo& k : kernels())
    table.row({std::string(k.stage), std::string(k.name), std::string(name_of(k.backend)), k.runs_here ? "yes" : "no",
               k.needs.empty() ? "nothing special" : std::string(k.needs)});
  return table;
}

Table format_table() {
  Table table({{"row type"},
               {"storage"},
               {"latent", Table::right},
               {"rope", Table::right},
               {"bytes", Table::right},
               {"source"}});
  for (const KvFormatInfo& f : kv_formats())
    table.row({std::string(f.name), name_of(f.storage), latent_width(f), count(f.rope), std::to_string(row_bytes(f)),
               std::string(f.source)});
  return table;
}

Table geometry_table() {
  Table table({{"model"},
               {"model_type"},
               {"layers (full)"},
               {"heads", Table::right},
               {"row"},
               {"nope", Table::right},
               {"v", Table::right},
               {"index heads", Table::right},
               {"top-k", Table::right},
               {"pool", Table::right},
               {"index rope"}});
  for (const Geometry& g : geometries())
    table.row({std::string(g.name), std::string(g.model_type), fmt::format("{} ({})", g.layers, g.full_layers),
               std::to_string(g.heads), fmt::format("{} + {}", g.latent, g.rope), std::to_string(g.nope),
               std::to_string(g.v), std::to_string(g.index_heads), std::to_string(g.index_topk),
               std::to_string(g.index_kpool), std::string(name_of(g.index_rope))});
  return table;
}

void print_tables() {
  const Machine machine = this_machine();
  print("sievemla {} ({}), {}\n", version(), commit(), kCompiler);
  print("cpu        {}, {} cores: {}\n", machine.cpu, machine.cores, fmt::format("{}", fmt::join(machine.isa, " ")));
  print("tiers      {}; best: {}\n", fmt::format("{}", fmt::join(machine.tiers, " ")), machine.best_tier);
  for (const BackendState& b : backends()) print("{:<9}  {}\n", b.name, b.state.empty() ? "usable" : b.state);
  print(devices_text());
  print("\n{}\n{}\n{}", kernel_table().text(), format_table().text(), geometry_table().text());
}

void print_markdown() {
  print("### Kernels\n\n{}\n### Row types\n\n{}\n### Models\n\n{}", kernel_table().markdown(),
        format_table().markdown(), geometry_table().markdown());
}

}  // namespace

Action add_info(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("info", "What this build holds, and which of it runs on this machine");
  auto* json = command->add_flag("--json", options->json, "Print JSON");
  command->add_flag("--markdown", options->markdown, "Print the tables as Markdown")->excludes(json);
  return [options] {
    if (options->json) print(text_of(to_json()));
    else if (options->markdown) print_markdown();
    else print_tables();
    return kGood;
  };
}

}  // namespace sievemla::cli
