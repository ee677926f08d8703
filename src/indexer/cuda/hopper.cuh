// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/indexer/cuda/hopper.cuh -- scores by warp group products (sm_90; mma.sync makes f16 of fp8 there).
//
// Keys are the rows of a product, 64 at a time, in registers; its columns are the heads of some rows, in shared memory.
// A score is four sums, one for each pair of heads in eight, each over heads in ascending order: (0 + 2) + (1 + 3).
// Heads are dealt to columns so that the lanes of a key share few rows: with four rows a lane adds up one alone.
//
// A lane's 16 bytes c and c + 4 of a key (c = lane % 4) go into steps of 32 dimensions as pairs of words; the words of
// heads are permuted alike.
#pragma once
#include <cstdint>

#include "cuda/ptx/ptx.cuh"
#include "cuda/ptx/sm90a.cuh"
#include "indexer/cuda/keys.cuh"
#include "indexer/cuda/params.h"
#include "indexer/cuda/scores.cuh"

namespace sievemla::stage::indexer {

inline constexpr int kProductKeys = 64;
__device__ inline int tiles_of_keys(int keys, int stride = 1) {
  return (keys + kProductKeys * stride - 1) / (kProductKeys * stride);
}

// What is the same in a warp, in a uniform register.
__device__ inline int uniform(int x) { return __reduce_max_sync(~0u, x); }
// A matrix in shared memory, its rows of 128 bytes one after the other, and how far another is from it.
__device__ inline std::uint64_t matrix_of(const void* s_matrix) {
  return cuda::matrix(cuda::shared_address(s_matrix), 16, 1024);
}
__device__ constexpr std::uint64_t matrix_step(std::size_t bytes) { return bytes >> 4; }
inline constexpr std::size_t kStepBytes = 32;  // of dimensions, along a row

// ---- heads in shared memory -------------------------------------------------------------------------

// The columns of a product: `Rows` rows of up to `Heads` heads.
template <int Heads, int Rows>
struct Columns {
  static constexpr int kHeads = Heads, kRows = Rows, kColumns = Heads * Rows;
  static constexpr int kLanes = 4 / Rows, kSums = Rows;  // lanes that share a row, and how many of its sums each has
  static_assert((Heads == 32 || Heads == 64) && (Rows == 1 || kColumns == 128));

  // 8 n + 2 c + e: of lane c.
  __device__ static unsigned column_of(unsigned row, unsigned head) {
    if constexpr (Rows == 1) return head;
    const unsigned pair = head % 8 / 2, e = head % 2, eight = head / 8;
    return (kSums * eight + pair / kLanes) * 8 + (kLanes * row + pair % kLanes) * 2 + e;
  }
  // Where its weight goes: a lane reads those of two n at once.
  __device__ static unsigned weight_place(unsigned column) {
    const unsigned n = column / 8;
    return (n / 2 * 4 + column % 8 / 2) * 4 + n % 2 * 2 + column % 2;
  }
};

template <class Columns>
struct HeadBlock {
  // 128-byte swizzle: 16-byte piece i of a head at i ^ column % 8.
  alignas(1024) unsigned char heads[Columns::kColumns * kDim];
};

// Starts the copies of the weights of rows first .. end - 1, zeros for other columns.
template <int Threads, class Columns>
__device__ inline void start_weights(const CudaScoreParams& p, int first, int end, int blocks,
                                     float (*weights)[Columns::kColumns], int thread) {
  constexpr unsigned kHeads = Columns::kHeads, kRows = Columns::kRows;
#pragma unroll 1
  for (unsigned i = static_cast<unsigned>(thread); i < static_cast<unsigned>(blocks) * Columns::kColumns;
       i += Threads) {
    const unsigned head = i % kHeads, at = i / kHeads;
    const int row = first + static_cast<int>(at);
    const bool real = static_cast<int>(head) < p.heads && row < end;
    cuda::cp_async_4(
        cuda::shared_address(&weights[at / kRows][Columns::weight_place(Columns::column_of(at % kRows, head))]),
        real ? p.weights + row * p.weights_row + head : p.weights, real ? 4 : 0);
  }
}

// Where half h of piece i of 16 bytes goes, of a key or a head: to step 2 (i / 4) + h.
__device__ inline unsigned step_place(unsigned i, unsigned h) { return (i / 4 * 2 + h) * 2 + i % 4 / 2; }

// Puts rows first .. end - 1 into `blocks` blocks, zeros where there are none, for keys in shared memory.
template <int Threads, class Columns>
__device__ inline void place_heads(const CudaScoreParams& p, int first, int end, int blocks, HeadBlock<Columns>* block,
                                   float (*weights)[Columns::kColumns], int thread) {
  constexpr unsigned kHeads = Columns::kHeads, kRows = Columns::kRows;
  const unsigned columns = static_cast<unsigned>(blocks) * Columns::kColumns;
#pragma unroll 2
  for (unsigned i = static_cast<unsigned>(thread); i < columns * 8; i += Threads) {
    const unsigned piece = i % 8, head = i / 8 % kHeads, at = i / 8 / kHeads;
    const int row = first + static_cast<int>(at);
    uint4 x{0u, 0u, 0u, 0u};
    if (static_cast<int>(head) < p.heads && row < end)
      x = __ldg(reinterpret_cast<const uint4*>(p.q + row * p.q_row + head * p.q_head + piece * 16));
    const unsigned column = Columns::column_of(at % kRows, head);
    unsigned char* const to = block[at / kRows].heads + column * kDim + piece % 2 * 8;
    *reinterpret_cast<uint2*>(to + (step_place(piece, 0) ^ column % 8) * 16) = {x.x, x.y};
    *reinterpret_cast<uint2*>(to + (step_place(piece, 1) ^ column % 8) * 16) = {x.z, x.w};
  }
  start_weights<Threads, Columns>(p, first, end, blocks, weights, thread);
  cuda::cp_async_commit();
  cuda::cp_async_wait<0>();
  cuda::fence_async();
}

// Starts the same copies for keys in registers, where word k of piece i is of step 2 (i / 4) + k / 2.
template <int Threads, class Columns>
__device__ inline void start_heads(const CudaScoreParams& p, int first, int end, int blocks, HeadBlock<Columns>* block,
                                   float (*weights)[Columns::kColumns], int thread) {
  constexpr unsigned kHeads = Columns::kHeads, kRows = Columns::kRows;
  const unsigned columns = static_cast<unsigned>(blocks) * Columns::kColumns;
#pragma unroll 1
  for (unsigned i = static_cast<unsigned>(thread); i < columns * 32; i += Threads) {
    const unsigned word = i % 32, piece = word / 4, head = i / 32 % kHeads, at = i / 32 / kHeads;
    const int row = first + static_cast<int>(at);
    const bool real = static_cast<int>(head) < p.heads && row < end;
    const unsigned column = Columns::column_of(at % kRows, head);
    cuda::cp_async_4(cuda::shared_address(block[at / kRows].heads) + column * kDim +
                         ((piece / 4 * 4 + word % 4) ^ column % 8) * 16 + piece % 4 * 4,
                     real ? p.q + row * p.q_row + head * p.q_head + word * 4 : p.q, real ? 4 : 0);
  }
  start_weights<Threads, Columns>(p, first, end, blocks, weights, thread);
  cuda::cp_async_commit();
}

// ---- keys of a warp: 16 of the warp group's 64 ------------------------------------------------------

// In registers.
struct ProductKeys {
  std::uint32_t low[8], high[8];  // keys g and g + 8; words 2 s and 2 s + 1 are its part of step s
  float scale[2];                 // of these keys, halved: 2 relu(x) = x + |x|
  bool missing;                   // their page lies nowhere

  __device__ static void set(std::uint32_t (&w)[8], const unsigned char* key, int c) {
    const uint4 x = reinterpret_cast<const uint4*>(key)[c], y = reinterpret_cast<const uint4*>(key)[c + 4];
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w, w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
  }
};

template <int N>
__device__ inline void start_product(float (&d)[N], const ProductKeys& keys, std::uint64_t b) {
  cuda::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    cuda::wgmma_e4m3(d, keys.low[2 * step], keys.high[2 * step], keys.low[2 * step + 1], keys.high[2 * step + 1],
                     b + matrix_step(step * kStepBytes), step > 0);
  cuda::wgmma_commit();
}

// What a lane ends up with: scores of key g = lane / 4 and, if it has its row alone, of key g + 8; else of one of them.
template <class Columns>
struct Mine {
  static constexpr int kLanes = Columns::kLanes;
  __device__ static int row(int lane) { return lane % 4 / kLanes; }  // of the block
  __device__ static int key(int lane) {
    const bool second = kLanes == 4 ? lane & 2 : kLanes == 2 && lane & 1;
    return lane / 4 + (second ? 8 : 0);
  }
  __device__ static bool stores(int lane) { return kLanes < 4 || lane % 2 == 0; }
};

// The weights of a lane's columns.
template <class Columns>
struct Weights {
  float4 of[Columns::kColumns / 16];  // columns 16 j + 2 c + {0, 1, 8, 9}
  __device__ Weights(const float* weights, int lane) {
#pragma unroll
    for (int j = 0; j < Columns::kColumns / 16; ++j)
      of[j] = *reinterpret_cast<const float4*>(weights + (j * 4 + lane % 4) * 4);
  }
};

// store(0 or 8 keys on, score).
template <class Columns, class Store>
__device__ inline void sum_heads(const float (&d)[Columns::kColumns / 2], const Weights<Columns>& weights,
                                 const float (&scale)[2], int lane, Store&& store) {
  constexpr int kSums = Columns::kSums, kLanes = Columns::kLanes;
  float sum[kSums][2] = {};
#pragma unroll
  for (int j = 0; j < Columns::kColumns / 16; ++j) {
    const float of[4] = {weights.of[j].x, weights.of[j].y, weights.of[j].z, weights.of[j].w};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = 2 * j + i;
          const float x = d[4 * n + 2 * half + e];
          sum[n % kSums][half] = fmaf(of[2 * i + e], x + fabsf(x), sum[n % kSums][half]);
        }
  }
  float low = sum[0][0], high = sum[0][1];
  if constexpr (kSums == 2) low += sum[1][0], high += sum[1][1];
  if constexpr (kSums == 4)
    low = (low + sum[2][0]) + (sum[1][0] + sum[3][0]), high = (high + sum[2][1]) + (sum[1][1] + sum[3][1]);
  if constexpr (kLanes == 1) {
    store(0, scale[0] * low), store(8, scale[1] * high);
    return;
  }
  const bool second = lane & kLanes / 2;
  float score = (second ? high : low) + __shfl_xor_sync(~0u, second ? low : high, kLanes / 2);
  if constexpr (kLanes == 4) score += __shfl_xor_sync(~0u, score, 1);
  store(0, (second ? scale[1] : scale[0]) * score);
}

// ---- many rows: warp groups hold the heads of rows, keys pass by ------------------------------------

// Groups: warp groups of a CTA, of 64 keys each at a time.
template <int Blocks, int Groups>
struct RowsTile {
  static constexpr int kBlocks = Blocks, kGroups = Groups, kThreads = 128 * Groups;
};
inline constexpr int kMostUnits = 512;  // of rows, in a launch

// Scores for shortlists on their way into rows first_row .. of p.shortlists. They gather until each lane has one, which
// asks for a place in its row then, and is stored when the next ones have gathered: nothing waits for a place.
struct Sieve {
  static constexpr int kMost = 64;
  base::Shortlist* const rows;
  base::Shortlisted* const s_waiting;  // [kMost]; as position: row << kPositionBits | position
  const int lane;
  int waiting = 0;  // the same in all lanes, and less than 32 between calls
  int place = base::kShortlist;
  base::Shortlisted sent{};

  __device__ base::Shortlist& row_of(const base::Shortlisted& x) const {
    return rows[static_cast<unsigned>(x.position) >> kPositionBits];
  }
  // By all lanes.
  __device__ void add(bool wanted, float score, unsigned row_and_position) {
    const unsigned lanes = __ballot_sync(~0u, wanted);
    if (lanes == 0) return;
    if (wanted) s_waiting[waiting + __popc(lanes & ((1u << lane) - 1))] = {score, static_cast<int>(row_and_position)};
    waiting += __popc(lanes);
    if (waiting >= 32) send(32);
  }
  __device__ void store_sent() {
    if (static_cast<unsigned>(place) < static_cast<unsigned>(base::kShortlist))
      *reinterpret_cast<float2*>(&row_of(sent).of[place]) = {
          sent.score, __int_as_float(sent.position & ((1 << kPositionBits) - 1))};
    place = base::kShortlist;
  }
  __device__ void send(int n) {
    store_sent();
    __syncwarp();
    waiting -= n;
    if (lane < n) sent = s_waiting[waiting + lane], place = atomicAdd(&row_of(sent).count, 1);
    __syncwarp();
  }
  __device__ void send_all() {
    send(waiting);
    store_sent();
  }
};

template <class Tile, class Columns>
struct RowsSmem {
  static constexpr int kRows = Tile::kBlocks * Columns::kRows;
  HeadBlock<Columns> block[Tile::kBlocks];
  alignas(1024) unsigned char keys[Tile::kGroups][2][kProductKeys * kDim];  // as heads: these and the next
  float weights[Tile::kBlocks][Columns::kColumns];
  int length[4 * Tile::kGroups][kRows];   // of the rows of a source, 0 of others; a copy for each warp
  float least[4 * Tile::kGroups][kRows];  // shortlists: the thresholds, likewise
  alignas(8) base::Shortlisted waiting[4 * Tile::kGroups][Sieve::kMost];
  int longest[kMostUnits];  // of a unit's rows
};

template <class Tile, class Columns, bool Lists>
struct Rows {
  static constexpr int kBlockRows = Columns::kRows, kRows = Tile::kBlocks * kBlockRows;
  static_assert(kRows <= 64);
  static constexpr int kMine = 16, kNowhere = INT32_MAX / 2;  // keys of a warp
  const CudaScoreParams& p;
  RowsSmem<Tile, Columns>& s;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // In a uniform register, as the products' operands have to be.
  const int group = uniform(warp / 4);
  const int my_key = Mine<Columns>::key(lane), my_row = Mine<Columns>::row(lane);

  __device__ int stride() const { return Lists ? 1 : p.stride; }

  // Turns: a warp group starts its products after the one before it has started its own, so that sums of one go beside
  // products of another.
  __device__ void wait_turn() const { cuda::barrier_sync(1 + group, 256); }
  __device__ void pass_turn() const { cuda::barrier_arrive(1 + (group + 1) % Tile::kGroups, 256); }

  // Tiles [begin, end) of keys, for rows [first_row, end_row).
  __device__ void run(int first_row, int end_row, int begin, int end) const {
    place_heads<Tile::kThreads>(p, first_row, end_row, Tile::kBlocks, s.block, s.weights, thread);
    const int tile_keys = kProductKeys * stride();
    __syncthreads();
    // Rows that share a source go together: mostly all. A row of no length may name any.
    std::uint64_t done = 0;
#pragma unroll 1
    while (true) {
      int length[2], source[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = lane + 32 * i, row = first_row + at;
        const bool real = row < end_row && !(done >> at & 1);
        length[i] = real ? length_of(p, row) : 0, source[i] = real ? source_of(p, row) : 0;
      }
      const std::uint64_t todo = rows_where(length[0] > begin * tile_keys, length[1] > begin * tile_keys);
      if (!todo) break;
      const int at = __ffsll(static_cast<long long>(todo)) - 1;
      const int chosen = __shfl_sync(~0u, at < 32 ? source[0] : source[1], at % 32);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (source[i] != chosen || length[i] <= begin * tile_keys) length[i] = 0;
        if (lane + 32 * i >= kRows) continue;
        s.length[warp][lane + 32 * i] = length[i];
        if (Lists && length[i] > 0) s.least[warp][lane + 32 * i] = p.shortlists[first_row + lane + 32 * i].least;
      }
      __syncwarp();
      const std::uint64_t mine = rows_where(length[0] > 0, length[1] > 0);
      done |= mine;
      const int longest = __reduce_max_sync(~0u, max(length[0], length[1]));
      pass(chosen, mine, first_row, begin * kProductKeys, min(end, tiles_of_keys(longest, stride())) * kProductKeys,
           longest);
      // Heads are read until here, and turns taken: a group that began the next pass would pass on this one's twice.
      __syncthreads();
    }
  }
  __device__ static std::uint64_t rows_where(bool low, bool high) {
    return __ballot_sync(~0u, low) | static_cast<std::uint64_t>(__ballot_sync(~0u, high)) << 32;
  }

  // Starts the copies of the 16 keys of a warp's columns; those from `end` on need not exist. What is not there is not
  // copied.
  struct Arriving {
    float scale[2];  // of keys lane / 4 and + 8, halved: 2 relu(x) = x + |x|
    int first;       // key; beyond all where the page lies nowhere
  };
  __device__ Arriving fetch(int source, int first, int end, unsigned char* keys) const {
    first = base::sample_key(first, stride());
    Arriving arriving{{0.f, 0.f}, first};
    const unsigned char* from = p.keys;
    const float* scale = p.scales;
    std::int64_t step = p.page_bytes;
    unsigned there = kMine;
    if (p.table) {  // a page is a multiple of 16 keys
      const int page = p.page_shift >= 0 ? first >> p.page_shift : first / p.page_size;
      const int inside = first - page * p.page_size;
      int physical = -1;
      if (source >= 0 && source < p.requests && first < end && page < p.table_pages)
        physical = __ldg(p.table + source * p.table_row + page);
      if (physical < 0 || physical >= p.pages) arriving.first = kNowhere, physical = 0;
      from += physical * p.page_bytes;
      scale = reinterpret_cast<const float*>(from + static_cast<std::int64_t>(p.page_size) * kDim) + inside;
      from += static_cast<std::int64_t>(inside) * kDim, step = kDim;
    } else {
      const std::int64_t at = std::int64_t{source} + first;
      there = at < 0 ? 0 : static_cast<unsigned>(min(max(p.n - at, std::int64_t{0}), std::int64_t{kMine}));
      from += at * step, scale += at;
    }
    const unsigned row = lane / 8, piece = lane % 8, g = lane / 4;
    const std::uint32_t to =
        cuda::shared_address(keys) + (static_cast<unsigned>(warp % 4 * kMine) + row) * kDim + piece % 2 * 8;
    from += row * step + piece * 16;
#pragma unroll
    for (unsigned i = 0; i < kMine; i += 4, from += 4 * step)
      if (row + i < there)
#pragma unroll
        for (unsigned h = 0; h < 2; ++h)
          cuda::cp_async_8(to + i * kDim + (step_place(piece, h) ^ (row + i) % 8) * 16, from + h * 8);
    if (g < there) arriving.scale[0] = 0.5f * __ldg(scale + g);
    if (g + 8 < there) arriving.scale[1] = 0.5f * __ldg(scale + g + 8);
    cuda::cp_async_commit();
    return arriving;
  }

  // Keys first_key .. end - 1 of a source, for rows `mine`.
  __device__ void pass(int source, std::uint64_t mine, int first_row, int first_key, int end, int longest) const {
    constexpr int kStep = Tile::kGroups * kProductKeys;
    const int begin = uniform((__ffsll(static_cast<long long>(mine)) - 1) / kBlockRows);  // blocks of these rows
    const int last = uniform((63 - __clzll(static_cast<long long>(mine))) / kBlockRows + 1);
    first_key = uniform(first_key), end = uniform(end);
    const std::uint64_t heads = matrix_of(s.block[0].heads), keys = matrix_of(s.keys[group]);
    const std::int64_t row_step = kBlockRows * p.logits_row;
    int first = first_key - kStep + group * kProductKeys + warp % 4 * kMine;
    float* out = p.logits + (first_row + begin * kBlockRows + my_row) * p.logits_row + first + my_key;
    Arriving next{};
    Sieve sieve{p.shortlists + first_row, s.waiting[warp], lane};
    int odd = 1;
    if (group == Tile::kGroups - 1) pass_turn();
    // In all groups as often; the first time round only fetches.
#pragma unroll 1
    for (int at = first_key - kStep; at < end; at += kStep, first += kStep, out += kStep, odd ^= 1) {
      const Arriving here = next;
      cuda::cp_async_wait<0>();
      cuda::fence_async();
      cuda::barrier_sync(8 + group, 128);  // these keys are there, and those before have been multiplied
      next = fetch(source, first + kStep, longest, s.keys[group][odd ^ 1]);
      if (at < first_key) continue;
      // A tile from `end` on is another CTA's: its scores are stored twice, but none may be listed so.
      if (here.first == kNowhere && (!Lists || first < end)) lose(first_row, first);
      const std::uint64_t a = keys + odd * matrix_step(sizeof(s.keys[0][0]));
      std::uint64_t b = heads + begin * matrix_step(sizeof(s.block[0]));
      const float* weights = s.weights[begin];
      const int* length = s.length[warp] + begin * kBlockRows + my_row;
      float* to = out;
#pragma unroll 1
      for (int block = begin; block < last; ++block) {
        float d[64];
        wait_turn();
        cuda::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          cuda::wgmma_e4m3(d, a + matrix_step(step * kStepBytes), b + matrix_step(step * kStepBytes), step > 0);
        cuda::wgmma_commit();
        pass_turn();
        const Weights<Columns> w(weights, lane);
        const int visible = (Lists ? min(*length, end) : *length) - my_key - here.first;
        const float threshold = Lists ? s.least[warp][block * kBlockRows + my_row] : 0.f;
        cuda::wgmma_wait<0>();
        sum_heads<Columns>(d, w, here.scale, lane, [&](int on, float score) {
          if constexpr (Lists) {
            const unsigned row = static_cast<unsigned>(block * kBlockRows + my_row);
            sieve.add(on < visible && !(score < threshold), score,
                      row << kPositionBits | static_cast<unsigned>(here.first + my_key + on));
          } else if (on < visible) {
            to[on] = score;
          }
        });
        b += matrix_step(sizeof(s.block[0])), weights += Columns::kColumns, length += kBlockRows, to += row_step;
      }
    }
    if constexpr (Lists) sieve.send_all();
    cuda::cp_async_wait<0>();
    if (group == 0) wait_turn();
  }
  // The keys of columns first .. first + 15 are nowhere.
  __device__ void lose(int first_row, int first) const {
    const int position = base::sample_key(first, stride()) + lane;
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      if (lane >= 16 || position >= s.length[warp][r]) continue;
      if constexpr (Lists) {
        base::Shortlist& row = p.shortlists[first_row + r];
        if (s.least[warp][r] > -INFINITY) continue;
        if (const int place = atomicAdd(&row.count, 1); place < base::kShortlist) row.of[place] = {-INFINITY, position};
      } else {
        p.logits[(first_row + r) * p.logits_row + first + lane] = -INFINITY;
      }
    }
  }
};

// Rows [first_row, first_row + kMostUnits * kRows).
template <class Arch, class Tile, class Columns, bool Lists>
__global__ __launch_bounds__(Tile::kThreads, 1) void rows_kernel(const __grid_constant__ CudaScoreParams p,
                                                                 int first_row) {
  constexpr int kRows = Rows<Tile, Columns, Lists>::kRows;
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<RowsSmem<Tile, Columns>*>(smem);
  const Rows<Tile, Columns, Lists> rows{p, s};
  const int thread = rows.thread, end_row = min(p.rows, first_row + kMostUnits * kRows);
  const int units = (end_row - first_row + kRows - 1) / kRows, each = (end_row - first_row + units - 1) / units;
  const int unit_rows = (each + Columns::kRows - 1) / Columns::kRows * Columns::kRows;
  for (int i = thread; i < units; i += Tile::kThreads) s.longest[i] = 0;
  cuda::wait_for_kernel();
  cuda::let_next_start();
  __syncthreads();
#pragma unroll 4
  for (int row = first_row + thread; row < end_row; row += Tile::kThreads)
    atomicMax(&s.longest[(row - first_row) / unit_rows], length_of(p, row));
  __syncthreads();
  const Units shares{units, [&](int unit) { return tiles_of_keys(s.longest[unit], rows.stride()); }};
  shares.share(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), [&](int unit, int begin, int end, bool) {
    const int row = first_row + unit * unit_rows;
    rows.run(row, min(row + unit_rows, end_row), begin, end);
  });
  if (!Lists && p.fill) fill_rows(p, first_row, end_row, thread, Tile::kThreads);
}

// ---- few rows: warp groups hold the heads of rows that share keys, and keys come through a ring -----

// A warp of its own fetches keys, 64 a slot, for all warp groups of the CTA in turn. Ctas: of a multiprocessor.
template <int Ctas, int Groups, int Slots>
struct RingTile {
  static constexpr int kCtas = Ctas;
  static constexpr int kGroups = Groups, kSlots = Slots, kConsumers = 128 * Groups, kThreads = kConsumers + 32;
  static_assert(Slots % Groups == 0, "a slot is one group's: another might wait for a phase that is two away");
};
struct KeySlot {
  alignas(16) unsigned char keys[kProductKeys * kDim];
  float scale[kProductKeys];
};

template <class Tile, class Columns, int Blocks>
struct RingSmem {
  HeadBlock<Columns> block[2][Blocks];  // of this unit and the next
  float weights[2][Blocks][Columns::kColumns];
  KeySlot slot[Tile::kSlots];
  int missing[Tile::kSlots][4];  // of 16 keys each: their page lies nowhere
  std::uint64_t full[Tile::kSlots], empty[Tile::kSlots];
};

// Fetches the keys of one unit after the other; by a warp.
template <class Tile, class Smem>
struct KeyFetch {
  const CudaScoreParams& p;
  Smem& s;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int slot = 0;
  unsigned phase = 1;  // of `empty`: a fresh barrier counts as passed
  const std::uint64_t policy = cuda::l2_policy(true);

  // How many arrivals fill a slot.
  __device__ static int arrivals(const CudaScoreParams& p) { return p.table ? 4 : 64; }

  __device__ void run(int source, int begin, int end, int longest) {
    if (p.table) paged(source, begin, end, longest);
    else contiguous(source, begin, end);
  }
  __device__ void next_slot() {
    if (++slot == Tile::kSlots) slot = 0, phase ^= 1;
  }

  // Lane 4 j + t: page of keys 16 t .. of the j-th tile from `tile` on.
  __device__ int page_of(int source, int tile, int end) const {
    const int first = tile * kProductKeys + lane * 16,
              page = p.page_shift >= 0 ? first >> p.page_shift : first / p.page_size;
    if (source < 0 || source >= p.requests || first >= end || page >= p.table_pages) return -1;
    return __ldg(p.table + source * p.table_row + page);
  }
  __device__ void paged(int source, int begin, int end, int longest) {
    const bool whole = p.page_size % kProductKeys == 0;
    int ahead = page_of(source, begin, longest);
#pragma unroll 1
    for (int tile = begin; tile < end; tile += 8) {
      int physical = ahead;
      ahead = page_of(source, tile + 8, longest);
      const bool missing = physical < 0 || physical >= p.pages;
      const int first = (tile * kProductKeys + lane * 16);
      const int inside = p.page_shift >= 0 ? first & (p.page_size - 1) : first % p.page_size;
      const unsigned char* const page = p.keys + (missing ? 0 : physical) * p.page_bytes;
      const unsigned char* const keys = page + static_cast<std::int64_t>(inside) * kDim;
      const unsigned char* const scales = page + static_cast<std::int64_t>(p.page_size) * kDim + inside * 4;
      const int part = lane % 4, groups = !whole ? 1 : part == 0 ? 4 : 0;  // of 16 keys that this lane fetches
#pragma unroll 1
      for (int j = 0; j < 8 && tile + j < end; ++j, next_slot()) {
        cuda::mbarrier_wait(cuda::shared_address(&s.empty[slot]), phase);
        if (lane / 4 == j) {
          KeySlot& to = s.slot[slot];
          const std::uint32_t full = cuda::shared_address(&s.full[slot]);
          const int n = missing ? 0 : groups * 16;
          s.missing[slot][part] = missing;
          cuda::mbarrier_arrive_expecting(full, n * (kDim + 4));
          if (n > 0) {
            cuda::bulk_copy(cuda::shared_address(to.keys + part * 16 * kDim), keys, n * kDim, full, policy);
            cuda::bulk_copy(cuda::shared_address(to.scale + part * 16), scales, n * 4, full, policy);
          }
        }
        __syncwarp();
      }
    }
  }
  __device__ void contiguous(int source, int begin, int end) {
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile, next_slot()) {
      cuda::mbarrier_wait(cuda::shared_address(&s.empty[slot]), phase);
      KeySlot& to = s.slot[slot];
      const std::uint32_t full = cuda::shared_address(&s.full[slot]);
      if (lane < 4) s.missing[slot][lane] = 0;
      cuda::mbarrier_arrive_expecting(full, 2 * kDim);
#pragma unroll
      for (int i = lane; i < kProductKeys; i += 32) {
        const std::int64_t at = min(max(std::int64_t{source} + tile * kProductKeys + i, std::int64_t{0}), p.n - 1);
        cuda::bulk_copy(cuda::shared_address(to.keys + i * kDim), p.keys + at * p.page_bytes, kDim, full, policy);
        cuda::cp_async_4(cuda::shared_address(to.scale + i), p.scales + at, 4);
      }
      cuda::mbarrier_arrive_landed(full);
    }
  }
};

// Scores the keys of one unit after the other; by the warp groups in turn.
template <class Tile, class Columns, class Smem>
struct KeyUse {
  const CudaScoreParams& p;
  Smem& s;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32 % 4, group = thread / 128;
  const int key = warp * 16 + lane / 4;  // of a slot
  int slot = group, turn = group;        // of the tile that this warp group takes next: among those of the unit
  unsigned phase = 0;
  int buffer = 0, coming = -1;  // the row whose heads are on their way to it

  __device__ ProductKeys take() {
    cuda::mbarrier_wait(cuda::shared_address(&s.full[slot]), phase);
    const KeySlot& from = s.slot[slot];
    ProductKeys keys;
    keys.set(keys.low, from.keys + key * kDim, lane % 4), keys.set(keys.high, from.keys + (key + 8) * kDim, lane % 4);
    keys.scale[0] = 0.5f * from.scale[key], keys.scale[1] = 0.5f * from.scale[key + 8];
    keys.missing = s.missing[slot][warp];
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(cuda::shared_address(&s.empty[slot]));
    slot += Tile::kGroups;
    if (slot >= Tile::kSlots) slot -= Tile::kSlots, phase ^= 1;
    return keys;
  }
  __device__ static int blocks_of(int fold) {
    return Columns::kRows == 1 ? 1 : (fold + Columns::kRows - 1) / Columns::kRows;
  }
  __device__ void heads_of(int first_row, int fold, int to) {
    start_heads<Tile::kConsumers, Columns>(p, first_row, first_row + fold, blocks_of(fold), s.block[to], s.weights[to],
                                           thread);
    coming = first_row;
  }
  __device__ void run(int first_row, int fold, int begin, int end, bool more) {
    const int blocks = blocks_of(fold), my_row = Mine<Columns>::row(lane);
    cuda::cp_async_wait<0>();
    if (coming != first_row) {  // the first unit, or one after units of no length
      heads_of(first_row, fold, buffer);
      cuda::cp_async_wait<0>();
    }
    cuda::fence_async();
    cuda::barrier_sync(1, Tile::kConsumers);  // its heads are there, and the unit before is done
    if (more) heads_of(first_row + fold, fold, buffer ^ 1);
    const std::uint64_t b = matrix_of(s.block[buffer][0].heads);
#pragma unroll 1
    for (int tile = begin + turn; tile < end; tile += Tile::kGroups) {
      ProductKeys keys = take();
      const int first = tile * kProductKeys + warp * 16 + Mine<Columns>::key(lane);
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        float d[Columns::kColumns / 2];
        start_product(d, keys, b + i * matrix_step(sizeof(s.block[0][0])));
        const int at = i * Columns::kRows + my_row;
        const int visible = at < fold && Mine<Columns>::stores(lane) ? length_of(p, first_row + at) - first : 0;
        float* const to = p.logits + (first_row + at) * p.logits_row + first;
        cuda::wgmma_wait<0>();
        cuda::hold(keys.low), cuda::hold(keys.high);  // the products read them until now
        sum_heads<Columns>(d, Weights<Columns>(s.weights[buffer][i], lane), keys.scale, lane, [&](int on, float score) {
          if (on < visible) to[on] = keys.missing ? -INFINITY : score;
        });
      }
    }
    turn = (turn + Tile::kGroups - (end - begin) % Tile::kGroups) % Tile::kGroups;
    buffer ^= 1;
  }
};

template <class Arch, class Tile, class Columns, int Blocks>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void ring_kernel(const __grid_constant__ CudaScoreParams p,
                                                                           int fold) {
  using Smem = RingSmem<Tile, Columns, Blocks>;
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<Smem*>(smem);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  if (thread < Tile::kSlots) {
    cuda::mbarrier_init(cuda::shared_address(&s.full[thread]), KeyFetch<Tile, Smem>::arrivals(p));
    cuda::mbarrier_init(cuda::shared_address(&s.empty[thread]), 4);
    cuda::fence_mbarrier_init();
  }
  __syncthreads();
  cuda::wait_for_kernel();
  cuda::let_next_start();
  const Units units{p.rows / fold, [&](int unit) { return tiles_of_keys(longest_of_unit(p, unit, fold)); }};
  const bool fetches = warp == Tile::kConsumers / 32;
  KeyFetch<Tile, Smem> fetch{p, s};
  KeyUse<Tile, Columns, Smem> use{p, s};
  if (units.units == 1 && !fetches) use.heads_of(0, fold, use.buffer);  // while its length is read
  units.share(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), [&](int unit, int begin, int end, bool more) {
    if (fetches) fetch.run(source_of(p, unit * fold), begin, end, longest_of_unit(p, unit, fold));
    else use.run(unit * fold, fold, begin, end, more);
  });
  if (p.fill && !fetches) fill_rows(p, 0, p.rows, thread, Tile::kConsumers);
}

}  // namespace sievemla::stage::indexer
