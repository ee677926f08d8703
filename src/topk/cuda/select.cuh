// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/select.cuh -- stage 2 on CUDA: exact top-k of rows of any length.
//
//   list    what may be among the k largest, in ascending position: a short row whole; of a longer row the scores that
//           reach a threshold, guessed from a sample so that a little more than k do. A row's CTAs all guess the same,
//           each filters its part, and the last to arrive has the list. Each thread holds some of it in registers.
//   narrow  bins of equal width between a least and a largest score, the bin that holds the k-th largest; what is
//           above it is selected. The few in it are ranked against each other, or the bin is cut up again. The sample
//           is narrowed by the same code.
//   emit    ids in ascending position: one prefix sum, over bytes that count four entries each
//
// Where the guess was bad (less than k reach it, or more than a list holds), the row's last CTA reads it again, in
// bins of the exact keys, until one key or a bin that is taken whole is left: up to three times, then once to emit. So
// the result never depends on the guess, nor on how the row was cut up.
#pragma once
#include <cstdint>

#include "cuda/ptx/ptx.cuh"
#include "topk/cuda/ids.cuh"

namespace sievemla::stage::topk {

inline constexpr int kBinBits = 11, kBins = 1 << kBinBits;
inline constexpr int kFew = 64;    // in the last bin: ranked by comparing all with all
inline constexpr int kSoon = 192;  // entries of a part that are read before it is known how many there are
inline constexpr int kListBits = 13, kList = kListEntries;
static_assert(kList == 1 << kListBits);

enum class RowKind { kShort, kLong, kShared };  // at most a list long; any; any, by p.parts CTAs

// Threads of a CTA, CTAs wanted on a multiprocessor, and threads that the registers of one shall do for.
template <int Threads, int Ctas, int MostThreads = Threads>
struct SelectTile {
  static constexpr int kThreads = Threads, kCtas = Ctas, kMostThreads = MostThreads, kWarps = Threads / 32;
  static constexpr int kGroups = kList / (4 * Threads);  // of four entries that a thread has, at most
  static constexpr int kBinQuads = kBins / (4 * Threads);
  static_assert(kGroups == 4, "a byte of a mask for each, and of a strip's four");
  static_assert(kBinQuads >= 1 && kFew == 64, "two of the few a lane");
};

template <class Tile>
struct SelectSmem {
  alignas(16) int bins[kBins];               // zero between uses
  alignas(16) unsigned long long few[kFew];  // score and entry in one number, larger is better; zero: none
  int few_count;
  int low[32], high[32], sums[32];  // by warp
  int marked[2][32];                // by warp; of this round and the one before
  struct {
    int bin, above, count;
  } found;
  float cut[2];  // of the list, known since its sample was taken: low and width
  int last;      // this CTA is the last of its row
  union {
    alignas(16) int chosen[kList];  // positions to be stored
    ListEntry list[kList];          // of long rows only
  };
};

// ---- keys -------------------------------------------------------------------------------------------

// Larger score <=> larger key: sign and magnitude become two's complement, where -0 and +0 are one.
__device__ inline int key_of(float score) {
  const int bits = __float_as_int(score), sign = bits >> 31;
  return ((bits & 0x7FFFFFFF) ^ sign) - sign;
}
__device__ inline float score_of(int key) {
  return __int_as_float(key < 0 ? -key | static_cast<int>(0x80000000) : key);
}
inline constexpr int kInfinity = 0x7F800000;
// Bins of equal width between two keys: (key - low) >> shift.
__device__ inline int shift_of(int low, int high) {
  return max(0, 32 - kBinBits - __clz(static_cast<int>(static_cast<unsigned>(high) - static_cast<unsigned>(low))));
}

// NaN ranks as -inf.
__device__ inline float canonical(float score) { return fmaxf(score, -INFINITY); }

__device__ inline float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float root(float x) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Orders all that this thread knows of, before and after it, against other CTAs.
__device__ inline unsigned count_arrival(unsigned* ticket) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  return before;
}

constexpr float kCode = 0x1p23f;  // its ulp is 1: a bin is added to it

// Masks of a thread's entries: bit 8 j + c is entry c of group j.
__device__ constexpr unsigned bit_of(int i) { return 1u << (8 * (i / 4) + i % 4); }
// How many bits are set of each group, a byte each.
__device__ inline unsigned counts_of(unsigned mask) {
  const unsigned pairs = mask - (mask >> 1 & 0x05050505u);
  return (pairs & 0x03030303u) + (pairs >> 2 & 0x03030303u);
}

// ---- device -----------------------------------------------------------------------------------------

// Which positions of a span are taken, and how many before: of 32 each.
struct SpanWord {
  unsigned bits, before;
};
inline constexpr int kSpanWords = 4096, kSpan = 32 * kSpanWords;
template <class Tile>
struct ShortlistSmem {
  SelectSmem<Tile> select;
  alignas(16) SpanWord words[kSpanWords];
};

// Apart, because it is rare: its registers shall not count.
template <class Tile>
__device__ __noinline__ void read_row_again(const CudaParams& p, SelectSmem<Tile>& s, int row);

template <class Tile>
struct Select {
  static constexpr int kThreads = Tile::kThreads, kWarps = Tile::kWarps, kGroups = Tile::kGroups,
                       kEntries = 4 * kGroups;
  using Smem = SelectSmem<Tile>;
  const CudaParams& p;
  Smem& s;
  const int row;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int groups = kGroups;  // that a thread has: a warp's entries lie side by side, and so do the 128 of a group

  __device__ Select(const CudaParams& params, Smem& smem, int r) : p(params), s(smem), row(r) {}

  __device__ int visible(int length, int start) const {
    return max(static_cast<int>(min(static_cast<std::int64_t>(length), p.width - start)), 0);
  }
  __device__ void set_groups(int entries) { groups = (entries + 4 * kThreads - 1) / (4 * kThreads); }
  __device__ int first_of(int group) const { return ((warp * groups + group) * 32 + lane) * 4; }
  __device__ int entry_of(unsigned lowest_bit) const {
    const int i = __clz(static_cast<int>(lowest_bit)) ^ 31;
    return first_of(i / 8) + i % 8;
  }
  // Of the groups in use only.
  template <class F>
  __device__ void each_group(F&& f) const {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (j >= groups) break;
      f(j);
    }
  }
  template <class F>
  __device__ void each_entry(F&& f) const {
    each_group([&](int j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) f(4 * j + c);
    });
  }
  // The mask of the entries for which f gives a number with its sign bit set.
  template <class F>
  __device__ unsigned mask_of(F&& f) const {
    unsigned mask = 0;
    each_group([&](int j) {
      unsigned four = 0;
#pragma unroll
      for (int c = 3; c >= 0; --c) four = __funnelshift_l(__float_as_uint(f(4 * j + c)), four, 1);
      mask += four << (8 * j);
    });
    return mask;
  }
  __device__ unsigned all_entries() const { return 0x0F0F0F0Fu >> (8 * (kGroups - groups)); }
  __device__ unsigned first_entries(int n) const {
    unsigned mask = 0;
    each_group([&](int j) { mask += (15u >> (4 - min(max(n - first_of(j), 0), 4))) << (8 * j); });
    return mask;
  }

  // ---- of the whole CTA: every thread calls, every thread gets the result

  __device__ void least_and_largest(int& low, int& high) {
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane == 0) s.low[warp] = low, s.high[warp] = high;
    __syncthreads();
    low = __reduce_min_sync(~0u, s.low[lane % kWarps]), high = __reduce_max_sync(~0u, s.high[lane % kWarps]);
  }

  __device__ void clear() {
#pragma unroll
    for (int q = 0; q < Tile::kBinQuads; ++q) reinterpret_cast<int4*>(s.bins)[q * kThreads + thread] = {0, 0, 0, 0};
    if (thread < kFew) s.few[thread] = 0;
    if (thread == 0) s.few_count = 0;
  }

  // The bin of the need-th largest of what was counted, into s.found; clears the bins.
  __device__ void find_bin(int need) {
    __syncthreads();
    auto* const mine = reinterpret_cast<int4*>(s.bins) + (kThreads - 1 - thread) * Tile::kBinQuads;
    int sum = 0;
    int4 count[Tile::kBinQuads];
#pragma unroll
    for (int q = 0; q < Tile::kBinQuads; ++q) {
      count[q] = mine[q], mine[q] = {0, 0, 0, 0};
      sum += count[q].x + count[q].y + count[q].z + count[q].w;
    }
    const int all = __reduce_add_sync(~0u, sum);
    if (lane == 0) s.sums[warp] = all;
    __syncthreads();
    int above = __reduce_add_sync(~0u, lane < warp ? s.sums[lane % kWarps] : 0);
    if (above < need && need <= above + all) {  // it is in this warp's
      int upto = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
      }
      above += upto - sum;
      if (above < need && need <= above + sum) {
#pragma unroll
        for (int q = Tile::kBinQuads - 1; q >= 0; --q) {
          const int four[4] = {count[q].w, count[q].z, count[q].y, count[q].x};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (above < need && need <= above + four[i])
              s.found = {((kThreads - 1 - thread) * Tile::kBinQuads + q) * 4 + 3 - i, above, four[i]};
            above += four[i];
          }
        }
      }
    }
    __syncthreads();
  }

  // A prefix sum over the CTA, in ascending entry: from[j] = how many of the marked entries are before group j of this
  // thread. Returns how many there are. Calls next to each other differ in `turn`.
  __device__ int places(unsigned marks, int turn, int (&from)[kGroups]) {
    const unsigned counts = counts_of(marks);
    unsigned upto = counts;  // 128 in a byte at most
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    const unsigned all = __shfl_sync(~0u, upto, 31);
    if (lane == 0) s.marked[turn][warp] = static_cast<int>(__dp4a(all, 0x01010101u, 0u));
    __syncthreads();
    const int here = s.marked[turn][lane % kWarps];
    int before = __reduce_add_sync(~0u, lane < warp ? here : 0);
    upto -= counts;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      from[j] = before + static_cast<int>(upto >> (8 * j) & 255);
      before += static_cast<int>(all >> (8 * j) & 255);
    }
    return __reduce_add_sync(~0u, lane < kWarps ? here : 0);
  }

  // ---- narrowing

  // Bins of equal width between two scores; what lies outside goes to the first or last one.
  struct Cut {
    float low, width;
    __device__ bool good() const { return width > 1e-30f && width < INFINITY; }
    // About the least score in a bin.
    __device__ float edge(int bin) const { return low + width / (kBins - 1) * (static_cast<float>(bin) - 0.5f); }
  };
  // From the least to the largest finite score of the first four entries: a quarter of all that a thread can have.
  template <int N>
  __device__ Cut cut_of(const float (&x)[N]) {
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (fabsf(x[c]) < INFINITY) low = fminf(low, x[c]), high = fmaxf(high, x[c]);
    int low_key = key_of(low), high_key = key_of(high);
    least_and_largest(low_key, high_key);
    return {score_of(low_key), score_of(high_key) - score_of(low_key)};
  }
  // Finds the bin of the need-th largest of all entries; the bins, as kCode and more.
  __device__ void find_bin_of(const float (&x)[kEntries], Cut cut, int need, float (&code)[kEntries]) {
    const float scale = reciprocal(cut.width), offset = -cut.low * scale;
    each_entry([&](int i) {
      code[i] = fmaf(__saturatef(fmaf(x[i], scale, offset)), kBins - 1, kCode);
      atomicAdd(&s.bins[__float_as_int(code[i]) - __float_as_int(kCode)], 1);
    });
    find_bin(need);
  }

  // The same again and again, of the ties, by key: until they are few, all wanted, or all the same.
  __device__ void cut_by_key(const float (&x)[kEntries], unsigned& above, unsigned& ties, int& need, int& count) {
    while (need < count && count > kFew) {
      int low = kInfinity, high = -kInfinity;
      each_entry([&](int i) {
        if (ties & bit_of(i)) low = min(low, key_of(x[i])), high = max(high, key_of(x[i]));
      });
      __syncthreads();
      least_and_largest(low, high);
      if (low == high) return;
      const int shift = shift_of(low, high);
      auto bin = [&](int i) { return (static_cast<unsigned>(key_of(x[i])) - static_cast<unsigned>(low)) >> shift; };
      each_entry([&](int i) {
        if (ties & bit_of(i)) atomicAdd(&s.bins[bin(i)], 1);
      });
      find_bin(need);
      const auto found = s.found;
      const unsigned at = static_cast<unsigned>(found.bin);
      unsigned inside = 0;
      each_entry([&](int i) {
        if (!(ties & bit_of(i))) return;
        if (bin(i) > at) above |= bit_of(i);
        if (bin(i) == at) inside |= bit_of(i);
      });
      ties = inside, need -= found.above, count = found.count;
    }
  }

  __device__ unsigned long long number_of(const float (&x)[kEntries], unsigned lowest_bit) const {
    float score = x[0];
#pragma unroll
    for (int i = 1; i < kEntries; ++i)
      if (lowest_bit == bit_of(i)) score = x[i];
    return static_cast<unsigned long long>(static_cast<unsigned>(key_of(score)) ^ 0x80000000u) << 32 |
           static_cast<unsigned>(~entry_of(lowest_bit));
  }
  // Those of the `marked` that are among the `need` largest of all the marked, which are kFew at most.
  __device__ unsigned rank_few(const float (&x)[kEntries], unsigned marked, int need) {
#pragma unroll 1
    for (unsigned left = marked; left; left &= left - 1) s.few[atomicAdd(&s.few_count, 1)] = number_of(x, left & -left);
    __syncthreads();
    unsigned above = 0;
    if (!__any_sync(~0u, marked != 0)) return above;
    const unsigned long long a = s.few[lane], b = s.few[lane + 32];
#pragma unroll 1
    for (unsigned left = marked, lanes; (lanes = __ballot_sync(~0u, left != 0)) != 0; left &= left - 1) {
      const unsigned long long mine = number_of(x, left & -left);
#pragma unroll 1
      for (; lanes; lanes &= lanes - 1) {
        const int owner = __ffs(static_cast<int>(lanes)) - 1;
        const unsigned long long its = __shfl_sync(~0u, mine, owner);
        const int better = __popc(__ballot_sync(~0u, a > its)) + __popc(__ballot_sync(~0u, b > its));
        if (lane == owner && better < need) above |= left & -left;
      }
    }
    return above;
  }

  // Which of the entries are the `need` largest: `above`, and the first `need`, as it is afterwards, of the ties.
  __device__ unsigned narrow(const float (&x)[kEntries], Cut cut, int& need, unsigned& ties) {
    unsigned above = 0;
    int count = kList + 1;
    ties = all_entries();
    if (cut.good()) {
      float code[kEntries];
      find_bin_of(x, cut, need, code);
      const auto found = s.found;
      const float at = static_cast<float>(found.bin) + kCode;
      above = mask_of([&](int i) { return at - code[i]; });
      ties &= ~(above | mask_of([&](int i) { return code[i] - at; }));
      need -= found.above, count = found.count;
    }
    cut_by_key(x, above, ties, need, count);
    if (need == count) above |= ties, need = 0;
    else if (count <= kFew) above |= rank_few(x, ties, need), need = 0;
    return above;
  }

  // ---- ids

  // Stores n ids: from(i) is the position for lane first + i.
  template <class From>
  __device__ void store(int first, int n, From&& from) {
    if (p.out.positions) {
      int* to = p.out.positions + row * p.out.positions_row + first;
#pragma unroll 4
      for (int i = thread; i < n; i += kThreads) to[i] = from(i);
    }
    if (p.out.slots) {
      const IdRow ids(p.out, row);
      ids.store_slots(p.out, first + thread, first + n, kThreads, [&](int lane) { return from(lane - first); });
    }
  }
  // Stores the ids of the selected entries, `above` and the first `need` ties, in ascending order from lane `first` on.
  // Returns how many; `need` falls by the ties among them. `position`: of entries e to e + 3.
  template <class Position>
  __device__ int emit(unsigned above, unsigned ties, int& need, int first, Position&& position) {
    int from[kGroups];
    if (need > 0) {  // the first of the ties
      const int all = places(ties, 1, from);
      each_entry([&](int i) {
        if (ties & bit_of(i)) above |= from[i / 4]++ < need ? bit_of(i) : 0;
      });
      need = max(need - all, 0);
    }
    int4 positions[kGroups];
    each_group([&](int j) { positions[j] = position(first_of(j)); });
    const int stored = places(above, 0, from);
    each_group([&](int j) {
      int* to = s.chosen + from[j];
      const unsigned four = above >> (8 * j);
      if (four & 1) *to = positions[j].x;
      to += four & 1;
      if (four & 2) *to = positions[j].y;
      to += four >> 1 & 1;
      if (four & 4) *to = positions[j].z;
      to += four >> 2 & 1;
      if (four & 8) *to = positions[j].w;
    });
    __syncthreads();
    store(first, stored, [&](int i) { return s.chosen[i]; });
    return stored;
  }

  // ---- a row, or a block of it, as the list: filled up with -inf, which ranks last, being behind

  __device__ unsigned take(const float* scores, int n, float (&x)[kEntries]) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(scores) % 16 == 0;
    const std::uint64_t once = cuda::l2_policy(true);
    float4 v[kGroups];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {  // all at once: without a branch
      v[j] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      cuda::load_once(v[j], reinterpret_cast<const float4*>(scores + first_of(j)),
                      aligned && j < groups && first_of(j) + 4 <= n, once);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      x[4 * j] = v[j].x, x[4 * j + 1] = v[j].y, x[4 * j + 2] = v[j].z, x[4 * j + 3] = v[j].w;
    if (!aligned || n % 4 != 0)
      each_group([&](int j) {
        if (aligned && first_of(j) + 4 <= n) return;
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (first_of(j) + c < n) x[4 * j + c] = __ldcg(scores + first_of(j) + c);
      });
    each_entry([&](int i) { x[i] = canonical(x[i]); });
    return first_entries(n);
  }

  // The row itself, in exact keys.
  __device__ void read_again() {
    // The same for all threads: uniform registers hold them.
    const int start = __reduce_max_sync(~0u, p.starts ? max(p.starts[row], 0) : 0);
    const int n = __reduce_max_sync(~0u, visible(p.lengths[row], start)), k = min(n, p.k);
    const float* const scores = p.scores + row * p.scores_row + start;
    int low = -kInfinity, high = kInfinity, need = k;
    int count = n;
    __syncthreads();       // with whatever the CTA did before
    groups = kGroups - 1;  // all would spill registers
    constexpr int kBlock = (kGroups - 1) * 4 * kThreads;
    float x[kEntries];
    while (low < high && need < count) {
      const int shift = shift_of(low, high);
      for (int block = 0; block < n; block += min(kBlock, n - block)) {
        const unsigned mine = take(scores + block, min(kBlock, n - block), x);
        each_entry([&](int i) {
          const int key = key_of(x[i]);
          if ((mine & bit_of(i)) && key >= low && key <= high)
            atomicAdd(&s.bins[(static_cast<unsigned>(key) - static_cast<unsigned>(low)) >> shift], 1);
        });
      }
      find_bin(need);
      need -= s.found.above, count = s.found.count;
      const unsigned first = static_cast<unsigned>(low) + (static_cast<unsigned>(s.found.bin) << shift);
      const unsigned span = static_cast<unsigned>(high) - first;
      low = static_cast<int>(first);
      high = static_cast<int>(first + min((1u << shift) - 1, span));
    }
    for (int block = 0, stored = 0; stored < k; block += kBlock) {
      const unsigned mine = take(scores + block, min(kBlock, n - block), x);
      unsigned above = 0, ties = 0;
      each_entry([&](int i) {
        const int key = key_of(x[i]);
        if (key > high) above |= bit_of(i);
        if (key >= low && key <= high) ties |= bit_of(i);
      });
      stored += emit(above & mine, ties & mine, need, stored, [&](int entry) {
        const int at = block + entry;
        return int4{at, at + 1, at + 2, at + 3};
      });
      __syncthreads();
    }
  }

  // ---- long rows

  // Strips of a warp that are on their way into L2: 128 KB a CTA.
  template <int kFours>
  static constexpr int kRounds = (128 << 10) / (kWarps * kFours * 512);

  // A row in groups of four scores that lie side by side at a multiple of 16 bytes: group g holds positions
  // 4 g - ahead .. 4 g - ahead + 3. A warp takes a strip at a time, each lane some fours.
  template <int kFours>
  struct Groups {
    static constexpr int kStrip = 128 * kFours;
    const float4* first;
    int ahead, length;
    std::uint64_t once = cuda::l2_policy(true);
    __device__ Groups(const float* scores, int n)
        : ahead(static_cast<int>(reinterpret_cast<std::uintptr_t>(scores) / 4 % 4)), length(n) {
      first = reinterpret_cast<const float4*>(scores - ahead);
    }
    __device__ unsigned strips() const {
      return ((static_cast<unsigned>(length) + static_cast<unsigned>(ahead)) + kStrip - 1) / kStrip;
    }
    __device__ int position(int strip) const { return strip * kStrip - ahead; }
    __device__ bool inside(int strip) const { return position(strip) >= 0 && length - position(strip) >= kStrip; }
    // Has a strip brought into L2.
    __device__ void prefetch(int strip, int end, int lane) const {
      if (strip < end && lane < kStrip / 32) cuda::prefetch_l2(first + strip * (kStrip / 4) + lane * 8);
    }
    // Loads a lane's share of a strip; NaN, which reaches no threshold, where the row has no score.
    __device__ void load(int strip, int lane, float4 (&v)[kFours]) const {
      const float4* from = first + strip * (kStrip / 4) + lane;
      if (inside(strip)) {
#pragma unroll
        for (int j = 0; j < kFours; ++j) cuda::load_once(v[j], from + j * 32, true, once);
      } else {
        auto at = [&](int j, int i) {
          const unsigned place = static_cast<unsigned>(position(strip) + (j * 32 + lane) * 4 + i);
          return place < static_cast<unsigned>(length) ? __ldcg(reinterpret_cast<const float*>(from + j * 32) + i)
                                                       : NAN;
        };
#pragma unroll
        for (int j = 0; j < kFours; ++j) v[j] = {at(j, 0), at(j, 1), at(j, 2), at(j, 3)};
      }
    }
    // Few enough samples to be quick, and so many that the list is short: kList >> fewer().
    __device__ int fewer() const { return length > (1 << 18) ? 0 : length > (1 << 17) ? 1 : 2; }
    // Group i of them.
    __device__ float4 sample(int i) const {
      const unsigned skip = ahead == 0 ? 0 : 1,
                     last = (static_cast<unsigned>(length) + static_cast<unsigned>(ahead)) / 4;
      const unsigned share = static_cast<unsigned>(i) << (fewer() + 2);  // of kList
      return __ldcg(first + skip + (static_cast<std::uint64_t>(last - skip) * share >> kListBits));
    }
  };

  struct Range {  // of strips
    int begin, end;
  };
  __device__ static Range range_of(unsigned strips, int part, int parts) {
    const auto before = [&](int i) {
      return static_cast<int>(strips * static_cast<unsigned>(i) / static_cast<unsigned>(parts));
    };
    return {before(part), before(part + 1)};
  }

  // How many samples shall reach the threshold so that k of the row do most probably: those counts vary as a Poisson
  // variable does.
  __device__ static int rank_of(int samples, int n, int k) {
    const float share = static_cast<float>(k) * static_cast<float>(samples) * reciprocal(static_cast<float>(n));
    return static_cast<int>(share + 4.f * root(share) + 5.f);
  }

  // What is above the threshold in strips [begin, end), in ascending position. Returns how many are; more than kList:
  // enough was seen. `next`: this warp's first strip, if `loaded`.
  template <int kFours>
  __device__ int filter(const Groups<kFours>& row_groups, float threshold, int begin, int end, float4 (&next)[kFours],
                        bool loaded, ListEntry* list) {
    int listed = 0;
    groups = kFours;
#pragma unroll 1
    for (int first = begin - kWarps; first < end && listed <= kList; first += kWarps) {
      const int strip = first + warp;
      float now[kEntries]{};
#pragma unroll
      for (int j = 0; j < kFours; ++j)
        now[4 * j] = next[j].x, now[4 * j + 1] = next[j].y, now[4 * j + 2] = next[j].z, now[4 * j + 3] = next[j].w;
      if (strip + kWarps < end && !loaded) row_groups.load(strip + kWarps, lane, next);
      loaded = false;
      if (first < begin) continue;
      row_groups.prefetch(strip + kRounds<kFours> * kWarps, end, lane);
      const unsigned reach = strip < end ? mask_of([&](int i) { return threshold - now[i]; }) : 0;  // a NaN has no sign
      int from[kGroups];
      const int reached = places(reach, (first - begin) / kWarps & 1, from);
      if (listed + reached <= kList) {
        const int position = row_groups.position(strip) + lane * 4;
        each_group([&](int j) {
          ListEntry* to = list + listed + from[j];
          const unsigned four = reach >> (8 * j);
          if (four & 1) *to = {now[4 * j], position + j * 128};
          to += four & 1;
          if (four & 2) *to = {now[4 * j + 1], position + j * 128 + 1};
          to += four >> 1 & 1;
          if (four & 4) *to = {now[4 * j + 2], position + j * 128 + 2};
          to += four >> 2 & 1;
          if (four & 8) *to = {now[4 * j + 3], position + j * 128 + 3};
        });
      }
      listed += reached;
    }
    return listed;
  }

  // Hands over that this CTA's part of the row has n entries. The last of a row's CTAs to arrive gets all of them: the
  // length of the list; the others get -1. Does not fit: more than kList.
  __device__ int hand_over(int n, int part) {
    const std::int64_t at = static_cast<std::int64_t>(row) * p.parts;
    if (thread == 0) p.counts[at + part] = min(n, kList + 1);
    __syncthreads();
    if (thread == 0) {
      s.last = count_arrival(p.tickets + row) == static_cast<unsigned>(p.parts - 1);
      if (s.last) p.tickets[row] = 0;
    }
    __syncthreads();
    if (!s.last) return -1;

    // Counts and the first of the entries at once: of the parts `warp` and `warp + kWarps`, 64 at a time.
    constexpr int kLoads = kSoon / 64;
    float4 soon[2][kLoads];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int i = min(warp + u * kWarps, p.parts - 1);
      const auto* from = reinterpret_cast<const float4*>(p.lists + (at + i) * kList) + lane;
#pragma unroll
      for (int v = 0; v < kLoads; ++v) soon[u][v] = __ldcg(from + v * 32);
    }
    const int mine = lane < p.parts ? __ldcg(p.counts + at + lane) : 0;
    int upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    const int all = __shfl_sync(~0u, upto, 31);
    if (all > kList) return all;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int i = warp + u * kWarps;
      const int count = __shfl_sync(~0u, mine, i);
      ListEntry* to = s.list + __shfl_sync(~0u, upto, i) - count;
#pragma unroll
      for (int v = 0; v < kLoads; ++v) {
        const int entry = (v * 32 + lane) * 2;
        if (entry < count) to[entry] = {soon[u][v].x, __float_as_int(soon[u][v].y)};
        if (entry + 1 < count) to[entry + 1] = {soon[u][v].z, __float_as_int(soon[u][v].w)};
      }
      const auto* from = reinterpret_cast<const float2*>(p.lists + (at + i) * kList);
#pragma unroll 1
      for (int entry = kSoon + lane; entry < count; entry += 32) {
        const float2 got = __ldcg(from + entry);
        to[entry] = {got.x, __float_as_int(got.y)};
      }
    }
    return all;
  }

  __device__ void take_list(int n, float (&x)[kEntries]) {
    set_groups(n);
    __syncthreads();
    each_group([&](int j) {
      const auto* from = reinterpret_cast<const float4*>(s.list + first_of(j));
      const float4 a = from[0], b = from[1];
      x[4 * j] = a.x, x[4 * j + 1] = a.z, x[4 * j + 2] = b.x, x[4 * j + 3] = b.z;
    });
    if ((warp + 1) * groups * 128 > n)
      each_entry([&](int i) {
        if (first_of(i / 4) + i % 4 >= n) x[i] = -INFINITY;
      });
  }

  template <bool Shared>
  static constexpr int kFoursOf = Shared ? 2 : 3;  // all warps have some of a part; four a lane would spill registers
  // Starts the loads that a list begins with: the sample, and of a shared row the first strips.
  template <bool Shared>
  __device__ void start_list(const float* scores, int n, int part, float (&x)[kEntries],
                             float4 (&next)[kFoursOf<Shared>]) {
    const Groups<kFoursOf<Shared>> row_groups(scores, n);
    set_groups(kList >> row_groups.fewer());
    each_group([&](int j) {
      const float4 v = row_groups.sample(j * kThreads + thread);
      x[4 * j] = v.x, x[4 * j + 1] = v.y, x[4 * j + 2] = v.z, x[4 * j + 3] = v.w;
    });
    const auto [begin, end] = range_of(row_groups.strips(), part, Shared ? p.parts : 1);
    if (Shared && begin + warp < end && row_groups.inside(begin + warp)) row_groups.load(begin + warp, lane, next);
  }
  // A list that holds the k largest of the row and some more, in s.list: its length; and bins for it, in s.cut.
  // Negative: another CTA has it. Less than k or more than kList: there is none.
  template <bool Shared>
  __device__ int list_of(const float* scores, int n, int k, int part) {
    float x[kEntries];
    float4 next[kFoursOf<Shared>];
    return list_of<Shared>(scores, n, k, part, x, next, false);
  }
  // The same, with the loads of start_list already started or still to be.
  template <bool Shared>
  __device__ int list_of(const float* scores, int n, int k, int part, float (&x)[kEntries],
                         float4 (&next)[kFoursOf<Shared>], bool started) {
    constexpr int kFours = kFoursOf<Shared>;
    const Groups<kFours> row_groups(scores, n);
    const int samples = kList >> row_groups.fewer(), rank = rank_of(samples, n, k);
    // A quarter of the list is left for what the guess is off by.
    if (k > kList / 4 * 3 || rank >= samples) return part > 0 ? -1 : 0;
    const auto [begin, end] = range_of(row_groups.strips(), part, Shared ? p.parts : 1);
    for (int i = 0; i < kRounds<kFours>; ++i) row_groups.prefetch(begin + warp + i * kWarps, end, lane);
    set_groups(samples);
    if (!started) start_list<Shared>(scores, n, part, x, next);
    const bool loaded = Shared && begin + warp < end && row_groups.inside(begin + warp);
    each_entry([&](int i) { x[i] = canonical(x[i]); });
    const Cut cut = cut_of(x);
    int listed = kList + 1;
    if (cut.good()) {
      float code[kEntries];
      find_bin_of(x, cut, rank, code);
      const int bin = s.found.bin;
      const float threshold = cut.edge(bin);
      if (thread == 0) s.cut[0] = threshold, s.cut[1] = cut.width + (cut.low - threshold);
      if (bin > 0)
        listed = filter(row_groups, threshold, begin, end, next, loaded,
                        Shared ? p.lists + (row * p.parts + part) * std::int64_t{kList} : s.list);
    }
    if constexpr (Shared) listed = hand_over(listed, part);
    return listed;
  }

  // Rows: Short: at most a list; Long; Shared by p.parts CTAs.
  template <RowKind kKind>
  __device__ void run(int part) {
    // What a length is before the kernels before are done may be wrong, but is right mostly: a shared row's first loads
    // go by it, and again if it was not.
    const int early = kKind == RowKind::kShared ? cuda::load_now(p.lengths + row) : 0;
    cuda::wait_for_kernel();
    cuda::let_next_start();  // not before: the CTAs of many kernels would wait, and lie badly among multiprocessors
    const int start = p.starts ? max(p.starts[row], 0) : 0, length = p.lengths[row];
    constexpr bool kShared = kKind == RowKind::kShared;
    [[maybe_unused]] float sample[kShared ? kEntries : 1];
    [[maybe_unused]] float4 strip[kShared ? kFoursOf<true> : 1];
    const bool starts_early = kShared && !p.starts && visible(early, 0) > kList;
    if constexpr (kShared)
      if (starts_early) start_list<true>(p.scores + row * p.scores_row, visible(early, 0), part, sample, strip);
    if (p.skip_empty && length <= 0) return;
    clear();
    const int n = visible(length, start), k = min(n, p.k);
    const int later = kKind == RowKind::kShort && row + p.ahead < p.rows ? p.lengths[row + p.ahead] : 0;
    const float* scores = p.scores + row * p.scores_row + start;
    int listed = n;
    float x[kEntries];
    Cut cut{};
    const bool from_list = kKind != RowKind::kShort && n > kList;
    if constexpr (kKind != RowKind::kShort) {
      if (from_list) {
        if constexpr (kShared)
          listed = list_of<true>(scores, n, k, part, sample, strip, starts_early && n == visible(early, 0));
        else listed = list_of<false>(scores, n, k, part);
        if (listed < 0) return;
        if (listed < k || listed > kList) {
          read_row_again<Tile>(p, s, row);
          return;
        }
        take_list(listed, x);
        cut = {s.cut[0], s.cut[1]};
      } else if (part > 0) {
        return;
      }
    }
    if (!from_list) {
      set_groups(listed);
      take(scores, listed, x);
      if (thread * 32 < later) cuda::prefetch_l2(p.scores + (row + p.ahead) * p.scores_row + thread * 32);
      if (k < listed) cut = cut_of(x);
    }
    finish(x, listed, k, cut, from_list);
  }
  // Selects k of the entries and stores their ids.
  __device__ void finish(const float (&x)[kEntries], int listed, int k, Cut cut, bool from_list) {
    int need = k;
    unsigned above = 0, ties = 0;
    if (k == listed) above = first_entries(listed), need = 0;
    else above = narrow(x, cut, need, ties);
    emit(above, ties, need, 0, [&](int entry) {
      if (!from_list) return int4{entry, entry + 1, entry + 2, entry + 3};
      const auto* from = reinterpret_cast<const int4*>(s.list + entry);
      const int4 a = from[0], b = from[1];
      return int4{a.y, a.w, b.y, b.w};
    });
    if (k < p.k) store(k, p.k - k, [](int) { return -1; });
  }

  // ---- rows by shortlists

  // A threshold that most probably more than k scores reach, though not more than are kept: -inf where all are.
  __device__ void guess() {
    cuda::wait_for_kernel();
    cuda::let_next_start();
    const int n = visible(p.lengths[row], 0), samples = base::samples_of(n, p.stride), k = min(n, p.k);
    const float share = static_cast<float>(k) * static_cast<float>(samples) * reciprocal(static_cast<float>(n));
    const int rank = static_cast<int>(1.25f * share + 4.f * root(share) + 5.f);
    const bool all = n <= base::kShortlist;
    float least = all ? -INFINITY : INFINITY;  // infinity where none is known, and more than are kept are counted then
    if (!all && rank < samples) {
      clear();
      set_groups(samples);
      float x[kEntries], code[kEntries];
      take(reinterpret_cast<const float*>(p.shortlists[row].of), samples, x);
      const Cut cut = cut_of(x);
      if (cut.good()) {
        find_bin_of(x, cut, rank, code);
        if (s.found.bin > 0) least = cut.edge(s.found.bin);
      }
    }
    if (thread == 0) {
      p.shortlists[row].count = least < INFINITY ? 0 : base::kShortlist + 1;
      p.shortlists[row].least = least;
    }
  }
  // Puts the shortlist into s.list, in ascending position.
  __device__ void sort_shortlist(int listed, int n, SpanWord* words) {
    static_assert(base::kShortlist <= kList);
    constexpr int kEach = kSpanWords / kThreads;
    const auto* const from = reinterpret_cast<const float2*>(p.shortlists[row].of);
    const auto each_in_span = [&](int first, auto&& f) {
#pragma unroll 4
      for (int i = thread; i < listed; i += kThreads) {
        const float2 entry = __ldcg(from + i);
        const unsigned at = static_cast<unsigned>(__float_as_int(entry.y) - first);
        if (at < static_cast<unsigned>(kSpan)) f(entry, at / 32, at % 32);
      }
    };
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < n; first += min(kSpan, n - first)) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) words[i * kThreads + thread] = {0, 0};
      __syncthreads();
      each_in_span(first, [&](float2, unsigned word, unsigned bit) { atomicOr(&words[word].bits, 1u << bit); });
      __syncthreads();
      int sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += __popc(words[thread * kEach + i].bits);
      int upto = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
      }
      if (lane == 31) s.sums[warp] = upto;
      __syncthreads();
      const int of_warp = lane < kWarps ? s.sums[lane] : 0;
      int at = before + __reduce_add_sync(~0u, lane < warp ? of_warp : 0) + upto - sum;
      before += __reduce_add_sync(~0u, of_warp);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        SpanWord& word = words[thread * kEach + i];
        word.before = static_cast<unsigned>(at), at += __popc(word.bits);
      }
      __syncthreads();
      each_in_span(first, [&](float2 entry, unsigned word, unsigned bit) {
        const SpanWord w = words[word];
        s.list[w.before + static_cast<unsigned>(__popc(w.bits & ((1u << bit) - 1)))] = {entry.x,
                                                                                        __float_as_int(entry.y)};
      });
      __syncthreads();
    }
  }
  __device__ void select_shortlisted(SpanWord* words) {
    cuda::wait_for_kernel();
    cuda::let_next_start();
    const int n = visible(p.lengths[row], 0), k = min(n, p.k), listed = p.shortlists[row].count;
    const bool good = listed >= k && listed <= base::kShortlist;
    if (thread == 0) p.left[row] = good ? 0 : n;
    if (!good) return;
    clear();
    sort_shortlist(listed, n, words);
    float x[kEntries];
    take_list(listed, x);
    each_entry([&](int i) { x[i] = canonical(x[i]); });
    Cut cut{};
    if (k < listed) cut = cut_of(x);
    finish(x, listed, k, cut, true);
  }
};

template <class Arch, class Tile>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void guess_kernel(const __grid_constant__ CudaParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  Select<Tile>(p, *reinterpret_cast<SelectSmem<Tile>*>(smem), static_cast<int>(blockIdx.x)).guess();
}
template <class Arch, class Tile>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void choose_kernel(const __grid_constant__ CudaParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  auto& s = *reinterpret_cast<ShortlistSmem<Tile>*>(smem);
  Select<Tile>(p, s.select, static_cast<int>(blockIdx.x)).select_shortlisted(s.words);
}

template <class Tile>
__device__ void read_row_again(const CudaParams& p, SelectSmem<Tile>& s, int row) {
  Select<Tile>(p, s, row).read_again();
}

// Its registers are bounded through the threads it is said to have at most.
template <class Arch, class Tile, RowKind kKind>
__global__ __launch_bounds__(Tile::kMostThreads, Tile::kCtas) void select_kernel(const __grid_constant__ CudaParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int cta = static_cast<int>(blockIdx.x), parts = kKind == RowKind::kShared ? p.parts : 1;
  Select<Tile>(p, *reinterpret_cast<SelectSmem<Tile>*>(smem), cta / parts).template run<kKind>(cta % parts);
}

}  // namespace sievemla::stage::topk
