// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/decoder.cc -- one sequence, layer by layer, in chunks of rows.
#include "model/decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/fault.h"
#include "base/view.h"
#include "model/memory.h"
#include "model/mlp.h"
#include "model/ops.h"
#include "model/rope.h"
#include "model/weights.h"
#include "sievemla/error.h"

namespace sievemla::model {
namespace {

using base::Fault;
using Clock = std::chrono::steady_clock;

constexpr double kHfNormEps = 1e-6;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// [tokens, n] seen as [tokens, heads, n / heads].
TensorView by_head(const TensorView& rows, std::int64_t heads) {
  TensorView view = rows;
  view.rank = 3;
  view.shape = {rows.dim(0), heads, rows.dim(1) / heads};
  view.stride = {rows.step(0), rows.dim(1) / heads, 1};
  return view;
}

// One head of [tokens, heads, n] as a matrix, columns [begin, begin + count).
TensorView head_of(const TensorView& view, std::int64_t head, std::int64_t begin, std::int64_t count) {
  TensorView matrix = view;
  matrix.data = base::at<float>(view, 0, head, begin);
  matrix.rank = 2;
  matrix.shape = {view.dim(0), count};
  matrix.stride = {view.step(0), 1};
  return matrix;
}

// [pages, page_size, row], full of NaN until it is written.
TensorView cache_pages(Device device, TensorMemory& memory, DType dtype, std::int64_t pages, std::int64_t page_size,
                       std::int64_t row) {
  switch (dtype) {
    case DType::bf16: return memory.make<bf16>(device, {pages, page_size, row});
    case DType::u8: return memory.make<std::uint8_t>(device, {pages, page_size, row});
    default: return memory.make<float>(device, {pages, page_size, row});
  }
}

// A copy that the backend reaches.
template <class T>
TensorView copy_of(Device device, TensorMemory& memory, const std::vector<T>& values,
                   std::initializer_list<std::int64_t> shape) {
  const TensorView view = memory.make<T>(device, shape);
  std::copy(values.begin(), values.end(), static_cast<T*>(view.data));
  return view;
}

// Part `i` of a tensor [parts, ...].
TensorView part_of(const TensorView& parts, std::int64_t i) {
  TensorView part = rows_of(parts, i, 1);
  part.rank = parts.rank - 1;
  std::copy(parts.shape.begin() + 1, parts.shape.end(), part.shape.begin());
  std::copy(parts.stride.begin() + 1, parts.stride.end(), part.stride.begin());
  return part;
}

// Where a sequence's rows lie: logical page -> physical page.
struct Pages {
  // Enough for `tokens` and one that is never used, in an order that leaves few in place and differs from rank to rank.
  Pages(Device device, std::int64_t tokens, std::int64_t size, std::int64_t rank)
      : page_size(size), count((tokens + size - 1) / size + 1) {
    std::int64_t step = std::max<std::int64_t>(1, count * 5 / 8);
    while (std::gcd(step, count) != 1) ++step;
    for (std::int64_t i = 0; i + 1 < count; ++i)
      order.push_back(static_cast<std::int32_t>((i * step + 1 + rank) % count));
    table = copy_of(device, memory, order, {1, std::ssize(order)});
  }
  std::int64_t slot(std::int64_t position) const {
    return order[static_cast<std::size_t>(position / page_size)] * page_size + position % page_size;
  }

  std::int64_t page_size, count;
  std::vector<std::int32_t> order;
  TensorMemory memory{};
  TensorView table{};
};

Config checked(const Config& c, const DecoderOptions& o) {
  const auto needs = [](bool good, std::string_view rule, const char* key, const auto& got) {
    if (!good) throw Unsupported(error_message(rule, std::string("config.json: ") + key, got));
  };
  needs(c.index_dim == kIndexDim, "the indexer's kernels need heads of 128", "index_head_dim", c.index_dim);
  needs(c.rope == kIndexRope, "the indexer's kernels turn 64 of a head", "qk_rope_head_dim", c.rope);
  const KvFormatInfo& format = info(o.kv_format);
  expects((format.latent == 0 || format.latent == c.latent) && (format.rope == -1 || format.rope == c.rope),
          "a cache row must hold the model's latent | rope", "decoder: kv_format", format.name, " for ", c.latent,
          " | ", c.rope);
  expects(o.page_size >= 1 && o.page_size <= (1 << 20), "a page holds 1 to 1048576 rows", "decoder: page_size",
          o.page_size);
  expects(o.chunk >= 0, "a chunk is 0 (all) or more rows", "decoder: chunk", o.chunk);
  expects(o.max_tokens >= 1 && o.max_tokens <= c.max_position,
          "the cache must have room for 1 to max_position_embeddings (" + std::to_string(c.max_position) + ") tokens",
          "decoder: max_tokens", o.max_tokens);
  expects(o.ranks >= 1 && o.ranks <= 64, "there are 1 to 64 ranks", "decoder: ranks", o.ranks);
  return c;
}

RopeStyle other(RopeStyle style) {
  return style == RopeStyle::interleaved ? RopeStyle::half_split : RopeStyle::interleaved;
}

}  // namespace

struct Decoder::State {
  State(const Config& c, const Checkpoint& checkpoint, const DecoderOptions& o)
      : config(checked(c, o)),
        options(o),
        device(o.backend.device()),
        weights(bind_weights(config, checkpoint, o.backend)),
        cos_sin(copy_of(device, memory.cos_sin, cos_sin_table(config, o.max_tokens), {o.max_tokens, config.rope})),
        scale(softmax_scale(config)),
        latent_eps(base::fault(Fault::latent_norm_eps) ? 1e-5
                   : o.norm_eps == NormEps::hf         ? kHfNormEps
                                                       : config.rms_norm_eps),
        index_rope(base::fault(Fault::indexer_rope_style) ? other(config.index_rope) : config.index_rope),
        attention_rope(base::fault(Fault::attention_rope_style) ? RopeStyle::half_split : RopeStyle::interleaved),
        topk(std::min(base::fault(Fault::dense) ? o.max_tokens : config.index_topk, o.max_tokens)),
        key_pages(device, o.max_tokens, o.page_size, 0) {
    for (int r = 0; r < o.ranks; ++r)
      rank_pages.emplace_back(device, (o.max_tokens + o.ranks - 1) / o.ranks, o.page_size, r);
    const std::int64_t pages = rank_pages[0].count;  // all ranks have room for as many
    const KvFormatInfo& format = info(o.kv_format);
    const std::int64_t row =
        format.row_bytes(static_cast<int>(config.latent), static_cast<int>(config.rope)) / size_of(format.storage);
    for (const LayerWeights& layer : weights.layers) {
      Cache& cache = caches.emplace_back();
      const TensorView all =
          cache_pages(device, cache.latent_memory, format.storage, o.ranks * pages, o.page_size, row);
      for (int r = 0; r < o.ranks; ++r)
        cache.latent.push_back({o.kv_format, static_cast<int>(config.latent), static_cast<int>(config.rope),
                                rows_of(all, r * pages, pages)});
      if (!layer.indexer) continue;
      const DType dtype = storage_of(o.index_format);
      cache.index = {o.index_format, cache_pages(device, cache.index_memory, dtype, key_pages.count, o.page_size,
                                                 dtype == DType::u8 ? kIndexKeyBytes : kIndexDim)};
    }
  }

  struct Cache {
    TensorMemory latent_memory, index_memory;
    std::vector<KvCache> latent;  // by rank
    IndexCache index;
  };

  // The tensors of one chunk that several steps share.
  struct Chunk {
    std::int64_t first, rows;
    TensorView positions;           // [rows] i32
    TensorView lengths;             // [rows] i32: how many rows each sees
    TensorView key_slots;           // [rows] i32: where indexer keys are written
    TensorView slots;               // [ranks, rows] i32: where latent rows are, -1 on the ranks that do not hold it
    TensorView selected_positions;  // [rows, k] i32, of the last layer with an indexer
    TensorView selected_slots;      // [ranks, rows, k] i32
    TensorView selected_length;     // [rows] i32
  };

  const Config config;
  const DecoderOptions options;
  const Device device;
  struct {
    TensorMemory positions, lengths, key_slots, slots, selected_positions, selected_slots, selected_length;
    TensorMemory hidden, input, output, q_a, q, q_latent, q_latent_bf16, q_rope_bf16, kv, partial_out, partial_lse,
        attention_out;
    TensorMemory k, k_norm_weight, k_norm_bias, index_q, index_weights, out_index_q, out_index_weights, scores;
    TensorMemory cos_sin, handed_positions, handed;
  } memory;
  const Weights weights;
  const TensorView cos_sin;  // [max_tokens, rope]
  const double scale, latent_eps;
  const RopeStyle index_rope, attention_rope;
  const std::int64_t topk;
  const Pages key_pages;          // of indexer keys
  std::vector<Pages> rank_pages;  // of latent rows, by rank
  std::vector<Cache> caches;
  std::int64_t length = 0;
  WorkspaceMemory workspace;
  SlotMap slot_map(int rank) const {
    return {.block_table = rank_pages[static_cast<std::size_t>(rank)].table,
            .row_request = {},
            .page_size = options.page_size,
            .shard = {.rank = rank, .ranks = options.ranks, .interleave = 1}};
  }

  Chunk make_chunk(std::int64_t first, std::int64_t rows) {
    Chunk chunk{.first = first,
                .rows = rows,
                .positions = memory.positions.make<std::int32_t>(device, {rows}),
                .lengths = memory.lengths.make<std::int32_t>(device, {rows}),
                .key_slots = memory.key_slots.make<std::int32_t>(device, {rows}),
                .slots = memory.slots.make<std::int32_t>(device, {options.ranks, rows}),
                .selected_positions = memory.selected_positions.make<std::int32_t>(device, {rows, topk}),
                .selected_slots = memory.selected_slots.make<std::int32_t>(device, {options.ranks, rows, topk}),
                .selected_length = memory.selected_length.make<std::int32_t>(device, {rows})};
    for (std::int64_t t = 0; t < rows; ++t) {
      const std::int64_t p = first + t;
      base::store_int(chunk.positions, p, t);
      base::store_int(chunk.lengths, p + 1, t);
      base::store_int(chunk.key_slots, key_pages.slot(p), t);
      for (int r = 0; r < options.ranks; ++r)
        base::store_int(chunk.slots,
                        p % options.ranks == r ? rank_pages[static_cast<std::size_t>(r)].slot(p / options.ranks) : -1,
                        r, t);
      base::store_int(chunk.selected_length, std::min(topk, p + 1), t);
    }
    return chunk;
  }

  // [rows, heads, n] bf16: what a GPU's attention takes.
  TensorView rounded(TensorMemory& room, const TensorView& x) const {
    const TensorView view = room.make<bf16>(device, {x.dim(0), x.dim(1), x.dim(2)});
    for (std::int64_t t = 0; t < x.dim(0); ++t)
      for (std::int64_t h = 0; h < x.dim(1); ++h)
        for (std::int64_t i = 0; i < x.dim(2); ++i) base::store_f32(view, *base::at<float>(x, t, h, i), t, h, i);
    return view;
  }

  void rotate_rows(const TensorView& matrix, std::int64_t first) const {
    for (std::int64_t t = 0; t < matrix.dim(0); ++t)
      rotate(base::at<float>(matrix, t), base::at<float>(cos_sin, first + t), config.rope, attention_rope);
  }

  // From hidden rows to the arguments of the four stages.
  BlockCalls project_input(int l, const Chunk& chunk, const TensorView& input) {
    const Config& c = config;
    const Backend& backend = options.backend;
    const LayerWeights& w = weights.layers[static_cast<std::size_t>(l)];
    const Cache& cache = caches[static_cast<std::size_t>(l)];
    const std::int64_t rows = chunk.rows;

    const TensorView q_a = memory.q_a.make<float>(device, {rows, c.q_lora});
    linear(backend, w.q_a, input, q_a);
    rms_norm(w.q_a_norm, latent_eps, q_a, q_a);
    const TensorView q_rows = memory.q.make<float>(device, {rows, c.heads * (c.nope + c.rope)});
    linear(backend, w.q_b, q_a, q_rows);
    const TensorView q = by_head(q_rows, c.heads);
    const TensorView q_latent = memory.q_latent.make<float>(device, {rows, c.heads, c.latent});
    for (std::int64_t h = 0; h < c.heads; ++h) {
      rotate_rows(head_of(q, h, c.nope, c.rope), chunk.first);
      linear_transposed(backend, rows_of(w.kv_b, h * (c.nope + c.v), c.nope), head_of(q, h, 0, c.nope),
                        head_of(q_latent, h, 0, c.latent));
    }
    TensorView q_rope = q;
    q_rope.data = base::at<float>(q, 0, 0, c.nope);
    q_rope.shape[2] = c.rope;

    const TensorView kv = memory.kv.make<float>(device, {rows, c.latent + c.rope});
    linear(backend, w.kv_a, input, kv);
    const TensorView latent = columns_of(kv, 0, c.latent), k_rope = columns_of(kv, c.latent, c.rope);
    rms_norm(w.kv_a_norm, latent_eps, latent, latent);
    rotate_rows(k_rope, chunk.first);

    BlockCalls calls;
    const TensorView partial_out = memory.partial_out.make<float>(device, {options.ranks, rows, c.heads, c.latent});
    const TensorView partial_lse = memory.partial_lse.make<float>(device, {options.ranks, rows, c.heads});
    for (int r = 0; r < options.ranks; ++r) {
      const KvCache& kv_cache = cache.latent[static_cast<std::size_t>(r)];
      SparseLayerArgs& args = calls.ranks.emplace_back();
      args.latent = {.latent = latent, .rope = k_rope, .slots = part_of(chunk.slots, r), .cache = kv_cache};
      args.attention.q = device.type == DeviceType::cpu ? q_latent : rounded(memory.q_latent_bf16, q_latent);
      args.attention.q_rope = device.type == DeviceType::cpu ? q_rope : rounded(memory.q_rope_bf16, q_rope);
      args.attention.kv = kv_cache;
      args.attention.rows = Slots{part_of(chunk.selected_slots, r), chunk.selected_length};
      args.attention.scale = static_cast<float>(scale);
      args.attention.out = part_of(partial_out, r);
      args.attention.lse = part_of(partial_lse, r);
      args.attention.batch_invariant = true;  // so that chunks of any size give the same bits
    }
    calls.attention_out = calls.ranks[0].attention.out;
    if (options.ranks > 1) {
      calls.attention_out = memory.attention_out.make<float>(device, {rows, c.heads, c.latent});
      calls.combine = {
          .partial_out = partial_out, .partial_lse = partial_lse, .sink = {}, .out = calls.attention_out, .lse = {}};
    }
    if (!w.indexer) return calls;

    const IndexerWeights& iw = *w.indexer;
    const TensorView k = memory.k.make<float>(device, {rows, c.index_dim});
    linear(backend, iw.wk, input, k);
    const TensorView index_q = memory.index_q.make<float>(device, {rows, c.index_heads * c.index_dim});
    linear(backend, iw.wq_b, q_a, index_q);
    const TensorView index_weights = memory.index_weights.make<float>(device, {rows, c.index_heads});
    linear(backend, iw.weights_proj, input, index_weights);

    const Rope rope{index_rope, chunk.positions, cos_sin};
    SparseLayerArgs::Indexer& indexer = calls.ranks[0].indexer.emplace();
    indexer.keys = {.k = k,
                    .norm_weight = copy_of(device, memory.k_norm_weight, iw.k_norm_weight, {c.index_dim}),
                    .norm_bias = copy_of(device, memory.k_norm_bias, iw.k_norm_bias, {c.index_dim}),
                    .rope = rope,
                    .slots = chunk.key_slots,
                    .cache = cache.index};
    const bool fp8 = options.index_format == IndexFormat::fp8;
    const std::initializer_list<std::int64_t> q_shape = {rows, c.index_heads, c.index_dim};
    indexer.queries = {
        .q = by_head(index_q, c.index_heads),
        .weights = index_weights,
        .weight_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.index_heads * c.index_dim))),
        .rope = rope,
        .out_q = fp8 ? memory.out_index_q.make<std::uint8_t>(device, q_shape)
                     : memory.out_index_q.make<float>(device, q_shape),
        .out_weights = memory.out_index_weights.make<float>(device, {rows, c.index_heads})};
    SelectArgs& select = indexer.select;
    select.score.q = indexer.queries.out_q;
    select.score.weights = indexer.queries.out_weights;
    select.score.paged = {.cache = cache.index, .block_table = key_pages.table, .row_request = {}};
    select.score.lengths = chunk.lengths;
    select.width = chunk.first + rows;
    select.positions = chunk.selected_positions;
    select.slots = part_of(chunk.selected_slots, 0);
    select.map = slot_map(0);
    return calls;
  }

  // The first rank's selection, as slots of the others.
  void share_selection(const Chunk& chunk, const SelectArgs& select) const {
    for (int r = 1; r < options.ranks; ++r)
      positions_to_slots(options.backend, select.positions, slot_map(r), part_of(chunk.selected_slots, r));
  }

  // The stages one at a time, so that each can be timed and the scores be seen. Same results as sparse_layer().
  void run_stages(int l, const Chunk& chunk, const BlockCalls& calls, const TensorView& input, const TensorView& output,
                  const Observer& observer) {
    const Backend& backend = options.backend;
    BlockTrace trace{.layer = l,
                     .first = chunk.first,
                     .input = input,
                     .output = output,
                     .positions = chunk.selected_positions,
                     .scores = {},
                     .calls = calls,
                     .us = {}};
    Clock::time_point start = Clock::now();
    const auto took = [&](Stage stage) {
      cuda::wait(device);
      trace.us[static_cast<std::size_t>(stage)] += us_since(start);
      start = Clock::now();
    };

    const std::optional<SparseLayerArgs::Indexer>& indexer = calls.ranks[0].indexer;
    for (const SparseLayerArgs& rank : calls.ranks) write_latent(backend, rank.latent);
    if (indexer) write_index_keys(backend, indexer->keys);
    took(Stage::write);
    if (indexer) {
      index_queries(backend, indexer->queries);
      took(Stage::indexer);
      const SelectArgs& select = indexer->select;
      const std::int64_t width = select.width;
      const std::int64_t most = kScoreBudgetBytes / (width * size_of(DType::f32));
      const std::int64_t rows_at_once = observer.scores ? chunk.rows : std::clamp<std::int64_t>(most, 1, chunk.rows);
      for (std::int64_t begin = 0; begin < chunk.rows; begin += rows_at_once) {
        const std::int64_t rows = std::min(rows_at_once, chunk.rows - begin);
        IndexScoreArgs score = select.score;
        score.q = rows_of(score.q, begin, rows);
        score.weights = rows_of(score.weights, begin, rows);
        score.lengths = rows_of(score.lengths, begin, rows);
        score.logits = memory.scores.make<float>(device, {rows, width});
        const IndexScoreBounds score_bounds{rows, config.index_heads, width};
        start = Clock::now();
        index_scores(backend, score, workspace.of(backend, index_scores_workspace_bytes(backend, score_bounds)));
        took(Stage::indexer);
        const TopkArgs pick{.scores = score.logits,
                            .starts = {},
                            .lengths = score.lengths,
                            .positions = rows_of(select.positions, begin, rows),
                            .slots = rows_of(select.slots, begin, rows),
                            .map = select.map};
        sievemla::topk(backend, pick, workspace.of(backend, topk_workspace_bytes(backend, {rows, width, topk})));
        took(Stage::topk);
        if (observer.scores) trace.scores = score.logits;
      }
      share_selection(chunk, select);
      took(Stage::topk);
    }
    start = Clock::now();
    for (const SparseLayerArgs& rank : calls.ranks) {
      const AttentionBounds bounds = attention_bounds(chunk.rows, rank);
      attention(backend, rank.attention, workspace.of(backend, attention_workspace_bytes(backend, bounds)));
    }
    took(Stage::attention);
    if (calls.combine) {
      combine(backend, *calls.combine);
      took(Stage::combine);
    }
    project(backend, l, calls.attention_out, output);
    observer.block(trace);
  }

  AttentionBounds attention_bounds(std::int64_t rows, const SparseLayerArgs& args) const {
    return {.tokens = rows,
            .heads = config.heads,
            .lanes = std::get<Slots>(args.attention.rows).indices.dim(1),
            .latent = static_cast<int>(config.latent),
            .rope = static_cast<int>(config.rope)};
  }

  void run_block(int l, const Chunk& chunk, const BlockCalls& calls, const TensorView& input, const TensorView& output,
                 const Observer& observer) {
    if (observer.block) return run_stages(l, chunk, calls, input, output, observer);
    for (const SparseLayerArgs& rank : calls.ranks) {
      const SparseLayerBounds bounds{
          .select = {.rows = chunk.rows, .heads = config.index_heads, .width = chunk.first + chunk.rows, .k = topk},
          .attention = attention_bounds(chunk.rows, rank)};
      sparse_layer(options.backend, rank,
                   workspace.of(options.backend, sparse_layer_workspace_bytes(options.backend, bounds)));
      if (rank.indexer) share_selection(chunk, rank.indexer->select);
    }
    if (calls.combine) combine(options.backend, *calls.combine);
    cuda::wait(device);
    project(options.backend, l, calls.attention_out, output);
  }

  // Latent space -> values -> hidden.
  void project(const Backend& backend, int l, const TensorView& attention_out, const TensorView& output) const {
    const Config& c = config;
    const LayerWeights& w = weights.layers[static_cast<std::size_t>(l)];
    std::vector<float> room(static_cast<std::size_t>(output.dim(0) * c.heads * c.v));
    const TensorView values = tensor(room.data(), {output.dim(0), c.heads * c.v});
    for (std::int64_t h = 0; h < c.heads; ++h)
      linear(backend, rows_of(w.kv_b, h * (c.nope + c.v) + c.nope, c.v), head_of(attention_out, h, 0, c.latent),
             columns_of(values, h * c.v, c.v));
    linear(backend, w.o, values, output);
  }

  // Logits of the chunk's last `count` rows.
  void forward_chunk(std::span<const std::int32_t> ids, std::int64_t count, float* logits, const Observer& observer) {
    const Config& c = config;
    const std::int64_t rows = static_cast<std::int64_t>(ids.size());
    const Chunk chunk = make_chunk(length, rows);
    const TensorView hidden = memory.hidden.make<float>(device, {rows, c.hidden});
    const TensorView input = memory.input.make<float>(device, {rows, c.hidden});
    const TensorView output = memory.output.make<float>(device, {rows, c.hidden});
    for (std::int64_t t = 0; t < rows; ++t)
      for (std::int64_t i = 0; i < c.hidden; ++i)
        base::store_f32(hidden, base::load_f32(weights.embed, ids[static_cast<std::size_t>(t)], i), t, i);

    for (int l = 0; l < static_cast<int>(c.layers); ++l) {
      const LayerWeights& w = weights.layers[static_cast<std::size_t>(l)];
      rms_norm(w.input_norm, c.rms_norm_eps, hidden, input);
      run_block(l, chunk, project_input(l, chunk, input), input, output, observer);
      for (std::int64_t i = 0; i < hidden.elements(); ++i)
        static_cast<float*>(hidden.data)[i] += static_cast<float*>(output.data)[i];
      rms_norm(w.post_norm, c.rms_norm_eps, hidden, input);
      add_mlp(options.backend, c, w, input, hidden);
    }
    length += rows;
    const TensorView last = rows_of(hidden, rows - count, count);
    rms_norm(weights.norm, c.rms_norm_eps, last, last);
    linear(options.backend, weights.lm_head, last, tensor(logits, {count, c.vocab}));
  }
};

Decoder::Decoder(const Config& config, const Checkpoint& checkpoint, const DecoderOptions& options)
    : state_(std::make_unique<State>(config, checkpoint, options)) {}
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder::~Decoder() = default;

const Config& Decoder::config() const { return state_->config; }
const DecoderOptions& Decoder::options() const { return state_->options; }
std::int64_t Decoder::length() const { return state_->length; }
void Decoder::reset() { state_->length = 0; }

std::vector<float> Decoder::forward(std::span<const std::int32_t> ids, Logits logits, const Observer& observer) {
  State& s = *state_;
  const std::int64_t n = static_cast<std::int64_t>(ids.size());
  expects(n > 0, "there must be tokens to feed", "decoder: ids", "none");
  expects(n <= s.options.max_tokens - s.length, "the tokens must fit the cache", "decoder: ids", n, " after ", s.length,
          " of ", s.options.max_tokens);
  for (const std::int32_t id : ids)
    expects(id >= 0 && id < s.config.vocab, "an id lies in the vocabulary of " + std::to_string(s.config.vocab),
            "decoder: ids", id);
  const bool all = logits == Logits::all;
  std::vector<float> out(static_cast<std::size_t>((all ? n : 1) * s.config.vocab));
  const std::int64_t chunk = s.options.chunk == 0 ? n : s.options.chunk;
  for (std::int64_t begin = 0; begin < n; begin += chunk) {
    const std::int64_t rows = std::min(chunk, n - begin);
    const std::int64_t count = all ? rows : begin + rows == n ? 1 : 0;
    s.forward_chunk(ids.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(rows)), count,
                    out.data() + (all ? begin * s.config.vocab : 0), observer);
  }
  return out;
}

std::vector<float> Decoder::attention_block(int layer, const TensorView& input, const TensorView& positions,
                                            const Observer& observer) {
  State& s = *state_;
  const std::int64_t rows = input.rank == 2 ? input.dim(0) : 0;
  expects(layer >= 0 && layer < s.config.layers, "the layer must be the model's", "attention_block: layer", layer);
  expects(rows > 0 && rows <= s.options.max_tokens && input.dim(1) == s.config.hidden && input.dtype == DType::f32,
          "input must be [rows, hidden] f32 and fit the cache", "attention_block: input", rows, " rows");
  const bool own = s.weights.layers[static_cast<std::size_t>(layer)].indexer.has_value();
  expects(positions || own, "a layer that shares a selection needs one handed in", "attention_block: positions",
          "none");

  reset();
  State::Chunk chunk = s.make_chunk(0, rows);
  BlockCalls calls = s.project_input(layer, chunk, input);
  if (positions) {
    const TensorView ids = s.memory.handed_positions.make<std::int32_t>(s.device, {rows, positions.dim(1)});
    for (std::int64_t t = 0; t < rows; ++t)
      for (std::int64_t k = 0; k < ids.dim(1); ++k) base::store_int(ids, base::load_int(positions, t, k), t, k);
    const TensorView handed = s.memory.handed.make<std::int32_t>(s.device, {s.options.ranks, rows, ids.dim(1)});
    for (int r = 0; r < s.options.ranks; ++r) {
      positions_to_slots(s.options.backend, ids, s.slot_map(r), part_of(handed, r));
      calls.ranks[static_cast<std::size_t>(r)].attention.rows = Slots{part_of(handed, r), {}};
    }
    chunk.selected_positions = positions;
  }
  std::vector<float> out(static_cast<std::size_t>(rows * s.config.hidden));
  s.run_block(layer, chunk, calls, input, tensor(out.data(), {rows, s.config.hidden}), observer);
  reset();
  return out;
}

std::vector<float> Decoder::project_output(const Backend& backend, int layer, const TensorView& attention_out) const {
  std::vector<float> out(static_cast<std::size_t>(attention_out.dim(0) * state_->config.hidden));
  state_->project(backend, layer, attention_out, tensor(out.data(), {attention_out.dim(0), state_->config.hidden}));
  return out;
}

std::int32_t greedy(std::span<const float> logits) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < logits.size(); ++i)
    if (logits[i] > logits[best] || std::isnan(logits[best])) best = i;
  return static_cast<std::int32_t>(best);
}

namespace {

double logprob(const std::vector<float>& logits, std::int32_t token) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - most);
  return logits[static_cast<std::size_t>(token)] - most - std::log(sum);
}

}  // namespace

Generated generate(Decoder& decoder, std::span<const std::int32_t> prompt, const GenerateOptions& options) {
  Generated out;
  if (options.tokens <= 0) return out;
  decoder.reset();
  const std::vector<std::int64_t>& eos = decoder.config().eos_token_ids;
  Clock::time_point start = Clock::now();
  std::vector<float> logits = decoder.forward(prompt, Decoder::Logits::last, options.observer);
  out.prefill_us = us_since(start);
  start = Clock::now();
  while (true) {
    const std::int32_t token = greedy(logits);
    out.tokens.push_back(token);
    out.logprobs.push_back(logprob(logits, token));
    if (options.on_token) options.on_token(token);
    const bool ended = !options.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end();
    if (ended || static_cast<std::int64_t>(out.tokens.size()) == options.tokens) break;
    logits = decoder.forward(std::span(&token, 1), Decoder::Logits::last, options.observer);
  }
  out.decode_us = us_since(start);
  if (out.tokens.size() > 1) out.tokens_per_s = static_cast<double>(out.tokens.size() - 1) / out.decode_us * 1e6;
  return out;
}

}  // namespace sievemla::model
