// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/cli/bench_test.cc -- sievemla bench: the names of its cases, and what it writes.
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "cli/program.h"
#include "cpu/isa/isa.h"
#include "cuda/device.h"

namespace sievemla::test {
namespace {

TEST(CliBench, NamesThatOtherProgramsUse) {
  const std::string list = run_program({"bench", "--list"}).out;
  for (const char* name :
       {"cpu.attend.decode.bf16.h64.b1.topk2048.t1\n", "cpu.attend.decode.fp8_ds_mla.h64.b1.topk2048.t1\n",
        "cpu.index.decode.fp8.h32.b1.ctx32768.t1\n", "cpu.index.decode.fp8.h64.b1.ctx32768.t1\n",
        "cpu.topk.f32.rows1.len131072.k2048.t1\n", "cpu.attend.dense.bf16.h64.b1.ctx8192.t1\n"})
    EXPECT_NE(list.find(name), std::string::npos) << name;
}

TEST(CliBench, PatternsAndThreads) {
  const std::string topk = run_program({"bench", "--list", "--threads", "3", "cpu.topk.*", "*.k2048.t3"}).out;
  EXPECT_NE(topk.find("cpu.topk.f32.rows1.len131072.k2048.t3\n"), std::string::npos);
  EXPECT_NE(topk.find("cpu.chain.fp8.h32.b1.ctx32768.k2048.t3\n"), std::string::npos);
  EXPECT_EQ(topk.find("attend"), std::string::npos);
  EXPECT_EQ(topk.find("t1\n"), std::string::npos);
}

// Those of a GPU, which need none to be listed.
TEST(CliBench, NamesOfTheGpu) {
  const std::string list = run_program({"bench", "--list", "--backend", "cuda"}).out;
  EXPECT_EQ(std::count(list.begin(), list.end(), '\n'), 107);
  for (const char* name : {"attend.decode.bf16.h64.b1.topk2048.graph\n", "index.decode.fp8.h32.mixed\n",
                           "step.fp8.h32.H64.b64.ctx65536.k2048\n", "topk.f32.rows1.len1048576.k2048\n"})
    EXPECT_NE(list.find(name), std::string::npos) << name;
  const std::string own = run_program({"bench", "--list", "attend.dense.fp8_ds_mla.h3.b2.ctx65.warm"}).out;
  EXPECT_EQ(own, "attend.dense.fp8_ds_mla.h3.b2.ctx65.warm\n");
  expect_failure({"bench", "index.decode.fp8.h32.odd"}, 2, {"index.decode.fp8.h<n>.b<n>.ctx<n>"});
  if (!cuda::machine().built_with_cuda) expect_failure({"bench", "topk.f32.rows1.len9.k3"}, 2, {"CUDA"});
}

struct Work {
  const char* name;
  double flops, bytes;
};

// Small cases of every kind: each is right, and its work is counted as the name says.
TEST(CliBench, EveryKindIsRightAndCounted) {
  const double qk_pv = 576 + 512;
  const Work works[] = {
      {"cpu.attend.prefill.bf16.h2.s3.kv70.topk16.t1", 2 * 2 * 3 * 16 * qk_pv, 3 * 16 * 1152.},
      {"cpu.attend.dense.fp8_ds_mla.h3.b2.ctx65.t2", 2 * 3 * 2 * 65 * qk_pv, 2 * 65 * 656.},
      {"cpu.index.decode.fp8.h4.b2.ctx65.t1", 2. * 4 * 128 * 2 * 65, 132. * 2 * 65},
      {"cpu.index.prefill.fp8.h4.s3.kv70.t1", 2. * 4 * 128 * (68 + 69 + 70), 4. * (68 + 69 + 70)},
      {"cpu.topk.f32.rows3.len200.k20.t1", 0, 4. * 3 * 200},
      {"cpu.select.prefill.fp8.h4.s3.kv70.k8.t1", 2. * 4 * 128 * (68 + 69 + 70), 4. * (68 + 69 + 70)},
      {"cpu.chain.fp8.h4.b2.ctx65.k8.t2", 2. * 4 * 128 * 2 * 65, 132. * 2 * 65},
      {"cpu.step.fp8.h4.H2.b2.ctx65.k8.t1", 2. * 4 * 128 * 2 * 65 + 2 * 2 * 2 * 8 * qk_pv,
       132. * 2 * 65 + 2 * 8 * 656.},
      {"cpu.kv.write.fp8_ds_mla.n9.t1", 0, 9. * (656 + 1152)},
      {"cpu.kv.gather.f32.n9.t2", 0, 9. * (2304 + 1152)},
  };
  const TempDir dir;
  const std::string file = (dir / "bench.json").string();
  std::vector<std::string> arguments = {"bench", "--json", file};
  for (const Work& work : works) arguments.push_back(work.name);
  const Outcome outcome = run_program(arguments);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find(works[0].name), std::string::npos);

  const Json json = Json::parse(read_file(file));
  EXPECT_EQ(json.at("schema"), 1);
  EXPECT_EQ(json.at("kind"), "bench");
  EXPECT_FALSE(json.at("cpu").get<std::string>().empty());
  EXPECT_FALSE(json.contains("gpu"));
  EXPECT_TRUE(json.at("failed").empty());
  ASSERT_EQ(json.at("cases").size(), std::size(works));
  for (std::size_t i = 0; i < std::size(works); ++i) {
    const Json& row = json.at("cases")[i];
    SCOPED_TRACE(works[i].name);
    EXPECT_EQ(row.at("case"), works[i].name);
    const double us = row.at("us");
    EXPECT_GT(us, 0);
    EXPECT_LE(row.at("us_min"), row.at("us_p10"));
    EXPECT_LE(row.at("us_p10"), row.at("us"));
    EXPECT_GE(row.at("us_p90"), row.at("us"));
    EXPECT_GE(row.at("runs"), 10);
    EXPECT_NEAR(row.value("tflops", 0.) * us * 1e6, works[i].flops, works[i].flops * 1e-3);  // 4 digits are written
    EXPECT_NEAR(row.at("tbps").get<double>() * us * 1e6, works[i].bytes, works[i].bytes * 1e-3);
    EXPECT_LE(row.at("error"), 0.005);
    EXPECT_EQ(row.at("threads"), works[i].name[std::strlen(works[i].name) - 1] - '0');
    EXPECT_NE(row.at("variant").get<std::string>().find("_cpu"), std::string::npos);  // names the kernels
    // Arithmetic stands beside what the processor does at most.
    ASSERT_EQ(row.contains("of_peak"), works[i].flops > 0);
    if (works[i].flops > 0) {
      const double rate = works[i].flops / row.at("us_min").get<double>() * 1e-3;
      EXPECT_NEAR(row.at("of_peak").get<double>() * row.at("peak_gflops").get<double>(), rate, rate * 6e-3);
    }
  }
}

// A forced tier is the one that runs, or where the machine lacks it every command refuses.
TEST(CliTiers, RunOrAreRefused) {
  const char* before = std::getenv("SIEVEMLA_CPU_ISA");
  const std::string old = before ? before : "";
  const TempDir dir;
  const std::string file = (dir / "bench.json").string();
  for (const cpu::IsaInfo& tier : cpu::kIsas) {
    setenv("SIEVEMLA_CPU_ISA", tier.name, 1);
    if (tier.isa > cpu::machine_tiers().highest) {
      for (const char* command : {"verify", "bench"})
        expect_failure({command}, 2, {tier.needs, "got " + std::string(tier.name)});
      continue;
    }
    const Outcome outcome = run_program({"bench", "--json", file, "cpu.attend.dense.bf16.h2.b1.ctx5.t1"});
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json row = Json::parse(read_file(file)).at("cases").at(0);
    EXPECT_EQ(row.at("tier"), tier.name);
    EXPECT_EQ(row.at("variant"), "attention_cpu_" + std::string(tier.name));
  }
  if (before) setenv("SIEVEMLA_CPU_ISA", old.c_str(), 1);
  else unsetenv("SIEVEMLA_CPU_ISA");
}

TEST(CliBench, SizesThatContradictEachOther) {
  expect_failure({"bench", "cpu.attend.prefill.bf16.h2.s3.kv7.topk16.t1"}, 2, {"16 of 7"});
  expect_failure({"bench", "cpu.index.prefill.fp8.h2.s9.kv7.t1"}, 2, {"9 of 7"});
  expect_failure({"bench", "cpu.kv.write.bf16.n65537.t1"}, 2, {"65537 of 65536"});
  expect_failure({"bench", "cpu.topk.f32.rows1.len10.k3.t0"}, 2, {".t<n>"});
  expect_failure({"bench", "cpu.topk.f32.rows1.len10.k3.t9999"}, 2, {"4096"});
  const unsigned many = 64 * std::max(1u, std::thread::hardware_concurrency()) + 1;  // OpenMP may get no more
  expect_failure({"bench", "cpu.topk.f32.rows1.len10.k3.t" + std::to_string(many)}, 2, {"threads"});
  expect_failure({"bench", "cpu.topk.f32.rows1.len268435457.k3.t1"}, 2, {"n from 1 to 268435456: got"});
  expect_failure({"bench", "cpu.attend.dense.bf16.h200.b1.ctx10.t1"}, 2, {"heads must be 1 to 128"});
  // Before memory is asked for: these would take terabytes.
  expect_failure({"bench", "cpu.attend.decode.bf16.h129.b100000.topk2048.t1"}, 2, {"heads must be 1 to 128: got 129"});
  expect_failure({"bench", "cpu.attend.decode.bf16.h64.b100000.topk32769.t1"}, 2, {"32769 of 32768"});
  expect_failure({"bench", "cpu.step.fp8.h32.H129.b100000.ctx32768.k2048.t1"}, 2, {"got 129"});
  expect_failure({"bench", "cpu.attend.decode.fp8_nope.h64.b100000.topk2048.t1"}, 2, {"rope of 64: got fp8_nope"});
}

TEST(CliBench, FilesThatCannotBeWritten) {
  const TempDir dir;
  const std::string name = "cpu.topk.f32.rows1.len9.k3.t1", rule = "the file for --json must be writable: got ";
  expect_failure({"bench", "--json", dir.path().string(), name}, 2, {rule + "Is a directory (bench: "});
  expect_failure({"bench", "--json", (dir / "no/x").string(), name}, 2, {rule + "No such file or directory (bench: "});
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);  // to open it would wait for a reader
  expect_failure({"bench", "--json", (dir / "pipe").string(), name}, 2, {"written anew after each case: got a pipe"});
  const Outcome full = run_program({"bench", "--json", "/dev/full", name});
  EXPECT_EQ(full.status, 2);
  EXPECT_EQ(full.err, "sievemla: " + rule + "No space left on device (bench: /dev/full)\n");
}

// What the file has is kept as it is, and the rest is run; but not into a file of another program or machine.
TEST(CliBench, ResumeRunsWhatIsMissing) {
  const TempDir dir;
  const std::string file = (dir / "bench.json").string(), first = "cpu.topk.f32.rows1.len9.k3.t1",
                    second = "cpu.topk.f32.rows1.len10.k3.t1";
  const auto run = [&](const std::vector<std::string>& cases) {
    std::vector<std::string> arguments = {"bench", "--ms", "1", "--json", file, "--resume"};
    arguments.insert(arguments.end(), cases.begin(), cases.end());
    EXPECT_EQ(run_program(arguments).status, 0);
    return Json::parse(read_file(file));
  };
  const Json before = run({first}), after = run({first, second});
  ASSERT_EQ(before.at("cases").size(), 1u);
  ASSERT_EQ(after.at("cases").size(), 2u);
  EXPECT_EQ(after.at("cases")[0], before.at("cases")[0]);
  EXPECT_EQ(after.at("cases")[1].at("case"), second);
  EXPECT_GE(after.at("cases")[1].at("spent").at("setup"), 0.);
  Json other = after;
  other["commit"] = "0000000";
  write_file(dir / "bench.json", other.dump());
  expect_failure({"bench", "--json", file, "--resume", second}, 2, {"another commit"});
  write_file(dir / "bench.json", "no JSON");
  expect_failure({"bench", "--json", file, "--resume", second}, 2, {"a file of sievemla bench --json"});
  EXPECT_EQ(read_file(dir / "bench.json"), "no JSON");
  for (const Json& line : {Json(1), Json("x"), Json::array(), Json::object(), Json{{"case", 5}}}) {
    other = after;
    other["cases"] = Json::array({line});
    write_file(dir / "bench.json", other.dump());
    expect_failure({"bench", "--json", file, "--resume", second}, 2, {"a file of sievemla bench --json"});
  }
  expect_failure({"bench", "--resume", second}, 2, {"--resume"});
}

// A run that fails leaves no empty file, and one that was there as it was.
TEST(CliBench, AFailureLeavesNoFile) {
  const TempDir dir;
  write_file(dir / "old", "precious");
  for (const char* file : {"new", "old"})
    expect_failure({"bench", "--json", (dir / file).string(), "cpu.topk.f32.rows10000000.len268435456.k1.t1"}, 3);
  EXPECT_FALSE(fs::exists(dir / "new"));
  EXPECT_EQ(read_file(dir / "old"), "precious");
}

}  // namespace
}  // namespace sievemla::test
