// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// bindings/module.cc -- the functions that python/sievemla calls: the public interface with its structs taken apart.
//
// One order of arguments here, in python/sievemla/_api.py and in torch_ops.py: first what every call needs, then what
// may be left out, then the backend's handle.
#include <sstream>

#include "bindings/tensors.h"
#include "sievemla/sievemla.h"

namespace sievemla::bindings {
namespace {

using std::string;
using Int = std::int64_t;

KvCache kv_cache(const Tensor& pages, const string& format, Int latent, Int rope, const Where& where) {
  return {kv_format_by_name(format), to_int(latent, where), to_int(rope, where), view(pages, where)};
}

IndexCache index_cache(const Tensor& pages, const string& format, const Where& where) {
  return {index_format_by_name(format), view(pages, where)};
}

// The one of `all` that is called `name`.
template <class Value, std::size_t n>
Value by_name(const string& name, const Value (&all)[n], std::string_view (*name_of_value)(Value), const char* rule,
              const Where& where) {
  for (const Value value : all)
    if (name_of_value(value) == name) return value;
  throw InvalidArgument(error_message(rule, where, "'", name, "'"));
}

ScaleRule scale_rule(const string& name, const Where& where) {
  constexpr ScaleRule kAll[] = {ScaleRule::arbitrary, ScaleRule::power_of_two, ScaleRule::engine};
  constexpr auto kName = [](ScaleRule rule) -> std::string_view {
    return rule == ScaleRule::arbitrary ? "arbitrary" : rule == ScaleRule::engine ? "engine" : "power_of_two";
  };
  return by_name<ScaleRule>(name, kAll, kName, "a scale rule is 'arbitrary', 'power_of_two' or 'engine'", where);
}

Rope rope_of(const string& style, const MaybeTensor& positions, const MaybeTensor& cos_sin, const Where& where) {
  constexpr RopeStyle kAll[] = {RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none};
  return {by_name<RopeStyle>(style, kAll, name_of, "a rope style is 'half_split', 'interleaved' or 'none'", where),
          view(positions, where + ".positions"), view(cos_sin, where + ".cos_sin")};
}

Shard shard(Int rank, Int ranks, Int interleave, const Where& where) {
  return {to_int(rank, where), to_int(ranks, where), to_int(interleave, where)};
}

// 0 where there is no such dimension: the call itself says what is wrong then.
Int extent(const TensorView& view, int i) { return i < view.rank ? view.dim(i) : 0; }

// ---- attention, combine -----------------------------------------------------------------------------

void attention(Tensor q, Tensor pages, string format, Int latent, Int rope, double scale, Tensor out, MaybeTensor slots,
               MaybeTensor topk_length, MaybeTensor block_table, MaybeTensor lengths, MaybeTensor q_rope,
               MaybeTensor sink, MaybeTensor lse, MaybeTensor workspace, bool round_weights, bool batch_invariant,
               bool check_indices, Int handle) {
  const Where where = "attention: ";
  expects(slots.has_value() != block_table.has_value(), "exactly one of slots and block_table must be given",
          where + "slots, block_table", slots.has_value() ? "both" : "neither");
  expects(slots.has_value() || lengths.has_value(), "a block_table goes with lengths", where + "lengths", "none");
  AttentionArgs args;
  args.q = view(q, where + "q");
  args.q_rope = view(q_rope, where + "q_rope");
  args.kv = kv_cache(pages, format, latent, rope, where + "kv");
  if (slots.has_value()) args.rows = Slots{view(slots, where + "slots"), view(topk_length, where + "topk_length")};
  else args.rows = BlockTable{view(block_table, where + "block_table"), view(lengths, where + "lengths")};
  args.scale = static_cast<float>(scale);
  args.sink = view(sink, where + "sink");
  args.out = view(out, where + "out");
  args.lse = view(lse, where + "lse");
  args.round_weights = round_weights;
  args.batch_invariant = batch_invariant;
  args.check_indices = check_indices;
  const Backend backend = backend_of(handle, args.out);
  Int needed = 0;
  if (!workspace.has_value()) {
    const Slots* sparse = std::get_if<Slots>(&args.rows);
    const Int lanes = sparse ? extent(sparse->indices, sparse->indices.rank - 1)
                             : extent(std::get<BlockTable>(args.rows).table, 1) * extent(args.kv.pages, 1);
    needed =
        attention_workspace_bytes(backend, {extent(args.q, 0), extent(args.q, 1), lanes, args.kv.latent, args.kv.rope});
  }
  sievemla::attention(backend, args, workspace_of(backend, workspace, needed, where + "workspace"), stream_of(backend));
}

Int attention_workspace_bytes(Int tokens, Int heads, Int lanes, Int latent, Int rope, Int handle) {
  const Where where = "attention_workspace_bytes";
  return sievemla::attention_workspace_bytes(backend_of(handle),
                                             {tokens, heads, lanes, to_int(latent, where), to_int(rope, where)});
}

void combine(Tensor partial_out, Tensor partial_lse, Tensor out, MaybeTensor sink, MaybeTensor lse, Int handle) {
  const Where where = "combine: ";
  const CombineArgs args{view(partial_out, where + "partial_out"), view(partial_lse, where + "partial_lse"),
                         view(sink, where + "sink"), view(out, where + "out"), view(lse, where + "lse")};
  const Backend backend = backend_of(handle, args.out);
  sievemla::combine(backend, args, stream_of(backend));
}

// ---- latent cache -----------------------------------------------------------------------------------

void write_latent(Tensor latent, Tensor slots, Tensor pages, string format, Int latent_width, Int rope_width,
                  MaybeTensor rope, string scale, Int handle) {
  const Where where = "write_latent: ";
  const WriteLatentArgs args{view(latent, where + "latent"), view(rope, where + "rope"), view(slots, where + "slots"),
                             kv_cache(pages, format, latent_width, rope_width, where + "cache"),
                             scale_rule(scale, where + "scale")};
  const Backend backend = backend_of(handle, args.cache.pages);
  sievemla::write_latent(backend, args, stream_of(backend));
}

void gather_latent(Tensor pages, string format, Int latent, Int rope, Tensor slots, Tensor out, Int handle) {
  const Where where = "gather_latent: ";
  const GatherLatentArgs args{kv_cache(pages, format, latent, rope, where + "cache"), view(slots, where + "slots"),
                              view(out, where + "out")};
  const Backend backend = backend_of(handle, args.out);
  sievemla::gather_latent(backend, args, stream_of(backend));
}

// ---- indexer ----------------------------------------------------------------------------------------

// New keys; none where there is no k. `names`: `where`, or that of a call which has a cache and slots of others too.
WriteIndexKeysArgs keys_of(const MaybeTensor& k, const MaybeTensor& norm_weight, const MaybeTensor& norm_bias,
                           const MaybeTensor& slots, const MaybeTensor& pages, const string& format,
                           const string& rope_style, const MaybeTensor& positions, const MaybeTensor& cos_sin,
                           double norm_eps, const string& scale, bool round_bf16, bool hadamard, const Where& where,
                           const Where& names) {
  WriteIndexKeysArgs keys;
  if (!k.has_value()) return keys;
  expects(pages.has_value(), "keys go with their cache", names + "cache", "none");
  keys.k = view(k, where + "k");
  keys.norm_weight = view(norm_weight, where + "norm_weight");
  keys.norm_bias = view(norm_bias, where + "norm_bias");
  keys.norm_eps = static_cast<float>(norm_eps);
  keys.rope = rope_of(rope_style, positions, cos_sin, names + "rope");
  keys.slots = view(slots, names + "slots");
  keys.cache = index_cache(*pages, format, names + "cache");
  keys.scale = scale_rule(scale, names + "scale");
  keys.round_bf16 = round_bf16, keys.hadamard = hadamard;
  return keys;
}

void write_index_keys(Tensor k, Tensor norm_weight, Tensor norm_bias, Tensor slots, Tensor pages, string format,
                      string rope_style, MaybeTensor positions, MaybeTensor cos_sin, double norm_eps, string scale,
                      bool round_bf16, bool hadamard, Int handle) {
  const Where where = "write_index_keys: ";
  const WriteIndexKeysArgs args = keys_of(k, norm_weight, norm_bias, slots, pages, format, rope_style, positions,
                                          cos_sin, norm_eps, scale, round_bf16, hadamard, where, where);
  const Backend backend = backend_of(handle, args.cache.pages);
  sievemla::write_index_keys(backend, args, stream_of(backend));
}

void write_layer(Tensor latent, Tensor latent_weight, double latent_eps, Tensor slots, Tensor pages, string format,
                 Int latent_width, Int rope_width, string rope_style, MaybeTensor rope, MaybeTensor positions,
                 MaybeTensor cos_sin, string scale, MaybeTensor k, MaybeTensor norm_weight, MaybeTensor norm_bias,
                 MaybeTensor key_slots, MaybeTensor key_pages, string index_format, string key_rope_style,
                 MaybeTensor key_positions, MaybeTensor key_cos_sin, double norm_eps, string key_scale,
                 bool key_round_bf16, bool key_hadamard, MaybeTensor indices, Int handle) {
  const Where where = "write_layer: ";
  WriteLayerArgs args;
  args.latent = {view(latent, where + "latent"), view(rope, where + "rope"), view(slots, where + "slots"),
                 kv_cache(pages, format, latent_width, rope_width, where + "cache"),
                 scale_rule(scale, where + "scale")};
  args.latent_weight = view(latent_weight, where + "latent_weight");
  args.latent_eps = static_cast<float>(latent_eps);
  args.rope = rope_of(rope_style, positions, cos_sin, where + "rope");
  args.keys = keys_of(k, norm_weight, norm_bias, key_slots, key_pages, index_format, key_rope_style, key_positions,
                      key_cos_sin, norm_eps, key_scale, key_round_bf16, key_hadamard, where, where + "key_");
  args.indices = view(indices, where + "indices");
  const Backend backend = backend_of(handle, args.latent.cache.pages);
  sievemla::write_layer(backend, args, stream_of(backend));
}

void gather_index_keys(Tensor pages, string format, Tensor slots, Tensor keys, MaybeTensor scales, Int handle) {
  const Where where = "gather_index_keys: ";
  const GatherIndexKeysArgs args{index_cache(pages, format, where + "cache"), view(slots, where + "slots"),
                                 view(keys, where + "keys"), view(scales, where + "scales")};
  const Backend backend = backend_of(handle, args.keys);
  sievemla::gather_index_keys(backend, args, stream_of(backend));
}

void index_queries(Tensor q, Tensor weights, double weight_scale, string rope_style, Tensor out_q, Tensor out_weights,
                   MaybeTensor positions, MaybeTensor cos_sin, string scale, bool round_bf16, bool hadamard,
                   MaybeTensor k, MaybeTensor norm_weight, MaybeTensor norm_bias, MaybeTensor key_slots,
                   MaybeTensor key_pages, string index_format, string key_rope_style, MaybeTensor key_positions,
                   MaybeTensor key_cos_sin, double norm_eps, string key_scale, bool key_round_bf16, bool key_hadamard,
                   Int handle) {
  const Where where = "index_queries: ";
  IndexQueryArgs args;
  args.q = view(q, where + "q");
  args.weights = view(weights, where + "weights");
  args.weight_scale = static_cast<float>(weight_scale);
  args.rope = rope_of(rope_style, positions, cos_sin, where + "rope");
  args.scale = scale_rule(scale, where + "scale");
  args.out_q = view(out_q, where + "out_q");
  args.out_weights = view(out_weights, where + "out_weights");
  args.round_bf16 = round_bf16, args.hadamard = hadamard;
  args.keys = keys_of(k, norm_weight, norm_bias, key_slots, key_pages, index_format, key_rope_style, key_positions,
                      key_cos_sin, norm_eps, key_scale, key_round_bf16, key_hadamard, where, where + "key_");
  const Backend backend = backend_of(handle, args.out_q);
  sievemla::index_queries(backend, args, stream_of(backend));
}

// Keys are given as pages with a block table, or side by side.
IndexScoreArgs score_args(const Tensor& q, const Tensor& weights, const Tensor& lengths, const MaybeTensor& pages,
                          const string& format, const MaybeTensor& block_table, const MaybeTensor& row_request,
                          const MaybeTensor& keys, const MaybeTensor& scales, const MaybeTensor& starts,
                          const Where& where) {
  IndexScoreArgs args;
  args.q = view(q, where + "q");
  args.weights = view(weights, where + "weights");
  args.lengths = view(lengths, where + "lengths");
  if (pages.has_value())
    args.paged = {index_cache(*pages, format, where + "paged.cache"), view(block_table, where + "paged.block_table"),
                  view(row_request, where + "paged.row_request")};
  args.contiguous = {view(keys, where + "contiguous.keys"), view(scales, where + "contiguous.scales"),
                     view(starts, where + "contiguous.starts")};
  return args;
}

void index_scores(Tensor q, Tensor weights, Tensor lengths, Tensor logits, MaybeTensor pages, string format,
                  MaybeTensor block_table, MaybeTensor row_request, MaybeTensor keys, MaybeTensor scales,
                  MaybeTensor starts, bool fill, MaybeTensor workspace, Int handle) {
  const Where where = "index_scores: ";
  IndexScoreArgs args =
      score_args(q, weights, lengths, pages, format, block_table, row_request, keys, scales, starts, where);
  args.logits = view(logits, where + "logits");
  args.fill = fill;
  const Backend backend = backend_of(handle, args.logits);
  const Int needed = workspace.has_value()
                         ? 0
                         : sievemla::index_scores_workspace_bytes(
                               backend, {extent(args.q, 0), extent(args.q, 1), extent(args.logits, 1)});
  sievemla::index_scores(backend, args, workspace_of(backend, workspace, needed, where + "workspace"),
                         stream_of(backend));
}

Int index_scores_workspace_bytes(Int rows, Int heads, Int width, Int handle) {
  return sievemla::index_scores_workspace_bytes(backend_of(handle), {rows, heads, width});
}

// ---- top-k ------------------------------------------------------------------------------------------

SlotMap slot_map(const MaybeTensor& block_table, const MaybeTensor& row_request, Int page_size, Int rank, Int ranks,
                 Int interleave, const Where& where) {
  return {view(block_table, where + ".block_table"), view(row_request, where + ".row_request"), page_size,
          shard(rank, ranks, interleave, where + ".shard")};
}

Int width_of(const TensorView& positions, const TensorView& slots) { return extent(positions ? positions : slots, 1); }

void topk(Tensor scores, Tensor lengths, MaybeTensor positions, MaybeTensor slots, MaybeTensor starts,
          MaybeTensor block_table, MaybeTensor row_request, Int page_size, Int rank, Int ranks, Int interleave,
          MaybeTensor workspace, Int handle) {
  const Where where = "topk: ";
  const TopkArgs args{view(scores, where + "scores"),
                      view(starts, where + "starts"),
                      view(lengths, where + "lengths"),
                      view(positions, where + "positions"),
                      view(slots, where + "slots"),
                      slot_map(block_table, row_request, page_size, rank, ranks, interleave, where + "map")};
  const Backend backend = backend_of(handle, args.scores);
  const Int needed = workspace.has_value()
                         ? 0
                         : sievemla::topk_workspace_bytes(backend, {extent(args.scores, 0), extent(args.scores, 1),
                                                                    width_of(args.positions, args.slots)});
  sievemla::topk(backend, args, workspace_of(backend, workspace, needed, where + "workspace"), stream_of(backend));
}

Int topk_workspace_bytes(Int rows, Int width, Int k, Int handle) {
  return sievemla::topk_workspace_bytes(backend_of(handle), {rows, width, k});
}

void positions_to_slots(Tensor positions, Tensor slots, Tensor block_table, Int page_size, MaybeTensor row_request,
                        Int rank, Int ranks, Int interleave, Int handle) {
  const Where where = "positions_to_slots: ";
  const TensorView to = view(slots, where + "slots");
  const Backend backend = backend_of(handle, to);
  sievemla::positions_to_slots(
      backend, view(positions, where + "positions"),
      slot_map(MaybeTensor(block_table), row_request, page_size, rank, ranks, interleave, where + "map"), to,
      stream_of(backend));
}

void expand_pools(Tensor pools, Tensor lengths, Tensor positions, Int kpool, Int handle) {
  const Where where = "expand_pools: ";
  const ExpandPoolsArgs args{view(pools, where + "pools"), view(lengths, where + "lengths"),
                             to_int(kpool, where + "kpool"), view(positions, where + "positions")};
  const Backend backend = backend_of(handle, args.positions);
  sievemla::expand_pools(backend, args, stream_of(backend));
}

void select(Tensor q, Tensor weights, Tensor lengths, Int width, MaybeTensor positions, MaybeTensor slots,
            MaybeTensor pages, string format, MaybeTensor block_table, MaybeTensor row_request, MaybeTensor keys,
            MaybeTensor scales, MaybeTensor starts, MaybeTensor slot_block_table, MaybeTensor slot_row_request,
            Int page_size, Int rank, Int ranks, Int interleave, MaybeTensor selected_scores, Int shard_rank,
            Int shard_ranks, Int shard_interleave, Int score_budget_bytes, MaybeTensor workspace, Int handle) {
  const Where where = "select: ";
  SelectArgs args;
  args.score = score_args(q, weights, lengths, pages, format, block_table, row_request, keys, scales, starts, where);
  args.width = width;
  args.positions = view(positions, where + "positions");
  args.slots = view(slots, where + "slots");
  args.map = slot_map(slot_block_table, slot_row_request, page_size, rank, ranks, interleave, where + "map");
  args.selected_scores = view(selected_scores, where + "selected_scores");
  args.shard = shard(shard_rank, shard_ranks, shard_interleave, where + "shard");
  args.score_budget_bytes = score_budget_bytes;
  const Backend backend = backend_of(handle, args.score.q);
  const Int needed = workspace.has_value() ? 0
                                           : sievemla::select_workspace_bytes(
                                                 backend, {extent(args.score.q, 0), extent(args.score.q, 1), width,
                                                           width_of(args.positions, args.slots), score_budget_bytes});
  sievemla::select(backend, args, workspace_of(backend, workspace, needed, where + "workspace"), stream_of(backend));
}

Int select_workspace_bytes(Int rows, Int heads, Int width, Int k, Int score_budget_bytes, Int handle) {
  return sievemla::select_workspace_bytes(backend_of(handle), {rows, heads, width, k, score_budget_bytes});
}

// ---- decode context parallel ------------------------------------------------------------------------

void topk_candidates(Tensor scores, Tensor local, Tensor selected_scores, Tensor positions, Int rank, Int ranks,
                     Int interleave, MaybeTensor starts, Int handle) {
  const Where where = "topk_candidates: ";
  const CandidatesArgs args{view(scores, where + "scores"),
                            view(starts, where + "starts"),
                            view(local, where + "local"),
                            shard(rank, ranks, interleave, where + "shard"),
                            view(selected_scores, where + "selected_scores"),
                            view(positions, where + "positions")};
  const Backend backend = backend_of(handle, args.scores);
  sievemla::topk_candidates(backend, args, stream_of(backend));
}

void merge_topk(Tensor scores, Tensor positions, MaybeTensor selected, MaybeTensor slots, MaybeTensor counts,
                MaybeTensor lengths, MaybeTensor block_table, MaybeTensor row_request, Int page_size, Int rank,
                Int ranks, Int interleave, MaybeTensor workspace, Int handle) {
  const Where where = "merge_topk: ";
  const MergeTopkArgs args{view(scores, where + "scores"),
                           view(positions, where + "positions"),
                           view(lengths, where + "lengths"),
                           view(selected, where + "selected"),
                           view(slots, where + "slots"),
                           view(counts, where + "counts"),
                           slot_map(block_table, row_request, page_size, rank, ranks, interleave, where + "map")};
  const Backend backend = backend_of(handle, args.scores);
  const Int needed = workspace.has_value()
                         ? 0
                         : sievemla::merge_topk_workspace_bytes(
                               backend, {extent(args.scores, 0), extent(args.scores, 1), extent(args.scores, 2),
                                         width_of(args.selected, args.slots)});
  sievemla::merge_topk(backend, args, workspace_of(backend, workspace, needed, where + "workspace"),
                       stream_of(backend));
}

Int merge_topk_workspace_bytes(Int ranks, Int rows, Int n, Int k, Int handle) {
  return sievemla::merge_topk_workspace_bytes(backend_of(handle), {ranks, rows, n, k});
}

void shard_slots(Tensor positions, Tensor slots, Tensor block_table, Int page_size, MaybeTensor counts,
                 MaybeTensor row_request, Int rank, Int ranks, Int interleave, Int handle) {
  const Where where = "shard_slots: ";
  const ShardSlotsArgs args{
      view(positions, where + "positions"),
      slot_map(MaybeTensor(block_table), row_request, page_size, rank, ranks, interleave, where + "map"),
      view(slots, where + "slots"), view(counts, where + "counts")};
  const Backend backend = backend_of(handle, args.slots);
  sievemla::shard_slots(backend, args, stream_of(backend));
}

// ---- backends, and what this build holds ------------------------------------------------------------

Int backend_open(string name, Int threads) { return open_backend(name, threads); }
string backend_name(Int handle) { return backend_of(handle).name(); }
Int backend_threads(Int handle) { return backend_of(handle).threads(); }
void backend_prepare(Int handle) { backend_of(handle).prepare(); }

void workspace_init(Tensor workspace, Int handle) {
  const Backend backend = backend_of(handle, view(workspace, "workspace_init: workspace"));
  sievemla::workspace_init(backend, workspace_of(backend, MaybeTensor(workspace), 0, "workspace_init: workspace"),
                           stream_of(backend));
}

bool built_with_cuda() { return SIEVEMLA_WITH_CUDA; }
string version() { return string(sievemla::version()); }
string commit() { return string(sievemla::commit()); }

// Tables go as text: a line per row, fields between tabs.
template <class... Fields>
void add_row(std::ostream& text, const Fields&... fields) {
  int n = 0;
  ((text << (n++ ? "\t" : "") << fields), ...);
  text << '\n';
}

string kv_formats() {
  std::ostringstream text;
  for (const KvFormatInfo& f : sievemla::kv_formats())
    add_row(text, f.name, name_of(f.storage), f.latent, f.rope, f.scale_group, f.source);
  return text.str();
}

Int kv_row_bytes(string format, Int latent, Int rope) {
  const Where where = "row_bytes";
  return info(kv_format_by_name(format)).row_bytes(to_int(latent, where), to_int(rope, where));
}

string kernels() {
  std::ostringstream text;
  for (const KernelInfo& k : sievemla::kernels())
    add_row(text, k.stage, k.name, name_of(k.backend), k.runs_here ? 1 : 0, k.needs);
  return text.str();
}

string geometries() {
  std::ostringstream text;
  for (const Geometry& g : sievemla::geometries())
    add_row(text, g.name, g.model_type, g.layers, g.full_layers, g.heads, g.latent, g.rope, g.nope, g.v, g.index_heads,
            g.index_topk, g.index_kpool, name_of(g.index_rope));
  return text.str();
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention, guarded<attention>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_workspace_bytes, guarded<attention_workspace_bytes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(combine, guarded<combine>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_latent, guarded<write_latent>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_latent, guarded<gather_latent>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_index_keys, guarded<write_index_keys>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_layer, guarded<write_layer>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_index_keys, guarded<gather_index_keys>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_queries, guarded<index_queries>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_scores, guarded<index_scores>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_scores_workspace_bytes, guarded<index_scores_workspace_bytes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk, guarded<topk>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_workspace_bytes, guarded<topk_workspace_bytes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(positions_to_slots, guarded<positions_to_slots>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expand_pools, guarded<expand_pools>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, guarded<select>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_workspace_bytes, guarded<select_workspace_bytes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_candidates, guarded<topk_candidates>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_topk, guarded<merge_topk>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_topk_workspace_bytes, guarded<merge_topk_workspace_bytes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shard_slots, guarded<shard_slots>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backend_open, guarded<backend_open>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backend_name, guarded<backend_name>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backend_threads, guarded<backend_threads>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backend_prepare, guarded<backend_prepare>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_init, guarded<workspace_init>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(built_with_cuda, guarded<built_with_cuda>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, guarded<version>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(commit, guarded<commit>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_formats, guarded<kv_formats>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_row_bytes, guarded<kv_row_bytes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernels, guarded<kernels>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(geometries, guarded<geometries>::call);

}  // namespace sievemla::bindings
