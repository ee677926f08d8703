// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/program_test.cc -- the program as such: help, wrong use, JSON, streams that are closed or full.
#include <sys/resource.h>

#include "cli/program.h"
#include "cuda/device.h"

namespace sievemla::test {
namespace {

constexpr const char* kCommands[] = {"run", "replay", "verify", "bench", "doctor", "info"};

TEST(Cli, HelpNamesEveryCommandAndStatus) {
  const Outcome outcome = run_program({"--help"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  for (const char* command : kCommands)
    EXPECT_NE(outcome.out.find(std::string("\n  ") + command + " "), std::string::npos);
  for (const char* status : {"0  good", "1  a check failed", "2  wrong use", "3  the device"})
    EXPECT_NE(outcome.out.find(status), std::string::npos) << status;
}

TEST(Cli, HelpOfEachCommand) {
  for (const char* command : kCommands) {
    const Outcome outcome = run_program({command, "--help"});
    EXPECT_EQ(outcome.status, 0) << command;
    EXPECT_NE(outcome.out.find(std::string("sievemla ") + command), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find("--json"), std::string::npos) << command;
  }
}

TEST(Cli, Version) {
  const Outcome outcome = run_program({"--version"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out.rfind("sievemla 0.", 0), 0u) << outcome.out;
}

TEST(Cli, WithoutACommandPrintsHelpAndFails) {
  const Outcome outcome = run_program({});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(is_complaint(outcome.err));
  EXPECT_EQ(outcome.out, run_program({"--help"}).out);
}

TEST(Cli, WrongUse) {
  const std::string model = golden_dir("glm5-tiny").string(), trace = golden("trace-glm5/trace.safetensors");
  struct Case {
    std::vector<std::string> arguments;
    std::string says;
  };
  const Case cases[] = {
      {{"frobnicate"}, "'frobnicate'"},
      {{"--json"}, "'--json'"},
      {{"doctor", "--gpu", "sm_9x"}, "sm_90 or 9.0: got 'sm_9x' (doctor)"},
      {{"doctor", "--gpus", "2", "--tp", "4"}, "at most the GPUs of all nodes: got 4 of 2 (doctor)"},
      {{"doctor", "--engine", "trt"}, "vllm, sglang: got 'trt'"},
      {{"doctor", "--model", "/nowhere"}, "/nowhere"},
      {{"info", "extra"}, "'extra' (info)"},
      {{"info", "--json", "--markdown"}, "--json"},
      {{"replay"}, "TRACE"},
      {{"replay", trace, "--nope"}, "'--nope' (replay)"},
      {{"replay", trace, "--threads"}, "--threads must have a value: got none (replay)"},
      {{"replay", trace, "--backend"}, "--backend must have a value: got none (replay)"},
      {{"replay", trace, "--backend", "cpu", "--backend", "cpu"}, "--backend must be given once: got 2 (replay)"},
      {{"replay", trace, "--threads", "-1"}, "from 0 to 4096: got '-1'"},
      {{"replay", trace, "--threads", "two"}, "got 'two'"},
      {{"replay", trace, "--threads", "4097"}, "got '4097'"},
      {{"replay", trace, "--threads", "99999999999999999999"}, "got '99999999999999999999'"},
      {{"replay", trace, "--backend", "tpu"}, "one of auto, reference, cpu, cuda"},
      {{"replay", trace, "--backend", ""}, "got ''"},
      {{"run", model}, "exactly one of"},
      {{"run", "--prompt", "x"}, "DIR"},
      {{"run", model, "--prompt", "x", "--prompt-ids", "1"}, "got 2"},
      {{"run", model, "--check", "g", "--prompt", "x"}, "got 2"},
      {{"run", model, "--check", "g", "-n", "3"}, "got -n beside it"},
      {{"run", model, "--prompt", "x", "-n", "0"}, "-n must be a whole number from 1"},
      {{"run", model, "--prompt", "x", "-n", "-1"}, "got '-1'"},
      {{"run", model, "--prompt", "x", "-n", "1.5"}, "got '1.5'"},
      {{"run", model, "--prompt", "x", "-n", "99999999999"}, "got '99999999999'"},
      {{"run", model, "--prompt", "x", "--page-size", "0"}, "--page-size"},
      {{"run", model, "--prompt", "x", "--page-size", "1000000"}, "--page-size"},
      {{"run", model, "--prompt", "x", "--chunk", "0"}, "--chunk"},
      {{"run", model, "--prompt", "x", "--chunk", "some"}, "'some'"},
      {{"run", model, "--prompt", "x", "--kv-format", "f16"}, "f32, bf16, fp8_ds_mla, fp8_nope: got 'f16'"},
      {{"run", model, "--prompt", "x", "--index-format", "fp4"}, "f32, bf16, fp8: got 'fp4'"},
      {{"run", model, "--prompt", "x", "--norm-eps", "1e-6"}, "config, hf: got '1e-6'"},
      {{"run", model, "--prompt", "x", "--backend", "gpu"}, "one of auto"},
      {{"verify", "--seed", "-3"}, "--seed"},
      {{"verify", "--backend", "reference"}, "beside the reference"},
      {{"verify", "--trace-dir", trace}, "--trace-dir is a directory"},
      {{"verify", "--trace-dir", "/proc"}, "a directory that can be written to"},
      {{"bench", "--json", "cpu.topk.f32.rows1.len100.k10.t1"}, "--json takes a file, and this looks like a case"},
      {{"verify", "--trace-dir", std::string(5000, 'x')}, "--trace-dir is a directory"},
      {{"bench", "cpu.nothing"}, "cpu.attend.decode"},
      {{"bench", "gpu*"}, "pattern"},
      {{"bench", "cpu.topk.f32.rows1.k3.len5.t1"}, "cpu.topk.f32.rows<n>.len<n>.k<n>.t<n>"},
      {{"bench", "cpu.attend.decode.f16.h64.b1.topk2048.t1"}, "f32, bf16, fp8_ds_mla"},
      {{"bench", "--json", "/nowhere/x.json", "cpu.topk.f32.rows1.len9.k3.t1"}, "/nowhere/x.json"},
  };
  for (const Case& c : cases) expect_failure(c.arguments, 2, {c.says});
}

TEST(Cli, CudaInABuildWithout) {
  if (cuda::machine().built_with_cuda) GTEST_SKIP() << "this build has CUDA";
  for (const std::string name : {"cuda", "cuda:1"}) {
    expect_failure({"run", golden_dir("glm5-tiny").string(), "--prompt", "x", "--backend", name}, 2,
                   {"build with CUDA"});
    expect_failure({"replay", golden("trace-glm5/trace.safetensors"), "--backend", name}, 2, {"build with CUDA"});
  }
}

TEST(Cli, OutOfMemory) {
  // 10^16 bytes, more than an address space has; 4 TB, which Linux may promise.
  expect_failure({"bench", "cpu.topk.f32.rows10000000.len268435456.k1.t1"}, 3, {"memory must suffice"});
  expect_failure({"bench", "cpu.attend.decode.bf16.h64.b100000.topk2048.t1"}, 3,
                 {"memory must suffice for the request: got at least 3", "GiB (bench: cpu.attend.decode"});
}

TEST(Cli, AComplaintIsOneLineWhateverItQuotes) {
  expect_failure({"replay", "no\nsuch\x01 file"}, 2, {"no\\nsuch\\x01 file"});
  expect_failure({"replay", "\xFF\xFE"}, 2);
  expect_failure({"two\nlines"}, 2);
}

TEST(Cli, AComplaintWritesOutWhatATerminalWouldObey) {
  expect_failure({"replay",
                  "a\x1b[1m\xC2\x85"
                  "b\xE2\x80\xA8"
                  "c\xE2\x80\xAE"
                  "d"},
                 2, {"a\\x1b[1m\\xc2\\x85b\\xe2\\x80\\xa8c\\xe2\\x80\\xaed"});
  expect_failure({"replay", "\xC3\xBC\xE2\x80\x93\xE6\x97\xA5"}, 2,
                 {"got No such file", "(\xC3\xBC\xE2\x80\x93\xE6\x97\xA5)"});
}

TEST(Cli, AComplaintIsShortWhateverItQuotes) {
  const TempDir dir;
  const std::string file = (dir / "t").string();
  std::string euros;
  for (int i = 0; i < 100'000; ++i) euros += "\xE2\x82\xAC";
  struct Case {
    std::string name, dtype;
    int end;
    const char* rule;
  };
  const char* const dtypes = "a dtype is one of F32";
  const char* const offsets = "data_offsets must lie within the data";
  for (const Case& c : {Case{"q", std::string(1 << 21, 'x'), 1, dtypes}, Case{"q", euros, 1, dtypes},
                        Case{"q", "a" + euros, 1, dtypes}, Case{"q", std::string(1 << 20, '\x7F'), 1, dtypes},
                        Case{std::string(1 << 20, 'n'), "U8", 2, offsets}, Case{euros, "U8", 2, offsets}}) {
    const Json header = {{"__metadata__", {{"kind", "sparse_mla_trace"}}},
                         {c.name, {{"dtype", c.dtype}, {"shape", {1}}, {"data_offsets", {0, c.end}}}}};
    write_file(file, safetensors(header.dump(), "x"));
    const Outcome outcome = run_program({"replay", file});
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(is_complaint(outcome.err));
    EXPECT_LE(outcome.err.size(), 520u);
    EXPECT_NE(outcome.err.find(c.rule), std::string::npos) << outcome.err;
    EXPECT_NE(outcome.err.find("\xE2\x80\xA6"), std::string::npos) << outcome.err;
    EXPECT_NO_THROW(static_cast<void>(Json(outcome.err).dump()));  // UTF-8: no code point is cut
  }
}

bool maps(pid_t process, const std::string& file) {
  return read_file("/proc/" + std::to_string(process) + "/maps").find(file) != std::string::npos;
}

// The file loses its pages under the program: one line, no signal.
TEST(Cli, AFileThatShrinks) {
  const TempDir dir;
  const fs::path file = dir / "t";
  bool cut = false;
  for (int attempt = 0; attempt < 20 && !cut; ++attempt) {  // until it was mapped when it shrank
    write_file(file, read_file(golden("trace-glm5/trace.safetensors")));
    const Outcome outcome = run_program({"replay", file.string()}, Stdout::captured, [&](pid_t process) {
      for (int i = 0; i < 20'000 && !maps(process, file.string()); ++i) usleep(100);
      fs::resize_file(file, 0);
    });
    EXPECT_TRUE(outcome.status == 0 || outcome.status == 2) << outcome.status << outcome.err;
    cut = outcome.err == "sievemla: a file must not shrink while it is read: got a bus error (a mapped file)\n";
  }
  EXPECT_TRUE(cut);
}

TEST(Cli, InfoListsWhatTheBuildHolds) {
  const Json json = json_of({"info", "--json"}, "info");
  EXPECT_FALSE(json.at("compiler").get<std::string>().empty());
  EXPECT_GE(json.at("cpu").at("cores").get<int>(), 1);
  std::set<std::string> stages;
  for (const Json& kernel : json.at("kernels")) stages.insert(kernel.at("stage"));
  EXPECT_EQ(stages, (std::set<std::string>{"write", "indexer", "topk", "attention", "combine"}));
  EXPECT_EQ(json.at("kv_formats").size(), 4u);
  EXPECT_FALSE(json.at("geometries").empty());
  for (const Json& backend : json.at("backends")) {
    if (backend.at("name") == "cuda") continue;
    EXPECT_TRUE(backend.at("usable")) << backend;
  }
  const Json& cuda = json.at("cuda");
  EXPECT_TRUE(cuda.at("devices").is_array());
  EXPECT_EQ(cuda.at("devices").empty(), !cuda.at("problem").get<std::string>().empty()) << cuda;
  const std::string text = run_program({"info"}).out;
  EXPECT_NE(text.find("attention_reference"), std::string::npos);
  EXPECT_NE(
      text.find(cuda.at("built_with_cuda") ? "\ndevices    CUDA runtime" : "\ndevices    a CPU build: no CUDA in it."),
      std::string::npos)
      << text;
  EXPECT_NE(run_program({"info", "--markdown"}).out.find("| attention | attention_reference |"), std::string::npos);
}

TEST(CliStreams, ClosedStdoutIsAnError) {
  const Outcome outcome = run_program({"info"}, Stdout::closed);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(is_complaint(outcome.err));
  EXPECT_NE(outcome.err.find("Bad file descriptor (stdout)"), std::string::npos) << outcome.err;
}

TEST(CliStreams, FullDiskIsAnError) {
  const Outcome outcome = run_program({"info"}, Stdout::full);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("No space left on device (stdout)"), std::string::npos) << outcome.err;
}

TEST(CliStreams, AReaderThatLeftIsNone) {
  const Outcome outcome = run_program({"info"}, Stdout::pipe_without_reader);
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
}

// A file that is opened must not become stdout by taking its number.
TEST(CliStreams, ClosedStdoutDoesNotWriteIntoFiles) {
  const TempDir dir;
  const std::string file = (dir / "bench.json").string();
  const Outcome outcome = run_program({"bench", "--json", file, "cpu.topk.f32.rows1.len9.k3.t1"}, Stdout::closed);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_FALSE(Json::parse(read_file(file), nullptr, false).is_discarded()) << read_file(file);
}

// Before minutes of loading: of processor time, as other work may have the machine.
TEST(Cli, DoctorAnswersWithinASecond) {
  if (*SIEVEMLA_SANITIZED) GTEST_SKIP() << "a sanitizer's time is its own";
  const auto seconds = [] {
    rusage used{};
    getrusage(RUSAGE_CHILDREN, &used);
    return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
  };
  const double before = seconds();
  run_program({"doctor", "--model", std::string(SIEVEMLA_GOLDEN_DIR) + "/glm5-tiny", "--engine", "vllm"});
  EXPECT_LT(seconds() - before, 1);
}

}  // namespace
}  // namespace sievemla::test
