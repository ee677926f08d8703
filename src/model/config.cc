// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/config.cc -- the keys, their bounds and their defaults, in two tables; then what must hold between them.
#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "model/json.h"
#include "model/safetensors.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

using nlohmann::json;

constexpr std::int64_t kRequired = -1;

// Whole numbers. The bounds are far above any real model and keep every product of a few of them within 63 bits.
struct SizeKey {
  const char* key;
  std::int64_t Config::* member;
  std::int64_t least, most;
  std::int64_t glm, deepseek;  // default of each model type where there is one
};
constexpr SizeKey kSizes[] = {
    {"vocab_size", &Config::vocab, 1, 1 << 24, kRequired, kRequired},
    {"hidden_size", &Config::hidden, 1, 1 << 20, kRequired, kRequired},
    {"num_hidden_layers", &Config::layers, 1, 1024, kRequired, kRequired},
    {"num_attention_heads", &Config::heads, 1, 4096, kRequired, kRequired},
    {"intermediate_size", &Config::intermediate, 1, 1 << 20, kRequired, kRequired},
    {"moe_intermediate_size", &Config::moe_intermediate, 1, 1 << 20, kRequired, kRequired},
    {"n_routed_experts", &Config::experts, 1, 1 << 16, kRequired, kRequired},
    {"n_shared_experts", &Config::shared_experts, 0, 1024, 1, 1},
    {"num_experts_per_tok", &Config::experts_per_token, 1, 1 << 16, kRequired, kRequired},
    {"n_group", &Config::expert_groups, 1, 1 << 16, 1, 8},
    {"topk_group", &Config::topk_groups, 1, 1 << 16, 1, 4},
    {"q_lora_rank", &Config::q_lora, 1, 1 << 16, kRequired, kRequired},
    {"kv_lora_rank", &Config::latent, 1, 1 << 16, kRequired, kRequired},
    {"qk_nope_head_dim", &Config::nope, 1, 1 << 16, kRequired, kRequired},
    {"qk_rope_head_dim", &Config::rope, 2, 1 << 16, kRequired, kRequired},
    {"v_head_dim", &Config::v, 1, 1 << 16, kRequired, kRequired},
    {"index_n_heads", &Config::index_heads, 1, 4096, kRequired, kRequired},
    {"index_head_dim", &Config::index_dim, 2, 1 << 16, kRequired, kRequired},
    {"index_topk", &Config::index_topk, 1, 1 << 24, kRequired, kRequired},
    {"max_position_embeddings", &Config::max_position, 1, 1 << 30, kRequired, kRequired},
};

// Keys that other models of the family vary, and this decoder has one meaning for.
struct FixedKey {
  const char* key;
  const char* value;  // as JSON; an absent key means the same
};
constexpr FixedKey kFixed[] = {
    {"hidden_act", R"("silu")"},      {"attention_bias", "false"}, {"scoring_func", R"("sigmoid")"},
    {"topk_method", R"("noaux_tc")"}, {"moe_layer_freq", "1"},     {"rope_interleave", "true"},
};

struct ModelType {
  const char* name;
  RopeStyle index_rope;
  std::int64_t SizeKey::* default_size;
  bool shares_selection;  // layers may go without an indexer of their own
};
constexpr ModelType kModelTypes[] = {
    {"glm_moe_dsa", RopeStyle::interleaved, &SizeKey::glm, true},
    {"deepseek_v32", RopeStyle::half_split, &SizeKey::deepseek, false},
};

// Values by key; a model inside a larger one (text_config) has its own keys first.
class Reader {
 public:
  Reader(const json& root, const std::string& where) : where_(where) {
    if (!root.is_object()) bad("", "a config is a JSON object", shown(root));
    if (const auto text = root.find("text_config"); text != root.end() && !text->is_null()) {
      if (!text->is_object()) bad("text_config", "an object is needed", shown(*text));
      objects_.push_back(&*text);
    }
    objects_.push_back(&root);
  }
  Reader(const json& object, const Reader& parent, const std::string& key)
      : where_(parent.where_), prefix_(parent.prefix_ + key + "."), objects_{&object} {}

  template <class... Got>
  [[noreturn]] void bad(const std::string& key, std::string_view rule, const Got&... got) const {
    throw BadFile(error_message(rule, key.empty() ? where_ : where_ + ": " + prefix_ + key, got...));
  }
  // Null counts as absent.
  const json* find(const std::string& key) const {
    for (const json* object : objects_)
      if (const auto found = object->find(key); found != object->end() && !found->is_null()) return &*found;
    return nullptr;
  }
  const json& need(const std::string& key) const {
    if (const json* found = find(key)) return *found;
    bad(key, "the key is needed", "none");
  }
  std::int64_t whole(const std::string& key, const json& value, std::int64_t least, std::int64_t most) const {
    const bool fits = value.is_number_unsigned() ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX)
                                                 : value.is_number_integer();
    if (!fits || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most)
      bad(key, "a whole number in [" + std::to_string(least) + ", " + std::to_string(most) + "] is needed",
          shown(value));
    return value.get<std::int64_t>();
  }
  std::int64_t whole(const std::string& key, std::int64_t least, std::int64_t most, std::int64_t otherwise) const {
    const json* found = find(key);
    return found ? whole(key, *found, least, most) : otherwise;
  }
  double number(const std::string& key, double least, double most, std::optional<double> otherwise = {}) const {
    const json* found = otherwise ? find(key) : &need(key);
    if (!found) return *otherwise;
    const double value = found->is_number() ? found->get<double>() : NAN;
    if (!(value >= least && value <= most)) {
      std::ostringstream rule;
      rule << "a number in [" << least << ", " << most << "] is needed";
      bad(key, rule.str(), shown(*found));
    }
    return value;
  }
  bool flag(const std::string& key, bool otherwise) const {
    const json* found = find(key);
    if (found && !found->is_boolean()) bad(key, "true or false is needed", shown(*found));
    return found ? found->get<bool>() : otherwise;
  }
  std::string text(const std::string& key, const json& value) const {
    if (!value.is_string()) bad(key, "a string is needed", shown(value));
    return value.get<std::string>();
  }

 private:
  std::string where_, prefix_;
  std::vector<const json*> objects_;
};

// A list of one word per layer, as booleans: is it `yes`?
std::vector<bool> layer_words(const Reader& reader, const std::string& key, const json& list, std::int64_t layers,
                              std::string_view yes, std::string_view no) {
  if (!list.is_array() || static_cast<std::int64_t>(list.size()) != layers)
    reader.bad(key, "a list with one entry per layer (" + std::to_string(layers) + ") is needed", shown(list));
  std::vector<bool> out;
  for (const json& word : list) {
    if (word != yes && word != no)
      reader.bad(key, "an entry is " + std::string(yes) + " or " + std::string(no), shown(word));
    out.push_back(word == yes);
  }
  return out;
}

// An explicit list wins over a pattern, and that over frequency and offset.
std::vector<bool> full_indexer(const Reader& reader, std::int64_t layers) {
  std::vector<bool> full;
  std::string key = "indexer_types";
  if (const json* list = reader.find(key)) {
    full = layer_words(reader, key, *list, layers, "full", "shared");
  } else if (const json* pattern = reader.find(key = "index_topk_pattern")) {
    json letters = json::array();
    for (const char letter : reader.text(key, *pattern)) letters.push_back(std::string(1, letter));
    full = layer_words(reader, key, letters, layers, "F", "S");
  } else {
    key = "index_topk_freq";
    const std::int64_t every = std::max<std::int64_t>(reader.whole(key, 0, 1024, 1), 1);
    const std::int64_t offset = reader.whole("index_skip_topk_offset", 0, 1024, 2);
    for (std::int64_t i = 0; i < layers; ++i) full.push_back(std::max<std::int64_t>(i - offset + 1, 0) % every == 0);
  }
  if (!full[0]) reader.bad(key, "layer 0 must have an indexer of its own", "a shared one");
  return full;
}

// rope_parameters, or the older rope_theta and rope_scaling.
RopeConfig rope_config(const Reader& reader, std::int64_t max_position) {
  const json none = json::object();
  const json* object = &none;
  std::string key = "rope_parameters";
  for (const char* name : {"rope_parameters", "rope_scaling"})
    if (const json* found = reader.find(name)) {
      object = found;
      key = name;
      break;
    }
  if (!object->is_object()) reader.bad(key, "an object is needed", shown(*object));
  const Reader inner(*object, reader, key);

  RopeConfig rope;
  rope.theta = (inner.find("rope_theta") ? inner : reader).number("rope_theta", 1.5, 1e12, 10000.0);
  const char* type_key = inner.find("rope_type") ? "rope_type" : "type";
  const json* type = inner.find(type_key);
  const std::string name = type ? inner.text(type_key, *type) : "default";
  if (name != "default" && name != "yarn") inner.bad(type_key, "the rope type is default or yarn", shown(*type));
  rope.yarn = name == "yarn";
  if (!rope.yarn) return rope;
  rope.factor = inner.number("factor", 1, 1e6);
  rope.beta_fast = inner.number("beta_fast", 1e-3, 1e6, 32.0);
  rope.beta_slow = inner.number("beta_slow", 1e-3, 1e6, 1.0);
  rope.mscale = inner.number("mscale", 0, 1e3, 0.0);
  rope.mscale_all_dim = inner.number("mscale_all_dim", 0, 1e3, 0.0);
  rope.attention_factor = inner.number("attention_factor", 1e-3, 1e3, 0.0);
  rope.truncate = inner.flag("truncate", true);
  rope.original_max_position = inner.whole("original_max_position_embeddings", 1, 1 << 30, max_position);
  return rope;
}

void check_sizes(const Config& c, const Reader& reader) {
  const auto must = [&](bool holds, const char* key, const std::string& rule, std::int64_t got) {
    if (!holds) reader.bad(key, rule, got);
  };
  const auto text = [](std::int64_t n) { return std::to_string(n); };
  must(c.rope % 2 == 0, "qk_rope_head_dim", "rope turns pairs, so its width is even", c.rope);
  must(c.index_dim >= c.rope, "index_head_dim",
       "an indexer head is at least as wide as qk_rope_head_dim (" + text(c.rope) + ")", c.index_dim);
  must(c.experts % c.expert_groups == 0, "n_group",
       "the groups must share the experts (" + text(c.experts) + ") evenly", c.expert_groups);
  const std::int64_t per_group = c.experts / c.expert_groups;
  must(c.expert_groups == 1 || per_group >= 2, "n_group",
       "a group's score is the sum of its best two experts, so it has at least two", c.expert_groups);
  must(c.topk_groups <= c.expert_groups, "topk_group", "at most n_group (" + text(c.expert_groups) + ") are chosen",
       c.topk_groups);
  must(c.experts_per_token <= c.topk_groups * per_group, "num_experts_per_tok",
       "the chosen groups have " + text(c.topk_groups * per_group) + " experts", c.experts_per_token);
  const std::int64_t kv_heads = reader.whole("num_key_value_heads", 1, 4096, c.heads);
  must(kv_heads == c.heads, "num_key_value_heads", "MLA has as many as num_attention_heads (" + text(c.heads) + ")",
       kv_heads);
  const std::int64_t qk = reader.whole("qk_head_dim", 1, 1 << 17, c.nope + c.rope);
  must(qk == c.nope + c.rope, "qk_head_dim",
       "it is qk_nope_head_dim + qk_rope_head_dim (" + text(c.nope + c.rope) + ")", qk);
}

}  // namespace

Config parse_config(std::string_view text, const std::string& where) {
  const json root = parse_json(text, where);
  const Reader reader(root, where);
  Config c{};

  c.model_type = reader.text("model_type", reader.need("model_type"));
  const auto* type = std::find_if(std::begin(kModelTypes), std::end(kModelTypes),
                                  [&](const ModelType& row) { return row.name == c.model_type; });
  if (type == std::end(kModelTypes))
    reader.bad("model_type", "the model type is glm_moe_dsa or deepseek_v32", shown(c.model_type));

  for (const SizeKey& size : kSizes) {
    const std::int64_t otherwise = size.*(type->default_size);
    const json* found = otherwise == kRequired ? &reader.need(size.key) : reader.find(size.key);
    c.*(size.member) = found ? reader.whole(size.key, *found, size.least, size.most) : otherwise;
  }
  for (const FixedKey& fixed : kFixed)
    if (const json* found = reader.find(fixed.key); found && *found != json::parse(fixed.value))
      reader.bad(fixed.key, std::string("only ") + fixed.value + " is supported", shown(*found));

  c.rms_norm_eps = reader.number("rms_norm_eps", 1e-12, 1e-1);
  c.routed_scaling_factor = reader.number("routed_scaling_factor", 1e-6, 1e6, 2.5);
  c.norm_topk_prob = reader.flag("norm_topk_prob", true);
  c.tie_word_embeddings = reader.flag("tie_word_embeddings", false);
  c.rope_config = rope_config(reader, c.max_position);
  c.index_rope = type->index_rope;
  if (reader.find("indexer_rope_interleave"))
    c.index_rope = reader.flag("indexer_rope_interleave", true) ? RopeStyle::interleaved : RopeStyle::half_split;

  const std::size_t layers = static_cast<std::size_t>(c.layers);
  c.full_indexer = type->shares_selection ? full_indexer(reader, c.layers) : std::vector<bool>(layers, true);
  if (const json* list = reader.find("mlp_layer_types")) {
    c.moe = layer_words(reader, "mlp_layer_types", *list, c.layers, "sparse", "dense");
  } else {
    const std::int64_t dense = reader.whole("first_k_dense_replace", 0, 1024, 3);
    for (std::int64_t i = 0; i < c.layers; ++i) c.moe.push_back(i >= dense);
  }

  if (const json* eos = reader.find("eos_token_id")) {
    const json list = eos->is_array() ? *eos : json::array({*eos});
    for (const json& id : list) c.eos_token_ids.push_back(reader.whole("eos_token_id", id, 0, INT32_MAX));
  }
  check_sizes(c, reader);
  return c;
}

Config load_config(const std::filesystem::path& file_or_directory) {
  std::error_code error;
  const bool directory = std::filesystem::is_directory(file_or_directory, error);
  const std::filesystem::path path = directory ? file_or_directory / "config.json" : file_or_directory;
  return parse_config(load_text(path), path.string());
}

}  // namespace sievemla::model
