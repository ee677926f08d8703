// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/doctor.cc -- sievemla doctor: whether a model runs here, before its weights are loaded.
#include "cli/doctor.h"

#include <algorithm>
#include <cstdlib>

#include "cli/options.h"
#include "sievemla/error.h"

namespace sievemla::cli {
namespace {

struct Options {
  doctor::Question question;
  bool strict = false, json = false;
};

int examine(const Options& o) {
  doctor::Question question = o.question;
  if (const char* partition = std::getenv("VLLM_PP_LAYER_PARTITION")) question.partition = partition;
  if (question.gpu != "auto" && question.gpu != "cpu") doctor::parse_architecture(question.gpu);
  std::optional<doctor::Model> model;
  if (!question.model.empty()) model = doctor::read_model(question.model);
  const doctor::Machine machine = doctor::look_at_machine();
  const doctor::Report report = doctor::examine(question, machine, model);
  if (o.json) print(text_of(json_of_report(report, machine, question)));
  else print(text_of_report(report, machine, question));

  const auto found = std::find_if(report.findings.begin(), report.findings.end(), [&](const doctor::Finding& f) {
    return f.level == doctor::Level::blocker || (o.strict && f.level == doctor::Level::warning);
  });
  const std::string_view rule = report.runs ? "--strict wants no warning" : "the model must run here";
  const std::string got = found != report.findings.end() ? found->text : "a stage without a kernel";
  if (!report.runs || (o.strict && found != report.findings.end()))
    throw CheckFailed(error_message(rule, "doctor", got));
  return kGood;
}

}  // namespace

Action add_doctor(CLI::App& app) {
  auto options = std::make_shared<Options>();
  doctor::Question& q = options->question;
  CLI::App* command = app.add_subcommand("doctor", "Whether a model runs on a GPU or this machine, before loading it");
  command->add_option("--model", q.model, "config.json, or a checkpoint's directory")->type_name("PATH");
  command->add_option("--gpu", q.gpu, "auto: those of this machine, else the CPU; cpu; or sm_80, sm_120, …")
      ->type_name("ARCH")
      ->default_str(q.gpu);
  add_integer(*command, "--gpus", q.gpus, 0, 1024, "GPUs of a node; 0: those found, or as many as --tp and --pp need");
  add_integer(*command, "--nodes", q.nodes, 1, 1024, "Nodes");
  add_integer(*command, "--tp", q.tp, 0, 1024, "Tensor-parallel ranks; 0: all GPUs of a pipeline stage");
  add_integer(*command, "--pp", q.pp, 0, 1024, "Pipeline stages; 0: one per node");
  add_integer(*command, "--memory", q.memory_gib, 0, 1 << 20, "GiB of each GPU; 0: as found");
  add_choice(*command, "--engine", q.engine, {"vllm", "sglang"}, "The engine that serves; without: sievemla run");
  command->add_flag("--strict", options->strict, "Exit with 1 on warnings too");
  command->add_flag("--json", options->json, "Print JSON");
  return [options] { return examine(*options); };
}

}  // namespace sievemla::cli
