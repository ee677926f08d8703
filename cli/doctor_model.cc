// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/doctor_model.cc -- facts of the model: sizes, layers, weights and cache dtype, from the small files of it.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>

#include "cli/doctor.h"
#include "cli/output.h"
#include "model/config.h"
#include "model/json.h"
#include "model/safetensors.h"
#include "sievemla/error.h"

namespace sievemla::cli::doctor {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr NotYet kNotYet[] = {
    {"deepseek-v4", "deepseek_v4",
     "its cache row (584 bytes: 448 e4m3, 64 bf16 rope, e8m0 scales) and its compressed indexer have no kernels here"},
};

// ---- keys -------------------------------------------------------------------------------------------

// A config's values by key; a model inside a larger one (text_config) has its own keys first.
class Keys {
 public:
  Keys(const json& root, std::string where) : where_(std::move(where)) {
    if (!root.is_object()) throw BadFile(error_message("a config is a JSON object", where_, model::shown(root)));
    if (const auto text = root.find("text_config"); text != root.end() && text->is_object()) objects_.push_back(&*text);
    objects_.push_back(&root);
  }
  const json* find(const char* key) const {
    for (const json* object : objects_)
      if (const auto found = object->find(key); found != object->end() && !found->is_null()) return &*found;
    return nullptr;
  }
  // The outermost object's, which names the model as a whole.
  const json* outer(const char* key) const {
    const auto found = objects_.back()->find(key);
    return found == objects_.back()->end() || found->is_null() ? find(key) : &*found;
  }
  // A whole number in [least, most]; without a default the key is needed.
  std::int64_t whole(const char* key, std::int64_t least, std::int64_t most,
                     std::optional<std::int64_t> otherwise = {}) const {
    const json* found = find(key);
    if (!found && otherwise) return *otherwise;
    if (!found) throw BadFile(error_message("the key is needed", where_ + ": " + key, "none"));
    const bool fits = found->is_number_integer() && found->get<double>() >= static_cast<double>(least) &&
                      found->get<double>() <= static_cast<double>(most);
    if (!fits)
      throw BadFile(error_message(fmt::format("a whole number in [{}, {}] is needed", least, most), where_ + ": " + key,
                                  model::shown(*found)));
    return found->get<std::int64_t>();
  }

 private:
  std::string where_;
  std::vector<const json*> objects_;
};

std::string text_or(const json* value, const std::string& otherwise) {
  return value && value->is_string() ? printable(value->get<std::string>()) : otherwise;
}

// An object's value, or null: for files whose every key is optional.
const json* child(const json* object, const char* key) {
  if (!object || !object->is_object()) return nullptr;
  const auto found = object->find(key);
  return found == object->end() || found->is_null() ? nullptr : &*found;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}
bool contains(const std::string& text, const char* part) { return text.find(part) != text.npos; }

// ---- weights ----------------------------------------------------------------------------------------

// Bits of a parameter, with its share of scales: of routed experts, and of the other matrices.
struct Bits {
  double experts = 16, others = 16;
};

// Names the weights' format and the cache's. `quant` is quantization_config, or what hf_quant_config.json holds.
Bits read_quantisation(const json* quant, const std::string& file, Model& m) {
  if (!quant || !quant->is_object()) return {};
  m.quantised = true;
  const json* nested = child(quant, "quantization");
  const auto find = [&](const char* key) {
    const json* found = child(quant, key);
    return found ? found : child(nested, key);
  };
  const std::string method = lower(text_or(find("quant_method"), nested ? "modelopt" : "unknown"));
  const std::string algorithm = lower(text_or(find("quant_algo"), "")), format = lower(text_or(find("format"), ""));
  std::int64_t bits = 0;
  for (const char* key : {"bits", "w_bit"})
    if (const json* found = find(key); found && found->is_number_integer()) bits = found->get<std::int64_t>();
  if (const json* groups = find("config_groups"); groups && groups->is_object())
    for (const auto& group : *groups)
      if (const json* found = child(child(&group, "weights"), "num_bits"); found && found->is_number_integer())
        bits = found->get<std::int64_t>();

  // The cache: a name (ModelOpt), or a scheme (compressed-tensors).
  const std::string cache = lower(text_or(find("kv_cache_quant_algo"), ""));
  const json* scheme = find("kv_cache_scheme");
  const json* scheme_bits = child(scheme, "num_bits");
  const bool wide = scheme_bits && scheme_bits->is_number_integer() && scheme_bits->get<std::int64_t>() == 8;
  if (!cache.empty() || scheme) {
    m.kv_source = file + (cache.empty() ? ": kv_cache_scheme" : ": kv_cache_quant_algo");
    m.kv_dtype = cache == "none" ? "bfloat16" : !cache.empty() ? cache : text_or(scheme, wide ? "fp8" : "nvfp4");
    if (m.kv_dtype == "fp8_e4m3") m.kv_dtype = "fp8";
  }

  if (algorithm == "nvfp4" || contains(format, "nvfp4") || contains(method, "fp4")) {
    m.weights = "NVFP4";
    return {4 + 8.0 / 16, 16};  // a byte of scale for 16 values
  }
  if (method == "fp8" || algorithm == "fp8" || bits == 8) {
    m.weights = bits == 8 && method != "fp8" && !contains(format, "float") ? method + " 8 bit" : "FP8";
    return {8, 8};
  }
  m.weights = method == "awq" ? "AWQ" : method == "gptq" ? "GPTQ" : method;
  if (bits > 0) m.weights += fmt::format(" {} bit", bits);
  if (bits <= 0 || bits > 16) return {0, 0};
  return {static_cast<double>(bits) + 20.0 / 128, 16};  // a scale and a zero point for 128 values
}

// By arithmetic, where there are no weights to look at.
std::int64_t estimated_bytes(const model::Config& c, int mtp, Bits bits) {
  if (bits.experts == 0) return 0;
  const double hidden = static_cast<double>(c.hidden), heads = static_cast<double>(c.heads);
  const double q_lora = static_cast<double>(c.q_lora), latent = static_cast<double>(c.latent);
  const double nope = static_cast<double>(c.nope), rope = static_cast<double>(c.rope), v = static_cast<double>(c.v);
  const double attention = hidden * (q_lora + latent + rope) + q_lora * heads * (nope + rope) +
                           latent * heads * (nope + v) + heads * v * hidden;
  const double index_heads = static_cast<double>(c.index_heads), index_dim = static_cast<double>(c.index_dim);
  const double indexer = q_lora * index_heads * index_dim + hidden * (index_dim + index_heads);
  const double expert = 3 * hidden * static_cast<double>(c.moe_intermediate);
  const double routed = expert * static_cast<double>(c.experts),
               shared = expert * static_cast<double>(c.shared_experts);
  const double router = hidden * static_cast<double>(c.experts);
  double experts = 0, others = 0;
  for (std::size_t i = 0; i < c.moe.size(); ++i) {
    others += attention + (c.full_indexer[i] ? indexer : 0);
    experts += c.moe[i] ? routed : 0;
    others += c.moe[i] ? shared + router : 3 * hidden * static_cast<double>(c.intermediate);
  }
  experts += mtp * routed;  // an MTP layer is a layer with experts, and a projection of two hidden states
  others += mtp * (attention + indexer + shared + router + 2 * hidden * hidden);
  const double embedding = hidden * static_cast<double>(c.vocab) * (c.tie_word_embeddings ? 1 : 2);
  return std::llround((experts * bits.experts + others * bits.others + embedding * 16) / 8);
}

// The checkpoint's own bytes: its files where all are there, else what its index says. 0: neither.
std::int64_t stored_bytes(const fs::path& directory, Model& m) {
  std::error_code error;
  if (const auto size = fs::file_size(directory / "model.safetensors", error); !error) {
    m.weight_source = "the size of model.safetensors";
    return static_cast<std::int64_t>(size);
  }
  const fs::path index = directory / "model.safetensors.index.json";
  if (!fs::exists(index, error)) return 0;
  const json root = model::load_json(index);
  const json* map = child(&root, "weight_map");
  std::set<std::string> files;
  if (map && map->is_object())
    for (const auto& file : *map)
      if (file.is_string()) files.insert(file.get<std::string>());
  std::int64_t sum = 0;
  std::size_t here = 0;
  for (const std::string& file : files) {
    const auto size = fs::file_size(directory / fs::path(file).filename(), error);
    here += error ? 0 : 1;
    sum += error ? 0 : static_cast<std::int64_t>(size);
  }
  if (here > 0 && here == files.size()) {
    m.weight_source = fmt::format("the sizes of {} safetensors files", files.size());
    return sum;
  }
  if (here > 0)
    m.findings.push_back({Level::warning, fmt::format("{} of the {} safetensors files that the index names are here",
                                                      here, files.size())});
  const json* total = child(child(&root, "metadata"), "total_size");
  const bool usable = total && total->is_number() && total->get<double>() >= 0 && total->get<double>() < 1e18;
  if (usable) m.weight_source = "total_size of model.safetensors.index.json";
  return usable ? static_cast<std::int64_t>(total->get<double>()) : 0;
}

// ---- sizes ------------------------------------------------------------------------------------------

void take_sizes(const model::Config& c, Model& m) {
  Geometry& g = m.sizes;
  const auto small = [](std::int64_t n) { return static_cast<int>(n); };
  g.layers = small(c.layers), g.heads = small(c.heads), g.latent = small(c.latent), g.rope = small(c.rope);
  g.nope = small(c.nope), g.v = small(c.v), g.index_heads = small(c.index_heads), g.index_topk = small(c.index_topk);
  g.index_kpool = 1, g.index_rope = c.index_rope;
  m.sparse.assign(c.full_indexer.size(), true);
  m.full = c.full_indexer;
  m.max_position = c.max_position, m.norm_eps = c.rms_norm_eps;
}

// glm5_next: layers of linear attention between the sparse ones, no rope, indexer keys that stand for a pool of tokens.
void take_hybrid_sizes(const Keys& keys, const std::string& where, Model& m) {
  Geometry& g = m.sizes;
  const auto size = [&](const char* key, int least, std::optional<std::int64_t> otherwise = {}) {
    return static_cast<int>(keys.whole(key, least, 1 << 24, otherwise));
  };
  const int layers = static_cast<int>(keys.whole("num_hidden_layers", 1, 1024));
  g.heads = size("num_attention_heads", 1), g.latent = size("kv_lora_rank", 1), g.rope = size("qk_rope_head_dim", 0);
  g.nope = size("qk_nope_head_dim", 1), g.v = size("v_head_dim", 1), g.index_heads = size("index_n_heads", 1);
  g.index_topk = size("index_topk", 1), g.index_rope = g.rope == 0 ? RopeStyle::none : RopeStyle::interleaved;
  if (!keys.find("index_kpool"))
    m.findings.push_back({Level::warning, "the config has no index_kpool: 4 tokens per indexer key are assumed"});
  g.index_kpool = size("index_kpool", 1, 4);

  const json* types = keys.find("layer_types");
  if (!types || !types->is_array() || types->size() != static_cast<std::size_t>(layers))
    throw BadFile(error_message("a list with one entry per layer is needed", where + ": layer_types",
                                types ? model::shown(*types) : "none"));
  for (const json& type : *types) m.sparse.push_back(type != "linear_attention");
  m.full = m.sparse;
  g.layers = static_cast<int>(std::count(m.sparse.begin(), m.sparse.end(), true));
  if (g.layers == 0)
    throw BadFile(error_message("at least one layer attends by sparse MLA", where + ": layer_types", "none"));
  m.max_position = keys.whole("max_position_embeddings", 1, 1 << 30, 0);
  const json* eps = keys.find("rms_norm_eps");
  m.norm_eps = eps && eps->is_number() ? eps->get<double>() : 0;
}

// Names of the known models whose sizes these are.
void find_names(Model& m) {
  m.sizes.full_layers = static_cast<int>(std::count(m.full.begin(), m.full.end(), true));
  const auto sizes = [](const Geometry& g) {
    return std::tuple(g.model_type, g.layers, g.full_layers, g.heads, g.latent, g.rope, g.nope, g.v, g.index_heads,
                      g.index_topk, g.index_kpool, g.index_rope);
  };
  for (const Geometry& known : geometries())
    if (m.type == known.model_type) m.sizes.model_type = known.model_type;
  for (const Geometry& known : geometries())
    if (sizes(known) == sizes(m.sizes)) m.names.emplace_back(known.name);
}

void find_traps(const Keys& keys, Model& m) {
  const bool glm = m.type == "glm_moe_dsa", stated = keys.find("indexer_rope_interleave") != nullptr;
  m.rope_source = m.sizes.rope == 0 ? "the rows have no rope" : stated ? "indexer_rope_interleave" : "the model type";
  if (glm && !stated)
    m.findings.push_back(
        {Level::warning,
         "the config lacks indexer_rope_interleave: vLLM then turns the indexer's halves, not its pairs, "
         "and selects wrong rows beyond index_topk tokens; add \"indexer_rope_interleave\": true"});
  if (glm && m.norm_eps != 1e-6)
    m.findings.push_back({Level::note, fmt::format("rms_norm_eps is {:g}, and Hugging Face's code uses 1e-06 in the "
                                                   "q_a and kv_a norms all the same: engines follow the config, and "
                                                   "`sievemla run --norm-eps hf` the code",
                                                   m.norm_eps)});
  const std::string dtype = text_or(keys.find("dtype"), text_or(keys.find("torch_dtype"), ""));
  if (dtype == "float16")
    m.findings.push_back(
        {Level::warning, "the model's dtype is float16, and kernels take bf16 queries: --dtype bfloat16"});
}

std::string known_types() {
  std::string list;
  for (const Geometry& g : geometries())
    if (!contains(list, std::string(g.model_type).c_str()))
      list += (list.empty() ? "" : ", ") + std::string(g.model_type);
  return list;
}

}  // namespace

std::span<const NotYet> not_yet() { return kNotYet; }

Model known_model(const Geometry& sizes) {
  Model m;
  m.type = sizes.model_type;
  m.names = {std::string(sizes.name)};
  m.sizes = sizes;
  m.rope_source = "the model type";
  return m;
}

Model read_model(const std::string& path) {
  std::error_code error;
  const bool directory = fs::is_directory(path, error);
  const fs::path file = directory ? fs::path(path) / "config.json" : fs::path(path);
  const std::string text = model::load_text(file);
  const json root = model::parse_json(text, file.string());
  const bool checkpoint = file.filename() == "config.json";  // whose other files lie beside it
  const Keys keys(root, file.string());

  Model m;
  m.path = directory ? path : file.has_parent_path() ? file.parent_path().string() : ".";
  m.type = text_or(keys.outer("model_type"), "");
  m.weights = "BF16";
  for (const NotYet& row : not_yet())
    if (m.type == row.model_type) m.refused = fmt::format("{} is not served yet: {}", row.name, row.reason);
  bool known = false;
  for (const Geometry& row : geometries()) known |= m.type == row.model_type;
  if (m.refused.empty() && !known)
    m.refused = fmt::format("the model type '{}' is not one of those with sparse MLA that are known here: {}", m.type,
                            known_types());
  if (!m.refused.empty()) return m;

  m.mtp_layers = static_cast<int>(keys.whole("num_nextn_predict_layers", 0, 64, 0));
  const json* quant = keys.outer("quantization_config");
  std::string quant_file = "config.json";
  json other;
  const fs::path sidecar = file.parent_path() / "hf_quant_config.json";
  if (checkpoint && fs::exists(sidecar, error)) {
    other = model::load_json(sidecar);
    if (!quant || !child(quant, "kv_cache_quant_algo")) quant = &other, quant_file = "hf_quant_config.json";
  }
  const Bits bits = read_quantisation(quant, quant_file, m);
  if (checkpoint) m.weight_bytes = stored_bytes(file.parent_path(), m);

  if (m.type == "glm5_next") {
    take_hybrid_sizes(keys, file.string(), m);
    m.run_refuses = "sievemla run decodes glm_moe_dsa and deepseek_v32; other layers of this model are an engine's";
  } else {
    const model::Config config = model::parse_config(text, file.string());
    take_sizes(config, m);
    if (m.weight_bytes == 0) {
      m.weight_bytes = estimated_bytes(config, m.mtp_layers, bits);
      if (m.weight_bytes > 0) m.weight_source = "an estimate from the config";
    }
    if (m.quantised) m.run_refuses = "sievemla run reads F32, BF16 and F16 weights, and these are " + m.weights;
  }
  find_names(m);
  find_traps(keys, m);
  return m;
}

}  // namespace sievemla::cli::doctor
