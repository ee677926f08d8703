// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/topk/cuda/together.cuh -- exact top-k of few rows of up to 128K scores, by a cluster of CTAs a row (sm_90).
//
// Each CTA has a part of the row in registers and lists what reaches the threshold, which all guess alike from one
// sample (select.cuh). The CTAs then count their lists in the same bins and read each other's counts: so each knows the
// bin of the k-th largest, and where its own ids go. The few in that bin are told to all, and ranked by all. Each CTA
// stores its ids. Nothing is handed over through global memory, and no CTA does the work of all.
//
// A bin that holds too many goes to the first CTA, with all lists; a bad guess too, with the row.
#pragma once
#include "topk/cuda/kernels.h"
#include "topk/cuda/select.cuh"

namespace sievemla::stage::topk {

inline constexpr int kListBins = 512;  // a thread each

template <class Tile>
struct TogetherSmem {
  SelectSmem<Tile> select;
  int counts[kListBins];                     // of this CTA's list
  alignas(16) unsigned long long few[kFew];  // of all CTAs, one after the other's
  int listed, few_count;
  int before;                // few of the CTAs before
  unsigned long long least;  // of the few that are selected
  unsigned selected[2];      // bit per few
};

// Apart, as read_row_again.
template <class Tile>
__device__ __noinline__ void select_list(const CudaParams& p, SelectSmem<Tile>& s, int row, int listed, int k) {
  Select<Tile> one(p, s, row);
  float x[Select<Tile>::kEntries];
  one.take_list(listed, x);
  one.finish(x, listed, k, {s.cut[0], s.cut[1]}, true);
}

template <class Tile>
struct Together {
  using One = Select<Tile>;
  static constexpr int kThreads = Tile::kThreads, kWarps = Tile::kWarps;
  static constexpr int kGroups = kMostTogether / (kTogether * 4 * kThreads), kEntries = 4 * kGroups;
  static_assert(kGroups == 8, "four bits of a mask for each");
  static_assert(kThreads == kListBins);

  const CudaParams& p;
  TogetherSmem<Tile>& s;
  const int row, rank;
  One one;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int groups = kGroups;  // that a thread has

  __device__ Together(const CudaParams& params, TogetherSmem<Tile>& smem, int r, int i)
      : p(params), s(smem), row(r), rank(i), one(params, smem.select, r) {}

  // What a row of n scores is read as: this thread's share, and of the sample.
  struct Loads {
    float4 of[kGroups], sample;
  };
  __device__ int position_of(int group) const {
    return rank * groups * (4 * kThreads) + ((warp * groups + group) * 32 + lane) * 4;
  }
  __device__ void load(const float* scores, int n, Loads& x) {
    const int fours = n / 4;
    groups = (n + kTogether * 4 * kThreads - 1) / (kTogether * 4 * kThreads);
    x.sample = __ldcg(reinterpret_cast<const float4*>(scores) +
                      static_cast<int>(static_cast<unsigned>(fours) * static_cast<unsigned>(thread) / kThreads));
    const int at = position_of(0);
    const float* const from = scores + at;
    if (at + (groups - 1) * 128 + 4 <= n) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        if (j >= groups) break;
        x.of[j] = __ldcg(reinterpret_cast<const float4*>(from + j * 128));
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {  // NaN, which reaches no threshold, beyond the end
      if (j >= groups) break;
      const auto of = [&](int c) { return at + j * 128 + c < n ? __ldcg(from + j * 128 + c) : NAN; };
      x.of[j] = {of(0), of(1), of(2), of(3)};
    }
  }

  // Those above the threshold into s.select.list, in ascending position: how many.
  __device__ int filter(const Loads& x, float threshold) {
    unsigned reach = 0;  // bit 4 j + c
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (j >= groups) break;
      const float of[4] = {x.of[j].x, x.of[j].y, x.of[j].z, x.of[j].w};
      unsigned four = 0;
#pragma unroll
      for (int c = 3; c >= 0; --c) four = __funnelshift_l(__float_as_uint(threshold - of[c]), four, 1);
      reach += four << (4 * j);
    }
    // How many of each group, in bytes: of groups 0, 2, 4, 6 and 1, 3, 5, 7.
    const unsigned pairs = reach - (reach >> 1 & 0x55555555u),
                   all_fours = (pairs & 0x33333333u) + (pairs >> 2 & 0x33333333u);
    const unsigned even = all_fours & 0x0F0F0F0Fu, odd = all_fours >> 4 & 0x0F0F0F0Fu;
    unsigned upto_even = even, upto_odd = odd;  // 128 in a byte at most
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned e = __shfl_up_sync(~0u, upto_even, d), o = __shfl_up_sync(~0u, upto_odd, d);
      if (lane >= d) upto_even += e, upto_odd += o;
    }
    const unsigned all_even = __shfl_sync(~0u, upto_even, 31), all_odd = __shfl_sync(~0u, upto_odd, 31);
    if (lane == 0)
      s.select.marked[0][warp] = static_cast<int>(__dp4a(all_even, 0x01010101u, __dp4a(all_odd, 0x01010101u, 0u)));
    __syncthreads();
    const int here = lane < kWarps ? s.select.marked[0][lane] : 0;
    int at = __reduce_add_sync(~0u, lane < warp ? here : 0);
    const int listed = __reduce_add_sync(~0u, here);
    if (listed > kList) return listed;
    upto_even -= even, upto_odd -= odd;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (j >= groups) break;
      const unsigned four = reach >> (4 * j);
      const int shift = 8 * (j / 2), position = position_of(j);
      ListEntry* to = s.select.list + at + ((j % 2 ? upto_odd : upto_even) >> shift & 255);
      at += static_cast<int>((j % 2 ? all_odd : all_even) >> shift & 255);
      if (four & 1) *to = {x.of[j].x, position};
      to += four & 1;
      if (four & 2) *to = {x.of[j].y, position + 1};
      to += four >> 1 & 1;
      if (four & 4) *to = {x.of[j].z, position + 2};
      to += four >> 2 & 1;
      if (four & 8) *to = {x.of[j].w, position + 3};
    }
    return listed;
  }

  // Two entries side by side: whole warps call.
  struct Pair {
    ListEntry entry[2];
    bool there[2];
  };
  template <class F>
  __device__ void each_pair(int listed, F&& f) const {
#pragma unroll 1
    for (int first = 0; first < listed; first += 2 * kThreads) {
      const int at = first + 2 * thread;
      const int4 two = *reinterpret_cast<const int4*>(s.select.list + at);
      f(first, Pair{{{__int_as_float(two.x), two.y}, {__int_as_float(two.z), two.w}}, {at < listed, at + 1 < listed}});
    }
  }

  // Of equal width, between two scores; what lies outside goes to the first or last one.
  template <int Count>
  struct Bins {
    float scale, offset;
    __device__ Bins(float low, float width) : scale(reciprocal(width)), offset(-low * scale) {}
    __device__ int of(float score) const {
      return __float_as_int(fmaf(__saturatef(fmaf(score, scale, offset)), Count - 1, kCode)) - __float_as_int(kCode);
    }
  };
  __device__ static unsigned long long number_of(ListEntry e) {
    return static_cast<unsigned long long>(static_cast<unsigned>(key_of(e.score)) ^ 0x80000000u) << 32 |
           static_cast<unsigned>(~e.position);
  }

  __device__ void run() {
    const int early = cuda::load_now(p.lengths + row);
    if (thread == 0) s.few_count = 0;
    s.counts[thread] = 0;
    one.clear();
    cuda::wait_for_kernel();
    cuda::let_next_start();
    const float* const scores = p.scores + row * p.scores_row;
    Loads x;
    int n = one.visible(early, 0);
#pragma unroll 1
    for (int likely = -1; likely != n; n = one.visible(p.lengths[row], 0)) {
      likely = n;
      if (n > kList) load(scores, n, x);
    }
    const int k = min(n, p.k);
    const int left = n > kList ? select(x, n, k) : list_row(scores, n);
    if (left == kDone || rank > 0) return;
    if (left == kAgain) read_row_again<Tile>(p, s.select, row);
    else select_list<Tile>(p, s.select, row, left, k);
  }

  // The k largest of a row of n: kDone, or what is left to the first CTA. That is to read the row again (kAgain), or to
  // select from so many in its list.
  static constexpr int kDone = -1, kAgain = -2;
  __device__ int select(const Loads& x, int n, int k) {
    constexpr int kSamples = 4 * kThreads;
    const int sample_rank = One::rank_of(kSamples, n, k);
    bool good = k <= kList / 4 * 3 && sample_rank < kSamples;
    if (good) good = guess(x.sample, sample_rank);
    if (!good) return kAgain;
    const float threshold = s.select.cut[0];
    const int listed = filter(x, threshold);
    __syncthreads();  // the list is there

    const IdRow ids(p.out, row);
    const Bins<kListBins> bins(threshold, s.select.cut[1]);
    int pages[2] = {-1, -1};  // of the first entries: asked for here, waited for in the end
    if (listed > kList) {
      if (thread == 0) s.counts[0] = kMostTogether;  // more than any list may have
    } else {
      each_pair(listed, [&](int first, const Pair& pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!pair.there[i]) continue;
          atomicAdd(&s.counts[bins.of(pair.entry[i].score)], 1);
          if (first == 0 && ids.plain(p.out)) pages[i] = ids.page_of(p.out, pair.entry[i].position);
        }
      });
    }
    if (thread == 0) s.listed = listed;
    cuda::cluster_sync();

    // Bins by descending score, one a thread.
    const int bin = kListBins - 1 - thread;
    const std::uint32_t from = cuda::shared_address(&s.counts[bin]);
    int count[kTogether], sum = 0, lower = 0;  // of all CTAs, of those before
#pragma unroll
    for (int i = 0; i < kTogether; ++i) count[i] = __float_as_int(cuda::cluster_load(cuda::cluster_address(from, i)));
#pragma unroll
    for (int i = 0; i < kTogether; ++i) sum += count[i], lower += i < rank ? count[i] : 0;
    int upto = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    if (lane == 31) s.select.sums[warp] = upto;
    __syncthreads();
    const int of_warp = lane < kWarps ? s.select.sums[lane] : 0;
    const int above = __reduce_add_sync(~0u, lane < warp ? of_warp : 0) + upto - sum;
    const int total = __reduce_add_sync(~0u, of_warp);
    if (above < k && k <= above + sum) s.select.found = {bin, above, sum}, s.before = lower;
    __syncthreads();
    if (total < k || total > kList) {
      cuda::cluster_sync();
      return kAgain;
    }
    const auto found = s.select.found;
    const int need = k - found.above;
    int base = __reduce_add_sync(~0u, bin > found.bin ? lower : 0);
    if (lane == 0) s.select.low[warp] = base;
    const bool whole = need == found.count;
    if (!whole && found.count > kFew) {
      gather_lists();
      return total;
    }
    if (!whole) {
      each_pair(listed, [&](int, const Pair& pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!pair.there[i] || bins.of(pair.entry[i].score) != found.bin) continue;
          const std::uint32_t to = cuda::shared_address(&s.few[s.before + atomicAdd(&s.few_count, 1)]);
#pragma unroll 1
          for (int j = 0; j < kTogether; ++j)
            cuda::cluster_store(cuda::cluster_address(to, j), number_of(pair.entry[i]));
        }
      });
    }
    cuda::cluster_sync();  // from here on nobody reads another's memory
    if (!whole) {
      if (warp < kFew / 32) {
        const unsigned long long mine = thread < found.count ? s.few[thread] : 0;
        int better = 0;
#pragma unroll 4
        for (int i = 0; i < found.count; ++i) better += s.few[i] > mine;
        const bool in = thread < found.count && better < need;
        const unsigned all = __ballot_sync(~0u, in);
        if (lane == 0) s.selected[warp] = all;
        if (in && better == need - 1) s.least = mine;
      }
      __syncthreads();
    }
    base = __reduce_add_sync(~0u, lane < kWarps ? s.select.low[lane] : 0);
    const int before = s.before;
    if (whole) base += before;
    else
      base += __popc(s.selected[0] & ~(before < 32 ? ~0u << before : 0u)) +
              __popc(s.selected[1] & ~(before < 32 ? ~0u : ~0u << (before - 32)));
    const unsigned long long least = whole ? 0 : s.least;
    int turn = 0;
    each_pair(listed, [&](int first, const Pair& pair) {
      unsigned in[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = bins.of(pair.entry[i].score);
        in[i] = __ballot_sync(
            ~0u, pair.there[i] && (at > found.bin || (at == found.bin && number_of(pair.entry[i]) >= least)));
      }
      if (lane == 0) s.select.marked[turn][warp] = __popc(in[0]) + __popc(in[1]);
      __syncthreads();
      const int here = lane < kWarps ? s.select.marked[turn][lane] : 0;
      const unsigned lower = (1u << lane) - 1;
      int place = base + __reduce_add_sync(~0u, lane < warp ? here : 0) + __popc(in[0] & lower) + __popc(in[1] & lower);
      base += __reduce_add_sync(~0u, here), turn ^= 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!(in[i] >> lane & 1)) continue;
        if (first == 0 && ids.plain(p.out)) ids.store_plain(p.out, place, pair.entry[i].position, pages[i]);
        else ids.store(p.out, place, pair.entry[i].position);
        ++place;
      }
    });
    if (k < p.k && rank == 0) one.store(k, p.k - k, [](int) { return -1; });
    return kDone;
  }

  // The threshold from the sample, and how far above it the largest is, into s.select.cut: whether there is one.
  __device__ bool guess(float4 sample, int sample_rank) {
    const float x[4] = {canonical(sample.x), canonical(sample.y), canonical(sample.z), canonical(sample.w)};
    const typename One::Cut cut = one.cut_of(x);
    if (!cut.good()) return false;
    const Bins<kBins> bins(cut.low, cut.width);
#pragma unroll
    for (const float score : x) atomicAdd(&s.select.bins[bins.of(score)], 1);
    one.find_bin(sample_rank);
    const int bin = s.select.found.bin;
    const float threshold = cut.edge(bin);
    if (thread == 0) s.select.cut[0] = threshold, s.select.cut[1] = cut.width + (cut.low - threshold);
    __syncthreads();
    return bin > 0;
  }
  // A short row as the first CTA's list, cut between the least and the largest finite score of some: how long it is.
  __device__ int list_row(const float* scores, int n) {
    if (rank > 0) return n;
    float some[4] = {INFINITY, INFINITY, INFINITY, INFINITY};
#pragma unroll 4
    for (int i = thread; i < n; i += kThreads) s.select.list[i] = {some[0] = canonical(__ldcg(scores + i)), i};
    const typename One::Cut cut = one.cut_of(some);
    if (thread == 0) s.select.cut[0] = cut.low, s.select.cut[1] = cut.width;
    return n;
  }
  // All lists into the first CTA's.
  __device__ void gather_lists() {
    if (rank == 0) {
      int at = s.listed;
#pragma unroll 1
      for (int i = 1; i < kTogether; ++i) {
        const int n = __float_as_int(cuda::cluster_load(cuda::cluster_address(cuda::shared_address(&s.listed), i)));
        const std::uint32_t list = cuda::cluster_address(cuda::shared_address(s.select.list), i);
#pragma unroll 1
        for (int e = thread; e < n; e += kThreads)
          s.select.list[at + e] = {cuda::cluster_load(list + e * 8),
                                   __float_as_int(cuda::cluster_load(list + e * 8 + 4))};
        at += n;
      }
    }
    cuda::cluster_sync();
  }
};

template <class Arch, class Tile>
__global__ __launch_bounds__(Tile::kMostThreads,
                             Tile::kCtas) void together_kernel(const __grid_constant__ CudaParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int cta = static_cast<int>(blockIdx.x);
  Together<Tile>(p, *reinterpret_cast<TogetherSmem<Tile>*>(smem), cta / kTogether, cta % kTogether).run();
}

}  // namespace sievemla::stage::topk
