// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/backend.h -- where the stages run: the reference (double precision), the CPU, a CUDA device.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sievemla/tensor.h"

namespace sievemla {

enum class BackendKind : std::uint8_t { reference, cpu, cuda };
std::string_view name_of(BackendKind kind);

// A host's own thread pool. `run` calls body(body_context, i, worker) once for every i in [0, n), in any order and from
// any thread, and returns when all are done; worker is in [0, CpuOptions::threads), and no two calls that overlap in
// time have the same worker. A nested call (from inside a body) is legal and may run serially.
struct ParallelFor {
  using Body = void (*)(void* body_context, std::int64_t i, int worker);
  void (*run)(void* context, std::int64_t n, Body body, void* body_context) = nullptr;  // null: OpenMP
  void* context = nullptr;
};

struct CpuOptions {
  // 0: what OpenMP would use (OMP_NUM_THREADS, else all cores). A thread that the system refuses to OpenMP ends the
  // process, by its runtime's own rule; a host that must go on supplies parallel_for.
  int threads = 0;
  ParallelFor host{};
};

// A handle, cheap to copy.
class Backend {
 public:
  // Double precision and simple: the specification. Serves any geometry, on host memory.
  static Backend reference();
  // The host's processor, with the best instruction set that kernels are written for and the machine runs, or the one
  // that SIEVEMLA_CPU_ISA names: portable, avx2, avx512, avx512bf16 or amx. Throws InvalidArgument if threads is
  // negative or above 4096, or for another name; Unsupported for a tier that the machine lacks.
  static Backend cpu(CpuOptions options = {});
  // A CUDA device. Throws Unsupported in a build without CUDA, DeviceError if the device cannot be used.
  static Backend cuda(int device = 0);
  // "reference", "cpu", "cuda", "cuda:1", or "auto" (best()). InvalidArgument lists the names there are.
  static Backend by_name(std::string_view name, CpuOptions options = {});
  // A CUDA device where one can be used, else the CPU. SIEVEMLA_BACKEND overrides. Never the reference by itself.
  static Backend best(CpuOptions options = {});

  BackendKind kind() const { return kind_; }
  std::string name() const;  // as by_name takes it
  Device device() const { return device_; }
  int threads() const { return options_.threads; }  // workers of host code, at least 1
  const ParallelFor& host_parallel_for() const { return options_.host; }

  // Loads every kernel that this device can run, so that nothing is loaded or compiled later, in a graph capture say.
  // Needed once per CUDA device before its first launch (else InvalidArgument); does nothing elsewhere.
  void prepare() const;

 private:
  Backend(BackendKind kind, Device device, CpuOptions options) : kind_(kind), device_(device), options_(options) {}
  BackendKind kind_;
  Device device_;
  CpuOptions options_;
};

// Makes a fresh workspace usable on `stream` (zeroes its tickets). Once per workspace, before its first use.
void workspace_init(const Backend& backend, Workspace workspace, Stream stream = {});

// One row per kernel of this build, whether or not it can run on this machine.
struct KernelInfo {
  std::string_view stage;  // write | indexer | topk | attention | combine
  std::string_view name;   // unique, e.g. "attention_cpu_portable"
  BackendKind backend;
  bool runs_here;          // the processor or device has what it needs
  std::string_view needs;  // what that is, empty = nothing special
};
std::vector<KernelInfo> kernels();

// "0.1.0", and the commit the library was built from ("unknown" outside a git checkout).
std::string_view version();
std::string_view commit();

}  // namespace sievemla
