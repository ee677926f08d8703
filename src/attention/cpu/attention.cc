// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/attention.cc -- stage 3 on the CPU: what is done around the kernel of an instruction set.
//
// A work unit is a (token, chunk of its lanes): the addresses of its live rows go to the tier's kernel, which leaves a
// partial result. The chunks of a token are folded in order: one after another in the caches of a worker that has all
// of them, or head by head once all are there. Where a token is cut depends on its own lanes alone, so that its bits
// depend neither on the other tokens nor on the threads.
#include "attention/cpu/attention.h"

#include <algorithm>
#include <utility>

#include "attention/rows.h"
#include "base/scratch.h"
#include "base/softmax.h"
#include "cpu/threads.h"
#include "kv/formats.h"

namespace sievemla::stage::attention {
namespace {

using Softmax = base::Softmax<float>;

// ---- how a token is cut -----------------------------------------------------------------------------

constexpr std::int64_t kMinChunk = 128;  // lanes: a partial result costs as much to write and merge as 2 or 3 rows
constexpr std::int64_t kMaxChunks = 32;  // bounds the partial results of a long dense row: 8 MiB for 128 heads
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;  // for partial results; tokens go through in waves
constexpr std::int64_t kMergeHeads = 4;  // merged together: starting a piece of parallel work takes 0.1 us
constexpr std::int64_t kBatch = 256;     // rows that a kernel gets at a time, a multiple of every tier's block

using base::ceil_div, base::round_up;

constexpr std::int64_t chunk_lanes(std::int64_t lanes) {
  return std::max(kMinChunk, round_up(ceil_div(lanes, kMaxChunks), kMinChunk));
}
// Never more than this, and at least one: an empty chunk writes the empty result.
constexpr std::int64_t most_chunks(std::int64_t lanes) {
  return std::clamp<std::int64_t>(ceil_div(lanes, kMinChunk), 1, kMaxChunks);
}

std::int64_t chunks_of(const Rows& rows, std::int64_t token) {
  const std::int64_t lanes = rows.lanes(token);
  return std::max<std::int64_t>(ceil_div(lanes, chunk_lanes(lanes)), 1);
}

// How many chunks of a token a worker takes one after another: its queries are packed once, rows are fetched early,
// and all chunks together need not be written out. So the most that keep 7 of 8 threads busy.
std::int64_t span_of(std::int64_t tokens, std::int64_t chunks, std::int64_t threads) {
  std::int64_t span = chunks;
  for (std::int64_t spans = 1; spans < chunks; span = ceil_div(chunks, ++spans)) {
    const std::int64_t chunks_done = tokens * chunks, rounds = ceil_div(tokens * ceil_div(chunks, span), threads);
    if (chunks_done * 8 >= rounds * span * threads * 7) break;
  }
  return span;
}

// ---- scratch ----------------------------------------------------------------------------------------

TierShape shape_of(const AttentionBounds& b) {
  // A stride of an odd number of cache lines, so that the heads of a tile lie in different sets.
  return {b.heads, b.latent, b.rope, round_up(b.latent, kWidthPad) + 16, Element::f32, Element::f32, 0.f};
}

constexpr Element element_of(DType dtype) { return dtype == DType::bf16 ? Element::bf16 : Element::f32; }
constexpr Element element_of(KvFormat format) {
  return format == KvFormat::f32 ? Element::f32 : format == KvFormat::bf16 ? Element::bf16 : Element::e4m3;
}

// The result of a chunk, not normalised.
struct Partial {
  float* value;  // [heads, shape.value_stride] sum of exp(score - peak) * row, but for the gain
  float *peak, *sum, *gain;
  Partial(base::Scratch&& scratch, const TierShape& s) : Partial(scratch, s) {}
  Partial(base::Scratch& scratch, const TierShape& s)
      : value(scratch.take<float>(round_up(s.heads, kHeadPad) * s.value_stride)),
        peak(scratch.take<float>(round_up(s.heads, kHeadPad))),
        sum(scratch.take<float>(round_up(s.heads, kHeadPad))),
        gain(scratch.take<float>(kSlices * round_up(s.heads, kHeadPad))) {}
};

struct Worker {
  std::int64_t* token;             // whose queries are packed; -1: none
  const void **latent, **rope;     // [heads] of a token's queries
  float* copies;                   // [heads, width] of queries whose elements do not lie side by side
  float* merged;                   // [latent] of a head
  const std::byte** addresses[2];  // [kBatch]
  std::byte* scratch;              // the tier's
  Partial all, one;                // of a token: the chunks so far, the next one
  Worker(base::Scratch&& memory, const Tier& tier, const TierShape& s) : Worker(memory, tier, s) {}
  Worker(base::Scratch& memory, const Tier& tier, const TierShape& s)
      : token(memory.take<std::int64_t>(1)),
        latent(memory.take<const void*>(s.heads)),
        rope(memory.take<const void*>(s.heads)),
        copies(memory.take<float>(s.heads * (s.latent + s.rope))),
        merged(memory.take<float>(round_up(s.latent, kWidthPad))),
        addresses{memory.take<const std::byte*>(kBatch), memory.take<const std::byte*>(kBatch)},
        scratch(memory.take<std::byte>(tier.scratch_bytes(s))),
        all(memory, s),
        one(memory, s) {}
};

template <class Layout, class... Args>
std::int64_t bytes_of(const Args&... args) {
  base::Scratch scratch;
  Layout(scratch, args...);
  return scratch.bytes();
}

// Both arrays grow with every bound, so that a workspace for larger bounds is enough for a smaller call.
struct Buffers {
  std::int64_t chunks, wave;  // of a token at most; tokens at a time
  std::int64_t partial_bytes, worker_bytes;
  std::byte* partials;  // [wave, chunks] Partial
  std::byte* workers;   // [threads] Worker
  Buffers(base::Scratch& scratch, const Tier& tier, const Backend& backend, const AttentionBounds& b)
      : chunks(most_chunks(b.lanes)),
        partial_bytes(bytes_of<Partial>(shape_of(b))),
        worker_bytes(bytes_of<Worker>(tier, shape_of(b))) {
    const std::int64_t token_bytes = chunks * partial_bytes;
    const std::int64_t most = std::max(token_bytes, kPartialBytes);
    const std::int64_t bytes = std::min(std::min(b.tokens, most) * token_bytes, most);
    wave = bytes / std::max<std::int64_t>(token_bytes, 1);
    partials = scratch.take<std::byte>(bytes);
    workers = scratch.take<std::byte>(backend.threads() * worker_bytes);
  }
};

// ---- a chunk ----------------------------------------------------------------------------------------

// Where the elements of (token, head) of q start: they lie side by side there, or in `copies`.
const void* query(const TensorView& q, std::int64_t token, std::int64_t head, float* copies) {
  return base::visit_real(q.dtype, [&](auto type) -> const void* {
    using T = decltype(type);
    const T* x = base::at<T>(q, token, head);
    if (q.step(2) == 1) return x;
    T* copy = reinterpret_cast<T*>(copies);
    for (std::int64_t i = 0; i < q.dim(2); ++i) copy[i] = *base::at<T>(q, token, head, i);
    return copy;
  });
}

void load_queries(const Tier& tier, const TierShape& shape, const AttentionArgs& args, std::int64_t token,
                  const Worker& worker) {
  if (*worker.token == token) return;
  *worker.token = token;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    float* copies = worker.copies + h * (shape.latent + shape.rope);
    worker.latent[h] = query(args.q, token, h, copies);
    worker.rope[h] = args.q_rope
                         ? query(args.q_rope, token, h, copies + shape.latent)
                         : static_cast<const std::byte*>(worker.latent[h]) + shape.latent * size_of(args.q.dtype);
  }
  tier.load_queries(shape, worker.scratch, worker.latent, worker.rope);
}

// followed: the next chunk comes after this one, on the same core.
void attend(const Tier& tier, const TierShape& shape, const AttentionArgs& args, const Rows& rows, std::int64_t token,
            std::int64_t chunk, bool followed, const Worker& worker, const Partial& partial) {
  const std::int64_t lanes = rows.lanes(token), step = chunk_lanes(lanes);
  std::int64_t lane = chunk * step;
  const std::int64_t end = std::min(lanes, lane + step);

  // The addresses of up to kBatch live rows from `lane` on.
  const auto next_rows = [&](const std::byte** addresses, std::int64_t until) {
    std::int64_t n = 0;
    for (; lane < until && n < kBatch; ++lane)
      if (const std::int64_t slot = rows.slot(token, lane); slot >= 0) addresses[n++] = kv::row_address(args.kv, slot);
    return n;
  };
  const std::byte **now = worker.addresses[0], **ahead = worker.addresses[1];
  TierState state{partial.value, partial.peak, partial.sum, partial.gain, true};
  load_queries(tier, shape, args, token, worker);
  bool last = false;
  for (std::int64_t n = next_rows(now, end), n_ahead; n > 0; n = last ? 0 : n_ahead, std::swap(now, ahead)) {
    n_ahead = next_rows(ahead, end);
    last = n_ahead == 0;
    if (last && followed) n_ahead = next_rows(ahead, lanes);  // of the chunk that comes next
    tier.attend(shape, worker.scratch, now, n, ahead, n_ahead, &state);
  }
  if (!state.empty) return;
  std::fill_n(partial.value, shape.heads * shape.value_stride, 0.f);
  std::fill_n(partial.peak, shape.heads, Softmax::kNothing);
  std::fill_n(partial.sum, shape.heads, 0.f);
  std::fill_n(partial.gain, kSlices * round_up(shape.heads, kHeadPad), 1.f);
}

// ---- chunks to an output ----------------------------------------------------------------------------

// A head of a token: what its chunks so far have given.
struct Head {
  Softmax softmax;
  float* value;
  float gain[kSlices];
};

Head head_of(const TierShape& shape, const Partial& partial, std::int64_t h) {
  Head head{{partial.peak[h], partial.sum[h]}, partial.value + h * shape.value_stride, {}};
  for (std::int64_t i = 0; i < kSlices; ++i) head.gain[i] = partial.gain[i * round_up(shape.heads, kHeadPad) + h];
  return head;
}

// f(i, columns): for each slice of the values that has a gain of its own, from column i * columns on.
template <class F>
void for_each_slice(const TierShape& shape, F&& f) {
  const std::int64_t slices = shape.row == Element::e4m3 ? kSlices : 1, columns = round_up(shape.latent, kWidthPad);
  for (std::int64_t i = 0; i < slices; ++i) f(i, columns / slices);
}

// An empty chunk changes no bit.
void fold(const Tier& tier, const TierShape& shape, const Head& next, Head& head) {
  if (next.softmax.empty()) return;
  const bool first = head.softmax.empty();
  const float before = head.softmax.peak;
  head.softmax.raise_peak(next.softmax.peak);
  const float keep = head.softmax.weight(before), weight = head.softmax.weight(next.softmax.peak);
  head.softmax.sum = keep * head.softmax.sum + weight * next.softmax.sum;
  for_each_slice(shape, [&](std::int64_t i, std::int64_t columns) {
    const std::int64_t column = i * columns;
    tier.fold(head.value + column, first ? 0.f : keep * head.gain[i], next.value + column,
              first ? 1.f : weight * next.gain[i], columns);
    head.gain[i] = first ? next.gain[i] : 1.f;
  });
}

void store(const AttentionArgs& args, const TierShape& shape, std::int64_t token, std::int64_t h, const Head& head) {
  if (args.lse) *base::at<float>(args.lse, token, h) = head.softmax.lse();
  const float sink = args.sink ? base::load_f32(args.sink, h) : Softmax::kNothing;
  const float normaliser = head.softmax.empty() ? 0.f : head.softmax.normaliser(sink);
  for_each_slice(shape, [&](std::int64_t i, std::int64_t columns) {
    const std::int64_t begin = i * columns, end = std::min(shape.latent, begin + columns), step = args.out.step(2);
    const float by = normaliser * head.gain[i];
    base::visit_real(args.out.dtype, [&](auto type) {
      using T = decltype(type);
      T* out = base::at<T>(args.out, token, h);
      if (step == 1)  // for the compiler, which makes vectors of it
        for (std::int64_t d = begin; d < end; ++d) out[d] = base::round_to<T>(head.value[d] * by);
      else
        for (std::int64_t d = begin; d < end; ++d) out[d * step] = base::round_to<T>(head.value[d] * by);
    });
  });
}

// All of a token, in the caches of one worker.
void attend_token(const Tier& tier, const TierShape& shape, const AttentionArgs& args, const Rows& rows,
                  std::int64_t token, const Worker& worker) {
  const Partial& all = worker.all;
  attend(tier, shape, args, rows, token, 0, true, worker, all);
  for (std::int64_t c = 1; c < chunks_of(rows, token); ++c) {
    attend(tier, shape, args, rows, token, c, true, worker, worker.one);
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      Head head = head_of(shape, all, h);
      fold(tier, shape, head_of(shape, worker.one, h), head);
      all.peak[h] = head.softmax.peak, all.sum[h] = head.softmax.sum;
      for (std::int64_t i = 0; i < kSlices; ++i) all.gain[i * round_up(shape.heads, kHeadPad) + h] = head.gain[i];
    }
  }
  for (std::int64_t h = 0; h < shape.heads; ++h) store(args, shape, token, h, head_of(shape, all, h));
}

// A head, from the partial results of the token's chunks: chunk(c).
template <class Chunk>
void merge(const Tier& tier, const TierShape& shape, const AttentionArgs& args, const Rows& rows, std::int64_t token,
           std::int64_t h, const Worker& worker, Chunk&& chunk) {
  Head head = head_of(shape, chunk(0), h);
  std::copy_n(head.value, round_up(shape.latent, kWidthPad), worker.merged);
  head.value = worker.merged;
  for (std::int64_t c = 1; c < chunks_of(rows, token); ++c) fold(tier, shape, head_of(shape, chunk(c), h), head);
  store(args, shape, token, h, head);
}

}  // namespace

template <const Tier& kTier>
void attention_cpu(const AttentionArgs& args, const base::Exec& exec) {
  const Rows rows(args);
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1);
  const AttentionBounds bounds{tokens, heads, rows.most_lanes(tokens), args.kv.latent, args.kv.rope};
  TierShape shape = shape_of(bounds);
  shape.query = element_of(args.q.dtype), shape.row = element_of(args.kv.format), shape.scale = args.scale;
  base::Scratch scratch(exec.workspace.data);
  const Buffers b(scratch, kTier, exec.backend, bounds);
  const auto partial = [&](std::int64_t i) { return Partial(base::Scratch(b.partials + i * b.partial_bytes), shape); };
  const auto worker = [&](int i) { return Worker(base::Scratch(b.workers + i * b.worker_bytes), kTier, shape); };

  const int threads = exec.backend.threads();
  for (int i = 0; i < threads; ++i) *worker(i).token = -1;
  for (std::int64_t first = 0; first < tokens; first += b.wave) {
    const std::int64_t n = std::min(b.wave, tokens - first);
    const std::int64_t span = span_of(n, b.chunks, threads), spans = ceil_div(b.chunks, span);
    if (spans == 1) {
      cpu::parallel_for(exec.backend, n,
                        [&](std::int64_t t, int w) { attend_token(kTier, shape, args, rows, first + t, worker(w)); });
      continue;
    }
    cpu::parallel_for(exec.backend, n * spans, [&](std::int64_t i, int w) {
      const std::int64_t t = i / spans, begin = i % spans * span;
      const std::int64_t end = std::min(chunks_of(rows, first + t), begin + span);
      for (std::int64_t c = begin; c < end; ++c)
        attend(kTier, shape, args, rows, first + t, c, c + 1 < end, worker(w), partial(t * b.chunks + c));
    });
    const std::int64_t groups = ceil_div(heads, kMergeHeads);
    cpu::parallel_for(exec.backend, n * groups, [&](std::int64_t i, int w) {
      const std::int64_t t = i / groups, begin = i % groups * kMergeHeads;
      for (std::int64_t h = begin; h < std::min(heads, begin + kMergeHeads); ++h)
        merge(kTier, shape, args, rows, first + t, h, worker(w),
              [&](std::int64_t c) { return partial(t * b.chunks + c); });
    });
  }
}

template <const Tier& kTier>
std::int64_t attention_cpu_bytes(const Backend& backend, const AttentionBounds& bounds) {
  base::Scratch scratch;
  Buffers(scratch, kTier, backend, bounds);
  return scratch.bytes();
}

base::Lack lacks_f32(const AttentionArgs& args) {
  if (args.q.dtype == DType::f32) return "f32 queries (its operands are bf16)";
  if (args.kv.format == KvFormat::f32) return "f32 rows (its operands are bf16)";
  return "";
}

template void attention_cpu<kPortable>(const AttentionArgs&, const base::Exec&);
template std::int64_t attention_cpu_bytes<kPortable>(const Backend&, const AttentionBounds&);
#if defined(__x86_64__)
template void attention_cpu<kAvx2>(const AttentionArgs&, const base::Exec&);
template void attention_cpu<kAvx512>(const AttentionArgs&, const base::Exec&);
template void attention_cpu<kAvx512Bf16>(const AttentionArgs&, const base::Exec&);
template void attention_cpu<kAmx>(const AttentionArgs&, const base::Exec&);
template std::int64_t attention_cpu_bytes<kAvx2>(const Backend&, const AttentionBounds&);
template std::int64_t attention_cpu_bytes<kAvx512>(const Backend&, const AttentionBounds&);
template std::int64_t attention_cpu_bytes<kAvx512Bf16>(const Backend&, const AttentionBounds&);
template std::int64_t attention_cpu_bytes<kAmx>(const Backend&, const AttentionBounds&);
#endif

}  // namespace sievemla::stage::attention
