// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/select.cuh -- stage 2 on CUDA: exact top-k of rows of any length.
//
//   list    what may be among the k largest, in ascending position: a short row whole, each thread with some of it in
//           registers; of a longer row the scores that reach a threshold, guessed from a sample so that a little more
//           than k do. A row's CTAs all guess the same, each filters its part, and the last to arrive has the list.
//   narrow  bins of equal width between the least and the largest score, the bin that holds the k-th largest; what is
//           above it is selected. The few in it are ranked against each other, or the bin is cut up again.
//   emit    ids in ascending position: a prefix sum over warps' ballots
//
// Where the guess was bad (less than k reach it, or more than a list holds), the row's last CTA reads it again, in
// bins of the exact keys, until one key or a bin that is taken whole is left: up to three times, then once to emit. So
// the result never depends on the guess, nor on how the row was cut up.
#pragma once
#include <cstdint>

#include "topk/cuda/ids.cuh"

namespace sievemla::stage::topk {

inline constexpr int kBinBits = 11, kBins = 1 << kBinBits;
inline constexpr int kFew = 64;       // in the last bin: ranked by comparing all with all
inline constexpr int kStrip = 512;    // scores a warp filters at a time
inline constexpr int kStrips = 1024;  // that a CTA filters, at most

// Threads of a CTA, list entries of each, and CTAs wanted on a multiprocessor.
template <int Threads, int Entries, int Ctas>
struct SelectTile {
  static constexpr int kThreads = Threads, kWarps = Threads / 32, kEntries = Entries, kList = Threads * Entries;
  static constexpr int kListBits = 13;
  static_assert(kList == 1 << kListBits);
  static constexpr int kCtas = Ctas;
  static_assert(kWarps * Entries == 256 && Entries <= 32, "emit scans 8 cells a lane");
  static_assert(kStrips % Threads == 0 && kBins % Threads == 0 && kList <= 0xFFFF);
};

template <class Tile>
struct SelectSmem {
  alignas(16) int bins[kBins];
  alignas(16) int cells[256];  // marked entries, by entry and warp
  int low[32], high[32], sums[32];
  struct {
    int bin, above, count;
  } found;
  int few;
  float few_score[kFew];
  int few_entry[kFew];
  int last;  // of the few, that is selected; later: this CTA is
  union {
    float score[Tile::kList];  // of the list
    int chosen[Tile::kList];   // positions to be stored
  };
  // From here on for long rows only.
  int position[Tile::kList];  // of the list
  int listed;
  unsigned short strip_count[kStrips], strip_first[kStrips];  // in the list, as filtered
  int move[kStrips];  // by strip: from there to its place in the list; by part: the first of its entries
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
__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Bins of equal width between two finite scores. Monotone; what lies outside goes to the first or last bin.
struct Cut {
  float low, width, scale;
  __device__ Cut(int low_key, int high_key)
      : low(score_of(low_key)), width(score_of(high_key) - low), scale((kBins - 1) * reciprocal(width)) {}
  __device__ bool good() const { return width > 1e-30f && width < INFINITY; }
  __device__ int bin(float x) const {
    constexpr float kShift = 0x1p23f;  // its ulp is 1: adding it rounds to an integer, in the lower bits
    return __float_as_int(fmaf(fminf(fmaxf(x - low, 0.f), width), scale, kShift)) - __float_as_int(kShift);
  }
};

// ---- device -----------------------------------------------------------------------------------------

template <class Tile>
__device__ void read_row_again(const CudaParams& p, SelectSmem<Tile>& s, int row, const float* scores, std::int64_t n,
                               int k);

template <class Tile>
struct Select {
  static constexpr int kThreads = Tile::kThreads, kWarps = Tile::kWarps, kEntries = Tile::kEntries, kList = Tile::kList;
  static constexpr int kListBits = Tile::kListBits;
  using Smem = SelectSmem<Tile>;
  const CudaParams& p;
  Smem& s;
  const int row;
  const IdRow ids;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int live = kEntries;  // entries of a thread that some thread has

  __device__ Select(const CudaParams& params, Smem& smem, int r) : p(params), s(smem), row(r), ids(params.out, r) {}

  // Entry i of a thread is entry i * kThreads + thread of the list: a bit mask says which of a thread's count.
  __device__ unsigned first_entries(std::int64_t n) const {
    const std::int64_t mine = (n - thread + kThreads - 1) / kThreads;
    return mine <= 0 ? 0u : ~0u >> (32 - min(mine, std::int64_t{kEntries}));
  }

  // ---- of the whole CTA: every thread calls, every thread gets the result

  __device__ void least_and_largest(int& low, int& high) {
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane == 0) s.low[warp] = low, s.high[warp] = high;
    __syncthreads();
    low = __reduce_min_sync(~0u, s.low[lane % kWarps]), high = __reduce_max_sync(~0u, s.high[lane % kWarps]);
  }

  // Sum of the values of the threads before this one; `all` = the sum of all.
  __device__ int sum_before(int value, int& all) {
    int sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) s.sums[warp] = sum;
    __syncthreads();
    int warps = lane < kWarps ? s.sums[lane] : 0;
#pragma unroll
    for (int d = 1; d < kWarps; d *= 2) {
      const int other = __shfl_up_sync(~0u, warps, d);
      if (lane >= d) warps += other;
    }
    all = __shfl_sync(~0u, warps, kWarps - 1);
    const int before = __shfl_sync(~0u, warps, max(warp - 1, 0));
    return (warp > 0 ? before : 0) + sum - value;
  }

  __device__ void clear_bins() {
    for (int b = thread; b < kBins; b += kThreads) s.bins[b] = 0;
    if (thread == 0) s.few = 0;
    __syncthreads();
  }
  // The bin of the need-th largest of what was counted, into s.found.
  __device__ void find_bin(int need) {
    __syncthreads();
    constexpr int kMine = kBins / kThreads;
    const int top = kBins - 1 - thread * kMine;
    int count[kMine], sum = 0, all;
#pragma unroll
    for (int i = 0; i < kMine; ++i) sum += count[i] = s.bins[top - i];
    int above = sum_before(sum, all);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (above < need && need <= above + count[i]) s.found = {top - i, above, count[i]};
      above += count[i];
    }
    __syncthreads();
  }
  // Counts the marked entries by bin and finds the bin of the need-th largest.
  __device__ void find_bin_of(const int (&bin)[kEntries], unsigned marked, int need) {
    clear_bins();
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      if (i >= live) break;
      if (marked >> i & 1) atomicAdd(&s.bins[bin[i]], 1);
    }
    find_bin(need);
  }
  // From the least to the largest finite score.
  __device__ Cut cut_of(const float (&x)[kEntries], unsigned marked) {
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      if (i >= live) break;
      if ((marked >> i & 1) && fabsf(x[i]) < INFINITY) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
    }
    int low_key = key_of(low), high_key = key_of(high);
    least_and_largest(low_key, high_key);
    return {low_key, high_key};
  }

  // Splits the marked entries, more than `need` of them: `above` are among the `need` largest, and so are the first
  // `need` (as it is afterwards) of the `ties`.
  __device__ void narrow(const float (&x)[kEntries], unsigned& above, unsigned& ties, int& need) {
    const Cut cut = cut_of(x, ties);
    bool by_score = cut.good();
#pragma unroll 1
    for (;;) {
      int bin[kEntries];
      if (by_score) {
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          if (i >= live) break;
          bin[i] = cut.bin(x[i]);
        }
      } else {
        int low = kInfinity, high = -kInfinity;
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          bin[i] = key_of(x[i]);
          if (ties >> i & 1) low = min(low, bin[i]), high = max(high, bin[i]);
        }
        least_and_largest(low, high);
        if (low == high) return;
        const int shift = shift_of(low, high);
#pragma unroll
        for (int i = 0; i < kEntries; ++i)
          bin[i] = static_cast<int>((static_cast<unsigned>(bin[i]) - static_cast<unsigned>(low)) >> shift);
      }
      by_score = false;
      find_bin_of(bin, ties, need);
      const auto found = s.found;
      unsigned inside = 0;
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        if (i >= live) break;
        const unsigned bit = ties & 1u << i;
        if (bin[i] > found.bin) above |= bit;
        if (bin[i] == found.bin) inside |= bit;
      }
      ties = inside;
      need -= found.above;
      if (need == found.count) return;
      if (found.count <= kFew) return rank_few(x, above, ties, need, found.count);
    }
  }
  __device__ void rank_few(const float (&x)[kEntries], unsigned& above, unsigned& ties, int& need, int count) {
#pragma unroll
    for (int i = 0; i < kEntries; ++i)
      if (ties >> i & 1) {
        const int at = atomicAdd(&s.few, 1);
        s.few_score[at] = x[i], s.few_entry[at] = i * kThreads + thread;
      }
    __syncthreads();
    if (thread < count) {
      const float score = s.few_score[thread];
      const int entry = s.few_entry[thread];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j)
        rank += s.few_score[j] > score || (s.few_score[j] == score && s.few_entry[j] < entry);
      if (rank == need - 1) s.last = thread;
    }
    __syncthreads();
    const float score = s.few_score[s.last];
    const int entry = s.few_entry[s.last];
#pragma unroll
    for (int i = 0; i < kEntries; ++i)
      if ((ties >> i & 1) && (x[i] > score || (x[i] == score && i * kThreads + thread <= entry))) above |= 1u << i;
    ties = 0, need = 0;
  }

  // Stores the ids of the selected entries, `above` and the first `need` ties, in ascending order from lane `first` on.
  // Returns how many; `need` falls by the ties among them.
  template <class Position>
  __device__ int emit(unsigned above, unsigned ties, int& need, int first, Position&& position) {
    int stored = 0;
#pragma unroll 1
    for (bool settle = need > 0;; settle = false) {  // ties first: which of them are selected
      const unsigned marked = settle ? ties : above;
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const unsigned votes = __ballot_sync(~0u, marked >> i & 1);
        if (lane == 0) s.cells[i * kWarps + warp] = __popc(votes);
      }
      __syncthreads();
      // Lane l scans cells 8 l .. 8 l + 7; of these, the one of this warp is its (warp % 8)-th.
      const int4 c0 = *reinterpret_cast<const int4*>(&s.cells[lane * 8]);
      const int4 c1 = *reinterpret_cast<const int4*>(&s.cells[lane * 8 + 4]);
      const int cell[8] = {c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w};
      int sum = 0, mine = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j == warp % 8) mine = sum;
        sum += cell[j];
      }
      int upto = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
      }
      mine += upto - sum;
      stored = __shfl_sync(~0u, upto, 31);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        if (i >= live) break;
        const int before = __shfl_sync(~0u, mine, (i * kWarps + warp) / 8);
        const unsigned votes = __ballot_sync(~0u, marked >> i & 1);
        const int rank = before + __popc(votes & ((1u << lane) - 1));
        if (!(marked >> i & 1)) continue;
        if (!settle) s.chosen[rank] = position(i * kThreads + thread);
        else if (rank < need) above |= 1u << i;
      }
      __syncthreads();
      if (!settle) break;
      need = max(need - stored, 0);
    }
    for (int i = thread; i < stored; i += kThreads) ids.store(p.out, first + i, s.chosen[i]);
    return stored;
  }

  // The row itself, in exact keys.
  __device__ void read_again(const float* scores, std::int64_t n, int k) {
    int low = -kInfinity, high = kInfinity, need = k;
    std::int64_t count = n;
    auto load = [&](std::int64_t block, float (&x)[kEntries]) {
      const unsigned mine = first_entries(n - block);
#pragma unroll
      for (int i = 0; i < kEntries; ++i)
        x[i] = mine >> i & 1 ? canonical(__ldg(scores + block + i * kThreads + thread)) : -INFINITY;
      return mine;
    };
    __syncthreads();  // with whatever the CTA did before
    live = kEntries;
    float x[kEntries];
    while (low < high && need < count) {
      const int shift = shift_of(low, high);
      clear_bins();
      for (std::int64_t block = 0; block < n; block += kList) {
        const unsigned mine = load(block, x);
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          const int key = key_of(x[i]);
          if ((mine >> i & 1) && key >= low && key <= high)
            atomicAdd(&s.bins[(static_cast<unsigned>(key) - static_cast<unsigned>(low)) >> shift], 1);
        }
      }
      find_bin(need);
      need -= s.found.above, count = s.found.count;
      const unsigned first = static_cast<unsigned>(low) + (static_cast<unsigned>(s.found.bin) << shift);
      const unsigned span = static_cast<unsigned>(high) - first;
      low = static_cast<int>(first);
      high = static_cast<int>(first + min((1u << shift) - 1, span));
    }
    for (std::int64_t block = 0, stored = 0; block < n && stored < k; block += kList) {
      const unsigned mine = load(block, x);
      unsigned above = 0, ties = 0;
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const int key = key_of(x[i]);
        if ((mine >> i & 1) && key > high) above |= 1u << i;
        if ((mine >> i & 1) && key >= low && key <= high) ties |= 1u << i;
      }
      stored +=
          emit(above, ties, need, static_cast<int>(stored), [&](int entry) { return static_cast<int>(block) + entry; });
      __syncthreads();
    }
  }

  // ---- long rows

  // Whole groups of four scores that lie side by side at a multiple of 16 bytes: group g holds positions
  // 4 g - ahead .. 4 g - ahead + 3.
  struct Groups {
    const float4* first;
    int ahead;
    std::int64_t length;
    __device__ Groups(const float* scores, std::int64_t n)
        : ahead(static_cast<int>(reinterpret_cast<std::uintptr_t>(scores) / 4 % 4)), length(n) {
      first = reinterpret_cast<const float4*>(scores - ahead);
    }
    __device__ std::int64_t strips() const { return (length + ahead + kStrip - 1) / kStrip; }
    __device__ const float4* strip(std::int64_t i) const { return first + i * (kStrip / 4); }
    // Loads a lane's share of a strip; NaN, which reaches no threshold, where the row has no score.
    __device__ void load(int strip_at, int lane, float4 (&v)[4]) const {
      const float4* from = strip(strip_at) + lane;
      const std::int64_t position = static_cast<std::int64_t>(strip_at) * kStrip - ahead;
      if (position >= 0 && position + kStrip <= length) {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = __ldg(from + j * 32);
      } else {
        auto at = [&](int j, int i) {
          const std::int64_t place = position + (j * 32 + lane) * 4 + i;
          return place >= 0 && place < length ? __ldg(reinterpret_cast<const float*>(from + j * 32) + i) : NAN;
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = {at(j, 0), at(j, 1), at(j, 2), at(j, 3)};
      }
    }
  };

  // A score of the row that about `rank` of `samples` reach, the k-th largest being most probably below: those counts
  // vary as a Poisson variable does. -inf: no use.
  __device__ float guess(const Groups& groups, int k) {
    const int samples = groups.length > (1 << 19) ? kList : kList / 2;
    const float share =
        static_cast<float>(k) * static_cast<float>(samples) * reciprocal(static_cast<float>(groups.length));
    const int rank = static_cast<int>(share + 4.5f * root(share) + 5.f);
    if (rank >= samples) return -INFINITY;
    const int skip = (4 - groups.ahead) % 4 == 0 ? 0 : 1, last = static_cast<int>((groups.length + groups.ahead) / 4);
    float x[kEntries];
    unsigned mine = 0;
    live = samples / kThreads;
#pragma unroll
    for (int i = 0; i < kEntries / 4; ++i) {
      const int sample = i * kThreads + thread;
      float4 v{};
      if (sample < samples / 4) {
        // A multiple of 1 / kList, rounded down.
        const unsigned share_of_list = static_cast<unsigned>(sample) * static_cast<unsigned>(kList * 4 / samples);
        v = __ldg(groups.first + skip + (static_cast<std::uint64_t>(last - skip) * share_of_list >> kListBits));
        mine |= 15u << (4 * i);
      }
      x[4 * i] = canonical(v.x), x[4 * i + 1] = canonical(v.y);
      x[4 * i + 2] = canonical(v.z), x[4 * i + 3] = canonical(v.w);
    }
    const Cut cut = cut_of(x, mine);
    if (!cut.good()) return -INFINITY;
    int bin[kEntries];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) bin[i] = cut.bin(x[i]);
    find_bin_of(bin, mine, rank);
    int low = kInfinity, high = 0;
#pragma unroll
    for (int i = 0; i < kEntries; ++i)
      if ((mine >> i & 1) && bin[i] >= s.found.bin) low = min(low, key_of(x[i]));
    least_and_largest(low, high);
    return score_of(low);
  }

  // Appends what reaches the threshold of one strip to the list in shared memory, if it fits.
  __device__ void filter(const float4 (&v)[4], float threshold, int strip, int position) {
    unsigned reach = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      reach |= (v[j].x >= threshold ? 1u : 0u) << (4 * j) | (v[j].y >= threshold ? 2u : 0u) << (4 * j) |
               (v[j].z >= threshold ? 4u : 0u) << (4 * j) | (v[j].w >= threshold ? 8u : 0u) << (4 * j);
    }
    // Ascending position is j, lane, component: four counts of up to 128, a byte each.
    const unsigned count = __popc(reach & 0xFu) | __popc(reach & 0xF0u) << 8 | __popc(reach & 0xF00u) << 16 |
                           __popc(reach & 0xF000u) << 24;
    unsigned upto = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    const unsigned all = __shfl_sync(~0u, upto, 31);
    const int total = static_cast<int>((all & 255) + (all >> 8 & 255) + (all >> 16 & 255) + (all >> 24));
    int first = 0;
    if (lane == 0) {
      first = atomicAdd(&s.listed, total);
      s.strip_count[strip] = static_cast<unsigned short>(total);
      s.strip_first[strip] = static_cast<unsigned short>(min(first, 0xFFFF));
    }
    first = __shfl_sync(~0u, first, 0);
    if (first + total > kList) return;
    const unsigned before = upto - count;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int at = first + static_cast<int>(before >> (8 * j) & 255);
      const float* scores = &v[j].x;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (reach >> (4 * j + i) & 1) s.score[at] = scores[i], s.position[at++] = position + (j * 32 + lane) * 4 + i;
      first += static_cast<int>(all >> (8 * j) & 255);
    }
  }

  // Fills the list from strips [begin, end). Returns how many entries it would take.
  __device__ int filter_strips(const Groups& groups, int k, int begin, int end) {
    if (thread == 0) s.listed = 0;
    if (begin + warp < end) prefetch(groups.strip(begin + warp) + lane * (kStrip / 4 / 32));
    const float threshold = guess(groups, k);
    if (threshold == -INFINITY) return kList + 1;
    float4 now[4], next[4];
#pragma unroll 1
    for (int strip = begin + warp - kWarps; strip < end; strip += kWarps) {
      if (strip + kWarps < end) groups.load(strip + kWarps, lane, next);
      if (strip >= begin) filter(now, threshold, strip - begin, strip * kStrip - groups.ahead);
#pragma unroll
      for (int j = 0; j < 4; ++j) now[j] = next[j];
    }
    __syncthreads();
    return s.listed;
  }

  // By how much an entry of a strip moves so that the list is in ascending position.
  __device__ void find_moves(int strips) {
    constexpr int kMine = kStrips / kThreads;
    int count[kMine], sum = 0, all;
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      sum += count[i] = thread * kMine + i < strips ? s.strip_count[thread * kMine + i] : 0;
    int before = sum_before(sum, all);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int strip = thread * kMine + i;
      if (strip < strips) s.move[strip] = before - s.strip_first[strip];
      before += count[i];
    }
    __syncthreads();
  }

  // Moves the n entries of the list within it.
  __device__ void put_in_order(const Groups& groups, int n) {
    float x[kEntries];
    int position[kEntries];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int entry = i * kThreads + thread;
      x[i] = entry < n ? s.score[entry] : 0.f, position[i] = entry < n ? s.position[entry] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int entry = i * kThreads + thread;
      if (entry >= n) break;
      const int to = entry + s.move[(position[i] + groups.ahead) / kStrip];
      s.score[to] = x[i], s.position[to] = position[i];
    }
    __syncthreads();
  }

  // Hands this CTA's n entries over. The last of a row's CTAs to arrive gets all: the length of the list; the others
  // get -1. Does not fit: more than kList.
  __device__ int hand_over(const Groups& groups, int n, int part, int begin) {
    const std::int64_t at = static_cast<std::int64_t>(row) * p.parts;
    if (n <= kList) {
      ListEntry* list = p.lists + (at + part) * kList;
      for (int entry = thread; entry < n; entry += kThreads) {
        const int position = s.position[entry];
        list[entry + s.move[(position + groups.ahead) / kStrip - begin]] = {s.score[entry], position};
      }
    }
    if (thread == 0) p.counts[at + part] = n;
    __threadfence();
    __syncthreads();
    if (thread == 0) {
      s.last = atomicAdd(p.tickets + row, 1u) == static_cast<unsigned>(p.parts - 1);
      if (s.last) p.tickets[row] = 0;
    }
    __syncthreads();
    if (!s.last) return -1;
    __threadfence();

    int all;
    const int before = sum_before(thread < p.parts ? min(__ldcg(p.counts + at + thread), kList + 1) : 0, all);
    if (all > kList) return all;
    if (thread < p.parts) s.move[thread] = before;
    __syncthreads();
    for (int i = warp; i < p.parts; i += kWarps) {
      const auto* list = reinterpret_cast<const float2*>(p.lists + (at + i) * kList);
      const int to = s.move[i], count = (i + 1 < p.parts ? s.move[i + 1] : all) - to;
#pragma unroll 4
      for (int entry = lane; entry < count; entry += 32) {
        const float2 got = __ldcg(list + entry);
        s.score[to + entry] = got.x, s.position[to + entry] = __float_as_int(got.y);
      }
    }
    __syncthreads();
    return all;
  }

  // The list of a long row, as hand_over.
  __device__ int list_of(const Groups& groups, int k, int part) {
    const int strips = static_cast<int>(groups.strips());
    const int begin = strips * part / p.parts, end = strips * (part + 1) / p.parts;
    const int n = filter_strips(groups, k, begin, end);
    if (n <= kList) find_moves(end - begin);
    if (p.parts > 1) return hand_over(groups, n, part, begin);
    if (n <= kList) put_in_order(groups, n);
    return n;
  }

  // Selects `need` of the `listed` entries and stores them.
  template <class Score, class Position>
  __device__ void select(int listed, int need, Score&& score, Position&& position) {
    unsigned above = 0, ties = first_entries(listed);
    live = (listed + kThreads - 1) / kThreads;
    float x[kEntries];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) x[i] = ties >> i & 1 ? score(i * kThreads + thread) : -INFINITY;
    if (need < listed) narrow(x, above, ties, need);
    emit(above, ties, need, 0, position);
  }

  template <bool Long>
  __device__ void run(int part) {
    const std::int64_t start = p.starts ? max(p.starts[row], 0) : 0;
    const std::int64_t n = max(min(static_cast<std::int64_t>(p.lengths[row]), p.width - start), std::int64_t{0});
    const int k = static_cast<int>(min(n, static_cast<std::int64_t>(p.k)));
    const float* scores = p.scores + row * p.scores_row + start;
    if (n <= kList) {
      if (part > 0) return;
      select(
          static_cast<int>(n), k, [&](int entry) { return canonical(__ldg(scores + entry)); },
          [](int entry) { return entry; });
    } else if constexpr (Long) {
      const Groups groups(scores, n);
      // A quarter of the list is left for what the guess is off by.
      const bool guessable = k <= kList / 4 * 3 && groups.strips() <= std::int64_t{kStrips} * p.parts;
      if (part > 0 && !guessable) return;
      int listed = 0;
      if (guessable) listed = list_of(groups, k, part);
      if (listed < 0) return;
      if (listed >= k && listed <= kList)
        select(listed, k, [&](int entry) { return s.score[entry]; }, [&](int entry) { return s.position[entry]; });
      else read_row_again<Tile>(p, s, row, scores, n, k);
    }
    for (int i = k + thread; i < p.k; i += kThreads) ids.store(p.out, i, -1);
  }
};

template <class Tile>
__device__ void read_row_again(const CudaParams& p, SelectSmem<Tile>& s, int row, const float* scores, std::int64_t n,
                               int k) {
  Select<Tile>(p, s, row).read_again(scores, n, k);
}

// Long: rows may be longer than a list.
template <class Arch, class Tile, bool Long>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtas) void select_kernel(const __grid_constant__ CudaParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int row = static_cast<int>(blockIdx.x) / p.parts, part = static_cast<int>(blockIdx.x) % p.parts;
  Select<Tile>(p, *reinterpret_cast<SelectSmem<Tile>*>(smem), row).template run<Long>(part);
}

}  // namespace sievemla::stage::topk
