// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cpu/attention.cc -- stage 3 on the CPU: f32, vectorised by the compiler.
//
// A work unit is a (token, chunk of its lanes). The chunk's live rows go through in blocks of kBlock. A block is
// dequantised once for all heads, and then
//
//   score[heads, rows]     = q[heads, width] x k[width, rows]          k: the block transposed
//   value[heads, latent]  += weight[heads, rows] x v[rows, latent]     v: the block as it was loaded
//
// are one routine, with a softmax of running peak in between. The chunks of a token are merged in order. Where a token
// is cut depends on its own lanes alone, so that its bits depend neither on the other tokens nor on the threads.
#include <algorithm>

#include "attention/registry.h"
#include "attention/rows.h"
#include "base/scratch.h"
#include "base/softmax.h"
#include "cpu/threads.h"
#include "kv/formats.h"

namespace sievemla::stage::attention {
namespace {

using Softmax = base::Softmax<float>;

// ---- how a token is cut -----------------------------------------------------------------------------

constexpr std::int64_t kBlock = 64;      // rows: q, k and v of a block (0.5 MB for 64 heads) stay in a core's L2
constexpr std::int64_t kMinChunk = 256;  // lanes: a partial result costs as much to write and merge as 2 or 3 rows
constexpr std::int64_t kMaxChunks = 32;  // bounds the partial results of a long dense row: 8 MiB for 128 heads
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;  // for partial results; tokens go through in waves

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr std::int64_t chunk_lanes(std::int64_t lanes) {
  return std::max(kMinChunk, ceil_div(ceil_div(lanes, kMaxChunks), kBlock) * kBlock);
}
// Never more than this, and at least one: an empty chunk writes the empty result.
constexpr std::int64_t most_chunks(std::int64_t lanes) {
  return std::clamp<std::int64_t>(ceil_div(lanes, kMinChunk), 1, kMaxChunks);
}

// ---- scratch ----------------------------------------------------------------------------------------

// The result of a chunk, not normalised.
struct Partial {
  float* value;      // [heads, latent] sum of exp(score - peak) * row
  Softmax* softmax;  // [heads]
  Partial(base::Scratch&& scratch, const AttentionBounds& b) : Partial(scratch, b) {}
  Partial(base::Scratch& scratch, const AttentionBounds& b)
      : value(scratch.take<float>(b.heads * b.latent)), softmax(scratch.take<Softmax>(b.heads)) {}
};

struct Worker {
  float* q;      // [heads, width]
  float* v;      // [kBlock, width]
  float* k;      // [width, kBlock]
  float* score;  // [heads, kBlock], then the weights
  Worker(base::Scratch&& scratch, const AttentionBounds& b) : Worker(scratch, b) {}
  Worker(base::Scratch& scratch, const AttentionBounds& b)
      : q(scratch.take<float>(b.heads * (b.latent + b.rope))),
        v(scratch.take<float>(kBlock * (b.latent + b.rope))),
        k(scratch.take<float>((b.latent + b.rope) * kBlock)),
        score(scratch.take<float>(b.heads * kBlock)) {}
};

template <class Layout>
std::int64_t bytes_of(const AttentionBounds& bounds) {
  base::Scratch scratch;
  Layout(scratch, bounds);
  return scratch.bytes();
}

// Both arrays grow with every bound, so that a workspace for larger bounds is enough for a smaller call.
struct Buffers {
  std::int64_t chunks, wave;  // of a token at most; tokens at a time
  std::int64_t partial_bytes, worker_bytes;
  std::byte* partials;  // [wave, chunks] Partial
  std::byte* workers;   // [threads] Worker
  Buffers(base::Scratch& scratch, const Backend& backend, const AttentionBounds& b)
      : chunks(most_chunks(b.lanes)), partial_bytes(bytes_of<Partial>(b)), worker_bytes(bytes_of<Worker>(b)) {
    const std::int64_t token_bytes = chunks * partial_bytes;
    const std::int64_t bytes = std::min(std::min(b.tokens, kPartialBytes) * token_bytes, std::max(token_bytes, kPartialBytes));
    wave = bytes / std::max<std::int64_t>(token_bytes, 1);
    partials = scratch.take<std::byte>(bytes);
    workers = scratch.take<std::byte>(backend.threads() * worker_bytes);
  }
};

// ---- arithmetic -------------------------------------------------------------------------------------

// c[m, n] += a[m, k] x b[k, n], row-major. Four products at a time, in the order of k: the bits of an element of c do
// not depend on m, n or its place.
void add_product(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                 std::int64_t ldb, float* c, std::int64_t ldc) {
  constexpr std::int64_t kTile = 64;  // a tile of b is 16 KiB: it stays in L1 while all rows of c pass
  for (std::int64_t i0 = 0; i0 < k; i0 += kTile)
    for (std::int64_t j0 = 0; j0 < n; j0 += kTile)
      for (std::int64_t r = 0; r < m; ++r) {
        const std::int64_t columns = std::min(kTile, n - j0), end = std::min(k, i0 + kTile);
        const float* x = a + r * lda;
        float* y = c + r * ldc + j0;
        std::int64_t i = i0;
        for (; i + 4 <= end; i += 4) {
          const float x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
          const float *b0 = b + i * ldb + j0, *b1 = b0 + ldb, *b2 = b1 + ldb, *b3 = b2 + ldb;
          for (std::int64_t j = 0; j < columns; ++j) y[j] += x0 * b0[j] + x1 * b1[j] + x2 * b2[j] + x3 * b3[j];
        }
        for (; i < end; ++i)
          for (std::int64_t j = 0; j < columns; ++j) y[j] += x[i] * b[i * ldb + j0 + j];
      }
}

void attend(const AttentionArgs& args, const Rows& rows, std::int64_t token, std::int64_t chunk, const Worker& worker,
            const Partial& partial) {
  const std::int64_t heads = args.q.dim(1), latent = args.kv.latent, width = latent + args.kv.rope;
  const std::int64_t lanes = rows.lanes(token), step = chunk_lanes(lanes);
  const std::int64_t end = std::min(lanes, (chunk + 1) * step);
  if (chunk > 0 && chunk * step >= lanes) return;

  for (std::int64_t h = 0; h < heads; ++h) load_query(args, token, h, worker.q + h * width, 1);
  std::fill_n(partial.softmax, heads, Softmax{});
  std::fill_n(partial.value, heads * latent, 0.f);

  for (std::int64_t lane = chunk * step; lane < end;) {
    std::int64_t n = 0;  // rows of the block
    for (; lane < end && n < kBlock; ++lane)
      if (const std::int64_t slot = rows.slot(token, lane); slot >= 0)
        kv::load_row(args.kv, slot, worker.v + n++ * width);
    for (std::int64_t d = 0; d < width; ++d)
      for (std::int64_t j = 0; j < n; ++j) worker.k[d * kBlock + j] = worker.v[j * width + d];

    std::fill_n(worker.score, heads * kBlock, 0.f);
    add_product(heads, n, width, worker.q, width, worker.k, kBlock, worker.score, kBlock);
    for (std::int64_t h = 0; h < heads; ++h) {
      Softmax& softmax = partial.softmax[h];
      float* score = worker.score + h * kBlock;
      const float peak_before = softmax.peak;
      for (std::int64_t j = 0; j < n; ++j) softmax.raise_peak(score[j] *= args.scale);
      if (const float rescale = softmax.weight(peak_before); rescale != 1) {
        softmax.sum *= rescale;
        for (std::int64_t d = 0; d < latent; ++d) partial.value[h * latent + d] *= rescale;
      }
      for (std::int64_t j = 0; j < n; ++j) softmax.sum += score[j] = softmax.weight(score[j]);
    }
    add_product(heads, latent, n, worker.score, kBlock, worker.v, width, partial.value, latent);
  }
}

// partials(c): the result of chunk c of this token.
template <class Partials>
void merge(const AttentionArgs& args, const Rows& rows, std::int64_t token, std::int64_t head, Partials&& partials) {
  const std::int64_t latent = args.kv.latent, lanes = rows.lanes(token);
  const std::int64_t chunks = std::max<std::int64_t>(ceil_div(lanes, chunk_lanes(lanes)), 1);
  Softmax softmax;
  for (std::int64_t c = 0; c < chunks; ++c) softmax.raise_peak(partials(c).softmax[head].peak);
  float* value = partials(0).value + head * latent;  // the sum is made in place
  for (std::int64_t c = 0; c < chunks; ++c) {
    const Softmax& part = partials(c).softmax[head];
    const float weight = softmax.weight(part.peak);
    softmax.sum += weight * part.sum;
    const float* x = partials(c).value + head * latent;
    for (std::int64_t d = 0; d < latent; ++d) value[d] = c == 0 ? weight * x[d] : value[d] + weight * x[d];
  }

  const float normaliser = softmax.normaliser(args.sink ? base::load_f32(args.sink, head) : Softmax::kNothing);
  base::visit_real(args.out.dtype, [&](auto type) {
    using T = decltype(type);
    for (std::int64_t d = 0; d < latent; ++d)
      *base::at<T>(args.out, token, head, d) = base::round_to<T>(softmax.empty() ? 0.f : value[d] * normaliser);
  });
  if (args.lse) *base::at<float>(args.lse, token, head) = softmax.lse();
}

}  // namespace

void attention_cpu(const AttentionArgs& args, const base::Exec& exec) {
  const Rows rows(args);
  const std::int64_t tokens = args.q.dim(0), heads = args.q.dim(1);
  const AttentionBounds bounds{tokens, heads, rows.most_lanes(tokens), args.kv.latent, args.kv.rope};
  base::Scratch scratch(exec.workspace.data);
  const Buffers b(scratch, exec.backend, bounds);
  const auto partial = [&](std::int64_t i) { return Partial(base::Scratch(b.partials + i * b.partial_bytes), bounds); };
  const auto worker = [&](int i) { return Worker(base::Scratch(b.workers + i * b.worker_bytes), bounds); };

  for (std::int64_t first = 0; first < tokens; first += b.wave) {
    const std::int64_t n = std::min(b.wave, tokens - first);
    cpu::parallel_for(exec.backend, n * b.chunks, [&](std::int64_t i, int w) {
      attend(args, rows, first + i / b.chunks, i % b.chunks, worker(w), partial(i));
    });
    cpu::parallel_for(exec.backend, n * heads, [&](std::int64_t i, int) {
      merge(args, rows, first + i / heads, i % heads,
            [&](std::int64_t c) { return partial(i / heads * b.chunks + c); });
    });
  }
}

std::int64_t attention_cpu_bytes(const Backend& backend, const AttentionBounds& bounds) {
  base::Scratch scratch;
  Buffers(scratch, backend, bounds);
  return scratch.bytes();
}

}  // namespace sievemla::stage::attention
