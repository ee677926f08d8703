// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/verify.cc -- sievemla verify: a self-test of every kernel on this machine.
//
// A case is drawn from its seed alone, so any of them can be run again by that seed. All kernels of a function and its
// reference get the same inputs; outputs are poisoned first, and so is all memory that no call may read.
#include "cli/verify.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/compare.h"
#include "base/view.h"
#include "cli/call_trace.h"
#include "cli/inputs.h"
#include "cli/measure.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/place.h"
#include "kv/index_page.h"

namespace sievemla::cli {
namespace {

constexpr double kBf16Step = 0x1p-7;  // two values on either side of a rounding border end up one step apart
constexpr double kE4m3Step = 0x1p-3;  // the same for codes

// One thing that a call writes.
struct Output {
  const char* name;
  TensorView view;                             // contiguous
  enum Kind { bits, real } kind = real;        // equal bit for bit, or within the backend's tolerance
  double extra = 0;                            // beside the tolerance
  std::function<std::vector<float>()> read{};  // real outputs: their values; null = the view's own
};

template <class Args, class Bounds>
struct Case {
  Args args;
  Bounds bounds{};
  std::vector<Output> outputs;
  std::string text;  // the shape, in words
};

Output bits(const char* name, const TensorView& view) { return {name, view, Output::bits}; }
Output real(const char* name, const TensorView& view) {
  return {name, view, Output::real, view.dtype == DType::bf16 ? kBf16Step : 0};
}

std::vector<float> values(const Output& output) {
  if (output.read) return output.read();
  std::vector<float> v;
  TensorView flat = output.view;
  flat.stride[0] = 1;
  for (std::int64_t i = 0; i < output.view.elements(); ++i) v.push_back(base::load_f32(flat, i));
  return v;
}

// What an output holds, to be compared later.
struct Snapshot {
  std::vector<std::byte> bytes;
  std::vector<float> values;
};
std::vector<std::byte> bytes_of(const TensorView& contiguous) {
  const auto* first = static_cast<const std::byte*>(contiguous.data);
  return {first, first + contiguous.elements() * size_of(contiguous.dtype)};
}
Snapshot snapshot(const Output& output) {
  return output.kind == Output::real ? Snapshot{{}, values(output)} : Snapshot{bytes_of(output.view), {}};
}

double error(const Snapshot& got, const Snapshot& want, Output::Kind kind) {
  if (kind == Output::real) return base::relative_error(got.values, want.values);
  return got.bytes == want.bytes ? 0 : std::numeric_limits<double>::infinity();
}

// Runs a kernel `times` times and leaves the outputs of the last run on the host. False if they differ from run to run.
template <class Kernel, class Args, class Bounds>
bool run(const Kernel& kernel, const Backend& backend, const Case<Args, Bounds>& c, int times) {
  Place place(backend);
  const Workspace workspace = place.workspace(kernel.workspace_bytes ? kernel.workspace_bytes(backend, c.bounds) : 0);
  bool same = true;
  std::vector<std::vector<std::byte>> before;
  for (int i = 0; i < times; ++i) {
    for (const Output& output : c.outputs) poison(output.view);
    kernel.run(place.put_all(c.args), {backend, workspace, {}});
    std::vector<std::vector<std::byte>> now;
    for (const Output& output : c.outputs) {
      place.take_back(output.view);
      now.push_back(bytes_of(output.view));
    }
    same &= i == 0 || now == before;
    before = std::move(now);
  }
  return same;
}

// ---- shapes that several functions share ------------------------------------------------------------

struct Row {
  KvFormat format;
  int latent, rope;
  std::string text() const { return fmt::format("{} {}+{}", info(format).name, latent, rope); }
};
// Cycles through the row types, so that consecutive seeds see them all.
Row row_type(Inputs& in, std::uint64_t seed) {
  const auto formats = kv_formats();
  const KvFormatInfo& f = formats[seed % formats.size()];
  return {f.format, f.latent ? f.latent : 512, f.rope < 0 ? in.one_of({64, 0}) : f.rope};
}

std::int64_t page_size(Inputs& in) { return in.one_of<std::int64_t>({1, 16, 48, 64, 176}); }

std::vector<std::int64_t> ragged(Inputs& in, std::int64_t n, std::int64_t longest) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < n; ++i) lengths.push_back(in.chance(15) ? in.below(2) - 1 : 1 + in.below(longest));
  return lengths;
}

DType float_type(Inputs& in) { return in.one_of({DType::f32, DType::bf16}); }
DType int_type(Inputs& in) { return in.one_of({DType::i32, DType::i64}); }

Rope rope(Inputs& in, std::int64_t tokens) {
  Rope r;
  r.style = in.one_of({RopeStyle::half_split, RopeStyle::interleaved, RopeStyle::none});
  if (r.style == RopeStyle::none) return r;
  constexpr std::int64_t kPositions = 100;
  std::vector<std::int64_t> positions;
  for (std::int64_t t = 0; t < tokens; ++t) positions.push_back(in.below(kPositions));
  r.positions = in.ints(positions, {tokens}, int_type(in));
  r.cos_sin = in.normal(float_type(in), {kPositions, kIndexRope}, 0.5f);
  return r;
}

SlotMap slot_map(Inputs& in, std::int64_t requests, std::int64_t rows, std::int64_t longest) {
  SlotMap map;
  map.page_size = page_size(in);
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(requests), longest), request;
  map.block_table = in.block_table(lengths, map.page_size);
  for (std::int64_t t = 0; t < rows; ++t) request.push_back(in.below(requests));
  if (rows % requests != 0 || in.chance(50)) map.row_request = in.ints(request, {rows});
  if (in.chance(50)) map.shard = {static_cast<int>(in.below(3)), 3, in.one_of({1, 16})};
  return map;
}

// ---- cache ------------------------------------------------------------------------------------------

using Latent = Case<WriteLatentArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t seed, Latent& c) {
  const Row row = row_type(in, seed);
  const std::int64_t tokens = in.one_of<std::int64_t>({1, 7, 64}), size = page_size(in), pages = 200 / size + 1;
  c.args.cache = in.kv_cache(row.format, row.latent, row.rope, pages, size, {});
  const DType type = float_type(in);
  c.args.latent = in.normal(type, {tokens, row.latent}, in.one_of({1.f, 1e-20f, 1e20f}));
  if (row.rope) c.args.rope = in.normal(type, {tokens, row.rope}, 1.f);
  std::vector<std::int64_t> slots = in.distinct(tokens, pages * size);
  if (in.chance(50)) slots.back() = -1;
  c.args.slots = in.ints(slots, {tokens}, int_type(in));
  c.args.scale = in.one_of({ScaleRule::arbitrary, ScaleRule::power_of_two, ScaleRule::engine});
  c.outputs = {bits("the cache", c.args.cache.pages)};
  c.text = fmt::format("{}, {} tokens, pages of {}", row.text(), tokens, size);
}

// Slots to read back: some of `held`, some outside the cache.
TensorView gather_slots(Inputs& in, std::vector<std::int64_t> held, std::int64_t slots) {
  for (std::int64_t& s : held)
    if (in.chance(20)) s = in.one_of<std::int64_t>({-1, slots, std::numeric_limits<std::int32_t>::max()});
  return in.ints(held, {static_cast<std::int64_t>(held.size())}, int_type(in));
}

using GatherLatent = Case<GatherLatentArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t seed, GatherLatent& c) {
  const Row row = row_type(in, seed);
  const std::int64_t n = 1 + in.below(70), size = page_size(in), pages = 200 / size + 1;
  const std::vector<std::int64_t> held = in.distinct(n, pages * size);
  c.args.cache = in.kv_cache(row.format, row.latent, row.rope, pages, size, held);
  c.args.slots = gather_slots(in, held, pages * size);
  c.args.out = in.poisoned(float_type(in), {n, row.latent + row.rope});
  c.outputs = {real("out", c.args.out)};
  c.text = fmt::format("{}, {} slots, pages of {}", row.text(), n, size);
}

IndexFormat index_format(std::uint64_t seed) {
  constexpr IndexFormat kFormats[] = {IndexFormat::f32, IndexFormat::bf16, IndexFormat::fp8};
  return kFormats[seed % std::size(kFormats)];
}

using GatherKeys = Case<GatherIndexKeysArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t seed, GatherKeys& c) {
  const IndexFormat format = index_format(seed);
  const std::int64_t n = 1 + in.below(70), size = page_size(in), pages = 200 / size + 1;
  const std::vector<std::int64_t> held = in.distinct(n, pages * size);
  c.args.cache = in.index_cache(format, pages, size, held);
  c.args.slots = gather_slots(in, held, pages * size);
  c.args.keys = in.poisoned(c.args.cache.pages.dtype, {n, kIndexDim});
  c.outputs = {bits("keys", c.args.keys)};
  if (format == IndexFormat::fp8) {
    c.args.scales = in.poisoned(DType::f32, {n});
    c.outputs.push_back(bits("scales", c.args.scales));
  }
  c.text = fmt::format("{} keys, {} slots, pages of {}", name_of(format), n, size);
}

// ---- stage 1 ----------------------------------------------------------------------------------------

using Keys = Case<WriteIndexKeysArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t seed, Keys& c) {
  const IndexFormat format = index_format(seed);
  const std::int64_t tokens = in.one_of<std::int64_t>({1, 7, 64}), size = page_size(in), pages = 200 / size + 1;
  c.args.k = in.normal(float_type(in), {tokens, kIndexDim}, 1.f);
  c.args.norm_weight = in.normal(float_type(in), {kIndexDim}, 1.f);
  c.args.norm_bias = in.normal(float_type(in), {kIndexDim}, 0.2f);
  c.args.rope = rope(in, tokens);
  const std::vector<std::int64_t> slots = in.distinct(tokens, pages * size);
  c.args.slots = in.ints(slots, {tokens}, int_type(in));
  c.args.cache = in.index_cache(format, pages, size, {});
  c.args.scale = in.one_of({ScaleRule::arbitrary, ScaleRule::power_of_two, ScaleRule::engine});
  Output keys = real("the keys", c.args.cache.pages);
  if (format == IndexFormat::fp8) keys.extra = kE4m3Step;
  keys.read = [cache = c.args.cache, slots] {
    std::vector<float> all(slots.size() * kIndexDim);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      float* key = all.data() + i * kIndexDim;
      const float scale = kv::load_index_key(cache, slots[i], key);
      for (int j = 0; j < kIndexDim; ++j) key[j] *= scale;
    }
    return all;
  };
  c.outputs = {keys};
  c.text = fmt::format("{} keys, {} tokens, pages of {}, rope {}", name_of(format), tokens, size,
                       name_of(c.args.rope.style));
}

using Queries = Case<IndexQueryArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t seed, Queries& c) {
  constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::u8};
  const DType type = kTypes[seed % std::size(kTypes)];
  const std::int64_t tokens = in.one_of<std::int64_t>({1, 3, 17}), heads = in.one_of<std::int64_t>({1, 16, 32, 64});
  c.args.q = in.normal(float_type(in), {tokens, heads, kIndexDim}, 1.f);
  c.args.weights = in.normal(float_type(in), {tokens, heads}, 1.f);
  c.args.weight_scale = 1.f / std::sqrt(static_cast<float>(heads * kIndexDim));
  c.args.rope = rope(in, tokens);
  c.args.scale = in.one_of({ScaleRule::arbitrary, ScaleRule::power_of_two, ScaleRule::engine});
  c.args.out_q = in.poisoned(type, {tokens, heads, kIndexDim});
  c.args.out_weights = in.poisoned(DType::f32, {tokens, heads});
  // A scale may fall on either side of a power of two; only its product with the codes is settled.
  Output product = real("q * weight", c.args.out_q);
  product.extra = type == DType::u8 ? kE4m3Step : type == DType::bf16 ? kBf16Step : 0;
  product.read = [q = c.args.out_q, weights = c.args.out_weights] {
    std::vector<float> all(static_cast<std::size_t>(q.elements()));
    float* next = all.data();
    for (std::int64_t t = 0; t < q.dim(0); ++t)
      for (std::int64_t h = 0; h < q.dim(1); ++h, next += kIndexDim) {
        kv::load_index_values(q.dtype, base::at<std::byte>(q, 0) + base::offset(q, t, h) * size_of(q.dtype), next);
        for (int i = 0; i < kIndexDim; ++i) next[i] *= *base::at<float>(weights, t, h);
      }
    return all;
  };
  c.outputs = {product, {"weights", c.args.out_weights, Output::real, type == DType::u8 ? 1. : 0.}};
  c.text =
      fmt::format("{} queries, {} tokens, {} heads, rope {}", name_of(type), tokens, heads, name_of(c.args.rope.style));
}

using Scores = Case<IndexScoreArgs, IndexScoreBounds>;
void draw(Inputs& in, std::uint64_t seed, Scores& c) {
  const IndexFormat format = index_format(seed);
  const std::int64_t requests = 1 + in.below(3), each = 1 + in.below(4), rows = requests * each;
  const std::int64_t heads = in.one_of<std::int64_t>({1, 5, 16, 32, 64}),
                     longest = in.one_of<std::int64_t>({1, 63, 300});
  const DType key_type = storage_of(format);
  c.args.q = in.normal(key_type == DType::u8 ? DType::u8 : float_type(in), {rows, heads, kIndexDim}, 1.f);
  c.args.weights = in.normal(DType::f32, {rows, heads}, 0.1f);
  const std::vector<std::int64_t> lengths = ragged(in, rows, longest);
  c.args.lengths = in.ints(lengths, {rows});
  c.args.logits = in.poisoned(DType::f32, {rows, longest + in.below(3)});
  const bool paged = in.chance(70);
  if (paged) {
    const std::int64_t size = page_size(in);
    const std::vector<std::int64_t> contexts(static_cast<std::size_t>(requests), longest);
    c.args.paged.block_table = in.block_table(contexts, size);
    const std::int64_t pages = requests * c.args.paged.block_table.dim(1);
    c.args.paged.cache = in.index_cache(format, pages, size, slots_of(c.args.paged.block_table, contexts, size));
  } else {
    c.args.contiguous.keys = in.normal(key_type, {longest, kIndexDim}, 1.f);
    if (format == IndexFormat::fp8) c.args.contiguous.scales = in.normal(DType::f32, {longest}, 0.5f);
    std::vector<std::int64_t> starts;
    for (const std::int64_t length : lengths)
      starts.push_back(in.below(longest - std::max<std::int64_t>(length, 0) + 1));
    c.args.contiguous.starts = in.ints(starts, {rows});
  }
  c.bounds = {rows, heads, c.args.logits.dim(1)};
  c.outputs = {real("logits", c.args.logits)};
  c.text = fmt::format("{} {} keys, {} rows, {} heads, up to {} long", paged ? "paged" : "contiguous", name_of(format),
                       rows, heads, longest);
}

// ---- stage 2 ----------------------------------------------------------------------------------------

using Topk = Case<TopkArgs, TopkBounds>;
void draw(Inputs& in, std::uint64_t, Topk& c) {
  const std::int64_t requests = 1 + in.below(3), rows = requests * (1 + in.below(3));
  const std::int64_t width = in.one_of<std::int64_t>({1, 100, 4096, 9000}),
                     k = in.one_of<std::int64_t>({1, 65, 512, 2048, 2051});
  c.args.scores = in.normal(DType::f32, {rows, width}, 1.f);
  const int levels = in.one_of({0, 1, 3, 40});  // scores of a few values alone: mass ties
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t i = 0; i < rows * width; ++i) {
    float& x = *(base::at<float>(c.args.scores, 0) + i);
    if (levels > 0) x = std::round(x * static_cast<float>(levels)) / static_cast<float>(levels);
    if (in.chance(2)) x = in.one_of({kInf, -kInf, kNan, -kNan, 0.f, -0.f});
  }
  const std::vector<std::int64_t> lengths = ragged(in, rows, width);
  std::vector<std::int64_t> starts;
  for (const std::int64_t length : lengths) starts.push_back(in.below(width - std::max<std::int64_t>(length, 0) + 1));
  if (in.chance(50)) c.args.starts = in.ints(starts, {rows});
  c.args.lengths = in.ints(lengths, {rows});
  c.args.positions = in.poisoned(DType::i32, {rows, k});
  c.args.slots = in.poisoned(int_type(in), {rows, k});
  c.args.map = slot_map(in, requests, rows, width);
  c.bounds = {rows, width, k};
  c.outputs = {bits("positions", c.args.positions), bits("slots", c.args.slots)};
  c.text =
      fmt::format("{} rows of {}, k {}, {}", rows, width, k, levels ? fmt::format("steps of 1/{}", levels) : "no ties");
}

using PositionsToSlots = Case<stage::topk::PositionsToSlotsArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t, PositionsToSlots& c) {
  const std::int64_t requests = 1 + in.below(3), rows = requests * (1 + in.below(3)), k = 1 + in.below(300);
  std::vector<std::int64_t> positions;
  for (std::int64_t i = 0; i < rows * k; ++i)
    positions.push_back(in.below(1100) - 50);  // before, in and past the table
  c.args.positions = in.ints(positions, {rows, k});
  c.args.map = slot_map(in, requests, rows, 1000);
  c.args.slots = in.poisoned(int_type(in), {rows, k});
  c.outputs = {bits("slots", c.args.slots)};
  c.text = fmt::format("{} rows of {}, pages of {}", rows, k, c.args.map.page_size);
}

using ExpandPools = Case<ExpandPoolsArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t, ExpandPools& c) {
  const std::int64_t rows = 1 + in.below(5), n = in.below(100), kpool = in.one_of<std::int64_t>({1, 2, 4, 7});
  std::vector<std::int64_t> pools;
  for (std::int64_t i = 0; i < rows * n; ++i) pools.push_back(in.below(102) - 1);
  c.args.pools = in.ints(pools, {rows, n});
  c.args.lengths = in.ints(ragged(in, rows, 100 * kpool), {rows});
  c.args.kpool = static_cast<int>(kpool);
  c.args.positions = in.poisoned(DType::i32, {rows, n * kpool + kpool - 1 + in.below(3)});
  c.outputs = {bits("positions", c.args.positions)};
  c.text = fmt::format("{} rows of {} pools of {}", rows, n, kpool);
}

// ---- stage 3 ----------------------------------------------------------------------------------------

using Attention = Case<AttentionArgs, AttentionBounds>;

// Slots of some rows of a cache, with every kind of lane that has to be skipped.
void sparse_rows(Inputs& in, Attention& c, const Row& row, std::int64_t tokens) {
  const std::int64_t topk = in.one_of<std::int64_t>({0, 1, 63, 64, 65, 100, 257}), size = page_size(in);
  const std::int64_t pages = 400 / size + 1, held = pages * size * 3 / 4;
  const std::vector<std::int64_t> live = in.distinct(held, pages * size);
  c.args.kv = in.kv_cache(row.format, row.latent, row.rope, pages, size, live);

  const int dead = in.one_of({0, 30, 100});  // percent of lanes
  std::vector<std::int64_t> lanes, lengths;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t length = in.chance(30) ? in.below(topk + 1) : topk;
    lengths.push_back(length);
    for (std::int64_t i = 0; i < topk; ++i)
      lanes.push_back(in.chance(i < length ? dead : 50)
                          ? in.one_of<std::int64_t>({-1, pages * size, std::numeric_limits<std::int32_t>::max(),
                                                     std::numeric_limits<std::int32_t>::min()})
                          : live[static_cast<std::size_t>(in.below(held))]);
  }
  Slots slots;
  slots.indices = in.ints(lanes, {tokens, topk}, int_type(in));
  slots.topk_length = in.ints(lengths, {tokens});
  c.args.rows = slots;
  c.bounds.lanes = topk;
  c.text = fmt::format("top-k {}, {} % dead, pages of {}", topk, dead, size);
}

void dense_rows(Inputs& in, Attention& c, const Row& row, std::int64_t requests) {
  const std::int64_t size = page_size(in), longest = in.one_of<std::int64_t>({1, 65, 300});
  const std::vector<std::int64_t> lengths = ragged(in, requests, longest);
  BlockTable blocks;
  blocks.table = in.block_table(lengths, size);
  blocks.lengths = in.ints(lengths, {requests});
  c.args.kv = in.kv_cache(row.format, row.latent, row.rope, requests * blocks.table.dim(1), size,
                          slots_of(blocks.table, lengths, size));
  c.args.rows = blocks;
  c.bounds.lanes = blocks.table.dim(1) * size;
  c.text = fmt::format("dense, {} requests of up to {}, pages of {}", requests, longest, size);
}

void draw(Inputs& in, std::uint64_t seed, Attention& c) {
  const Row row = row_type(in, seed);
  const std::int64_t requests = 1 + in.below(3), q_len = 1 + in.below(3), tokens = requests * q_len;
  const std::int64_t heads = in.one_of<std::int64_t>({1, 2, 5, 8, 16, 64, 128});
  if (in.chance(60)) sparse_rows(in, c, row, tokens);
  else dense_rows(in, c, row, requests);
  const DType type = float_type(in);
  if (row.rope && in.chance(30)) {
    c.args.q = in.normal(type, {tokens, heads, row.latent}, 1.f);
    c.args.q_rope = in.normal(type, {tokens, heads, row.rope}, 1.f);
  } else {
    c.args.q = in.normal(type, {tokens, heads, row.latent + row.rope}, 1.f);
  }
  c.args.scale = in.one_of({0.0625f, 0.5f});
  if (in.chance(30)) c.args.sink = in.normal(DType::f32, {heads}, 2.f);
  c.args.batch_invariant = in.chance(20);
  c.args.out = in.poisoned(float_type(in), {tokens, heads, row.latent});
  c.args.lse = in.poisoned(DType::f32, {tokens, heads});
  c.bounds = {tokens, heads, c.bounds.lanes, row.latent, row.rope};
  c.outputs = {real("out", c.args.out), real("lse", c.args.lse)};
  c.text = fmt::format("{}, {} tokens, {} heads, {}", row.text(), tokens, heads, c.text);
}

// ---- stage 4 ----------------------------------------------------------------------------------------

using Combine = Case<CombineArgs, base::NoBounds>;
void draw(Inputs& in, std::uint64_t, Combine& c) {
  const std::int64_t parts = in.one_of<std::int64_t>({1, 2, 3, 7, 32}), tokens = 1 + in.below(4),
                     heads = 1 + in.below(20);
  c.args.partial_out = in.normal(float_type(in), {parts, tokens, heads, 512}, 1.f);
  c.args.partial_lse = in.normal(DType::f32, {parts, tokens, heads}, in.one_of({1.f, 30.f}));
  const int empty = in.one_of({0, 30, 100});  // percent of parts
  for (std::int64_t p = 0; p < parts; ++p)
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t h = 0; h < heads; ++h) {
        if (!in.chance(empty)) continue;
        *base::at<float>(c.args.partial_lse, p, t, h) = -std::numeric_limits<float>::infinity();
        TensorView row = c.args.partial_out;
        row.data = base::at<std::byte>(row, 0) + base::offset(row, p, t, h) * size_of(row.dtype);
        row.rank = 1;
        row.shape[0] = 512;
        poison(row);
      }
  if (in.chance(30)) c.args.sink = in.normal(DType::f32, {heads}, 2.f);
  c.args.out = in.poisoned(float_type(in), {tokens, heads, 512});
  c.args.lse = in.poisoned(DType::f32, {tokens, heads});
  c.outputs = {real("out", c.args.out), real("lse", c.args.lse)};
  c.text = fmt::format("{} parts, {} tokens, {} heads, {} % empty", parts, tokens, heads, empty);
}

// ---- running them ----------------------------------------------------------------------------------

// A mismatch can be kept for `replay` where there is a trace of its kind. False: there is none.
template <class Args, class Bounds>
bool write_trace(const std::filesystem::path&, const Case<Args, Bounds>&, const std::vector<Snapshot>&) {
  return false;
}
bool write_trace(const std::filesystem::path& path, const Attention& c, const std::vector<Snapshot>& want) {
  return write_attention_trace(path, c.args, want[0].values, want[1].values), true;
}
bool write_trace(const std::filesystem::path& path, const Scores& c, const std::vector<Snapshot>& want) {
  return write_scores_trace(path, c.args, want[0].values), true;
}

template <class Args, class Bounds>
void keep(Verdict& verdict, const Case<Args, Bounds>& c, const std::vector<Snapshot>& want, std::uint64_t seed,
          const VerifyOptions& options) {
  if (options.trace_dir.empty() || !verdict.traces.empty()) return;
  const auto path = options.trace_dir / fmt::format("{}-seed{}.safetensors", verdict.kernel, seed);
  if (write_trace(path, c, want)) verdict.traces.push_back(path.string());
}

// f(), whose DeviceError then says where.
template <class F>
auto guarded(const std::string& where, F&& f) {
  try {
    return f();
  } catch (const DeviceError& why) {
    throw DeviceError(error_message("a kernel must run", where, why.what()));
  }
}

// Runs the cases of one function; `draw`, one for each kind of arguments, makes a case from its inputs.
template <class Args, class Bounds>
std::vector<Verdict> verify_function(std::string_view stage, std::span<const base::Kernel<Args, Bounds>> kernels,
                                     const VerifyOptions& options) {
  const auto reference =
      std::find_if(kernels.begin(), kernels.end(), [](const auto& k) { return k.backend == BackendKind::reference; });
  struct Candidate {
    const base::Kernel<Args, Bounds>& kernel;
    const Backend& backend;
  };
  std::vector<Candidate> candidates;
  std::vector<Verdict> verdicts;
  for (const auto& kernel : kernels)
    for (const Backend& backend : options.backends)
      if (kernel.backend == backend.kind() && kernel.backend != BackendKind::reference &&
          (!kernel.runs_here || kernel.runs_here())) {
        candidates.push_back({kernel, backend});
        verdicts.push_back({std::string(stage), kernel.name, backend.name(), 0, 0, 0, {}, {}, {}});
      }

  for (int i = 0; i < options.cases; ++i) {
    const std::uint64_t seed = options.seed + static_cast<std::uint64_t>(i);
    Inputs inputs(seed);
    Case<Args, Bounds> c;
    draw(inputs, seed, c);
    run(*reference, Backend::reference(), c, 1);
    std::vector<Snapshot> want;
    for (const Output& output : c.outputs) want.push_back(snapshot(output));

    for (std::size_t n = 0; n < candidates.size(); ++n) {
      const auto& kernel = candidates[n].kernel;
      const Backend& backend = candidates[n].backend;
      if (kernel.lacks && !kernel.lacks(c.args).empty()) {
        ++verdicts[n].unserved;
        continue;
      }
      const std::string where = fmt::format("{}, --seed {}: {}", kernel.name, seed, c.text);
      const bool same = guarded(where, [&] { return run(kernel, backend, c, 2); });
      ++verdicts[n].cases;
      bool good = same;
      if (!same)
        verdicts[n].failures.push_back(error_message("a second call must give the same bits", where, "others"));
      for (std::size_t o = 0; o < c.outputs.size(); ++o) {
        const Output& output = c.outputs[o];
        const double bound = output.kind == Output::bits ? 0 : tolerance(backend, kernel) + output.extra;
        const double off = error(snapshot(output), want[o], output.kind);
        verdicts[n].shares.push_back(off > 0 ? off / bound : 0);
        verdicts[n].worst = std::max(verdicts[n].worst, verdicts[n].shares.back());
        if (off <= bound) continue;
        good = false;
        verdicts[n].failures.push_back(error_message(
            std::string(output.name) + (bound > 0 ? " must match the reference within " + error_text(bound)
                                                  : " must equal the reference's bit for bit"),
            where, bound > 0 ? "an error of " + error_text(off) : "a difference"));
      }
      if (!good) keep(verdicts[n], c, want, seed, options);
    }
    if (options.step) options.step(reference->name);
  }
  return verdicts;
}

// ---- the command ------------------------------------------------------------------------------------

struct Options {
  std::string backend = "all", trace_dir;
  std::int64_t seed = 1, threads = 0, soak = 1;
  bool bisect = false, json = false;
};

Json to_json(const VerifyOptions& options, const std::vector<Verdict>& verdicts, bool passed) {
  Json json = envelope("verify");
  json["seed"] = options.seed;
  json["cases"] = options.cases;
  json["passed"] = passed;
  json["kernels"] = Json::array();
  for (const Verdict& v : verdicts)
    json["kernels"].push_back({{"stage", v.stage},
                               {"kernel", v.kernel},
                               {"backend", v.backend},
                               {"cases", v.cases},
                               {"unserved", v.unserved},
                               {"checked", v.cases > 0},
                               {"shares", Json::array()},
                               {"worst", error_json(v.cases > 0 ? std::optional(v.worst) : std::nullopt)},
                               {"failures", v.failures},
                               {"traces", v.traces}});
  for (std::size_t i = 0; i < verdicts.size(); ++i)
    for (const double share : verdicts[i].shares) json["kernels"][i]["shares"].push_back(error_json(share));
  return json;
}

std::string to_text(const VerifyOptions& options, const std::vector<Verdict>& verdicts) {
  Table table({{"stage"}, {"kernel"}, {"cases", Table::right}, {"error / bound", Table::right}, {"ok"}});
  std::string failures;
  for (const Verdict& v : verdicts) {
    table.row({v.stage, v.kernel, std::to_string(v.cases), v.worst == 0 ? "0" : fmt::format("{:.3f}", v.worst),
               v.failures.empty() ? "yes" : "NO"});
    for (const std::string& failure : v.failures) failures += "mismatch: " + failure + "\n";
    for (const std::string& trace : v.traces) failures += "trace: " + trace + " (sievemla replay runs it again)\n";
  }
  return table.text() +
         fmt::format("\nseeds {} to {}\n", options.seed, options.seed + static_cast<unsigned>(options.cases) - 1) +
         failures;
}

// A file can be made there: to learn otherwise after minutes of work would be late.
void check_writable(const std::string& directory) {
  std::string file = directory + "/.sievemla-XXXXXX";
  const int fd = mkstemp(file.data());
  expects(fd >= 0, "--trace-dir is a directory that can be written to", "verify: " + directory, std::strerror(errno));
  close(fd);
  unlink(file.c_str());
}

int run(const Options& given) {
  VerifyOptions options;
  options.backends = backends_named(given.backend, cpu_options(given.threads));
  options.seed = static_cast<std::uint64_t>(given.seed);
  options.trace_dir = given.trace_dir;
  if (!given.trace_dir.empty()) check_writable(given.trace_dir);
  options.cases *= static_cast<int>(given.soak);
  int functions = 0;
  api::for_each_kernel_list([&](auto&&...) { ++functions; });
  if (given.bisect) functions = 1;
  for (const Backend& backend : options.backends) backend.prepare();

  std::vector<Verdict> verdicts;
  {
    Progress progress("verify", std::int64_t{functions} * options.cases);
    options.step = [&](std::string_view what) { progress.step(what); };
    verdicts = given.bisect ? verify_bisect(options) : verify_all(options);
  }
  expects(!verdicts.empty(), "a backend to verify has kernels beside the reference", "verify: --backend",
          given.backend);
  const auto bad = std::find_if(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return !v.failures.empty(); });
  print(given.json ? text_of(to_json(options, verdicts, bad == verdicts.end())) : to_text(options, verdicts));
  if (bad != verdicts.end()) throw CheckFailed(bad->failures.front());
  return kGood;
}

}  // namespace

std::vector<Verdict> verify_attention(std::span<const stage::attention::AttentionKernel> kernels,
                                      const VerifyOptions& options) {
  return verify_function("attention", kernels, options);
}

std::vector<Verdict> verify_index_scores(std::span<const stage::indexer::IndexScoresKernel> kernels,
                                         const VerifyOptions& options) {
  return verify_function("indexer", kernels, options);
}

std::vector<Verdict> verify_all(const VerifyOptions& options) {
  std::vector<Verdict> all;
  api::for_each_kernel_list([&](std::string_view stage, const auto& kernels) {
    for (Verdict& verdict : verify_function(stage, kernels, options)) all.push_back(std::move(verdict));
  });
  return all;
}

Action add_verify(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("verify", "Self-test: every kernel that runs here against the reference");
  add_backend(*command, options->backend, "Whose kernels: cpu, cuda, or all that run here");
  add_integer(*command, "--seed", options->seed, 0, std::numeric_limits<std::int32_t>::max(),
              "Seed of the first case; the next cases count on from it");
  add_integer(*command, "--soak", options->soak, 1, 1000000, "Rounds of cases, each with seeds of its own");
  command->add_flag("--bisect", options->bisect,
                    "Only this: where top-k takes every row, selection must be all of them and sparse attention dense "
                    "attention. Tells a wrong selection from wrong attention");
  add_threads(*command, options->threads);
  command
      ->add_option(
          "--trace-dir", options->trace_dir,
          "Write the first failing case of each kernel of attention and index scores there, for `sievemla replay`")
      ->type_name("DIR");
  command->add_flag("--json", options->json, "Print JSON");
  return [options] { return run(*options); };
}

}  // namespace sievemla::cli
