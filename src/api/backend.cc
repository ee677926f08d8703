// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/api/backend.cc -- which backends there are, and which one a name means.
#include "sievemla/backend.h"

#include <algorithm>
#include <cstdlib>

#include "cpu/isa/isa.h"
#include "cpu/threads.h"
#include "cuda/device.h"
#include "sievemla/error.h"
#include "version.h"
#if SIEVEMLA_WITH_CUDA
#include "attention/registry.h"
#include "combine/registry.h"
#include "cuda/context.cuh"
#include "cuda/launch.h"
#include "indexer/registry.h"
#include "kv/registry.h"
#include "topk/registry.h"
#endif

namespace sievemla {
namespace {

constexpr int kMaxThreads = 4096;  // a bound on scratch: workspaces hold a part per worker

CpuOptions checked(CpuOptions options) {
  expects(options.threads >= 0 && options.threads <= kMaxThreads, "threads must be 0 (automatic) to 4096",
          "backend cpu: threads", options.threads);
  if (options.threads == 0) options.threads = std::min(cpu::default_threads(), kMaxThreads);
  cpu::isa();  // throws if SIEVEMLA_CPU_ISA asks for what is not there
  return options;
}

}  // namespace

std::string_view name_of(BackendKind kind) {
  switch (kind) {
    case BackendKind::reference: return "reference";
    case BackendKind::cpu: return "cpu";
    case BackendKind::cuda: return "cuda";
  }
  return "?";
}

std::string Backend::name() const {
  std::string text(name_of(kind_));
  if (kind_ == BackendKind::cuda && device_.index != 0) text += ":" + std::to_string(device_.index);
  return text;
}

Backend Backend::reference() { return {BackendKind::reference, {}, {1, {}}}; }
Backend Backend::cpu(CpuOptions options) { return {BackendKind::cpu, {}, checked(options)}; }
Backend Backend::cuda(int device) {
  expects(device >= 0, "a device's index must not be negative", "backend cuda", device);
#if SIEVEMLA_WITH_CUDA
  cuda::context(device);
  return {BackendKind::cuda, {DeviceType::cuda, device}, {1, {}}};
#else
  throw Unsupported(error_message("the cuda backend needs a build with CUDA kernels", "backend",
                                  "cuda:" + std::to_string(device) + " in a build without any"));
#endif
}

namespace {

Backend named(std::string_view name, CpuOptions options, const char* where) {
  if (name == "reference") return Backend::reference();
  if (name == "cpu") return Backend::cpu(options);
  if (name == "cuda") return Backend::cuda(0);
  if (name.starts_with("cuda:") && name.size() == 6 && name[5] >= '0' && name[5] <= '9')
    return Backend::cuda(name[5] - '0');
  throw InvalidArgument(
      error_message("a backend is one of auto, reference, cpu, cuda, cuda:0 .. cuda:9", where, "'", name, "'"));
}

}  // namespace

Backend Backend::by_name(std::string_view name, CpuOptions options) {
  return name == "auto" ? best(options) : named(name, options, "backend");
}

Backend Backend::best(CpuOptions options) {
  if (const char* forced = std::getenv("SIEVEMLA_BACKEND"); forced && *forced && std::string_view(forced) != "auto")
    return named(forced, options, "SIEVEMLA_BACKEND");
  for (const cuda::DeviceInfo& device : cuda::machine().devices)
    if (!device.config.empty()) return cuda(device.index);
  return cpu(options);
}

void Backend::prepare() const {
#if SIEVEMLA_WITH_CUDA
  if (kind_ != BackendKind::cuda) return;
  const int config_sm = cuda::context(device_.index).config_sm;
  const cuda::CurrentDevice current(device_.index);
  kv::kv_cuda_prepare(config_sm);
  stage::indexer::indexer_cuda_prepare(config_sm);
  stage::topk::topk_cuda_prepare(config_sm);
  stage::attention::attention_cuda_prepare(config_sm);
  stage::combine::combine_cuda_prepare(config_sm);
  cuda::set_prepared(device_.index);
#endif
}

void workspace_init([[maybe_unused]] const Backend& backend, [[maybe_unused]] Workspace workspace,
                    [[maybe_unused]] Stream stream) {
#if SIEVEMLA_WITH_CUDA
  if (backend.kind() != BackendKind::cuda || workspace.bytes == 0) return;
  const cuda::CurrentDevice current(backend.device().index);
  const auto bytes = static_cast<std::size_t>(std::min(workspace.bytes, cuda::kTicketBytes));
  cuda::check(cudaMemsetAsync(workspace.data, 0, bytes, static_cast<cudaStream_t>(stream.handle)), "workspace_init");
#endif
}

std::string_view version() { return SIEVEMLA_VERSION; }
std::string_view commit() { return SIEVEMLA_COMMIT; }

}  // namespace sievemla
