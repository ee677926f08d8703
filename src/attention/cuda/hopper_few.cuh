// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/attention/cuda/hopper_few.cuh -- the main loop for few heads on sm_90: wgmma with rows on M, heads on N.
//
// What it computes, and over which lanes, is attention.cuh's; S^T = K Q^T and O^T = V^T P^T as there, so that 8 heads
// cost 8 heads' worth. Rows lie in shared memory as they lie in the cache.
//   the last warp group (producer): fills the ring of slots (ring.cuh)
//   the others (consumers): tiles in turns, each with an O of its own, so that one multiplies while another is at its
//   softmax; they are added up in the end
// A consumer's warp w has the keys of slot w and 128 columns' quarter of the values of all four: fragments are
// converted in registers, Q and P are the operands in shared memory. A thread meets the same heads in S and in O: peak
// and sum stay with it, and a tile where no score exceeds the peak by much (nearly every one) needs no other warp's.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>

#include "attention/cuda/hopper_heads.cuh"
#include "attention/cuda/merge.cuh"
#include "attention/cuda/plan.cuh"
#include "attention/cuda/ring.cuh"
#include "attention/cuda/rows.cuh"
#include "cuda/ptx/sm90a.cuh"

namespace sievemla::stage::attention {

// What a head's scores are relative to (log2; -inf: none yet), and what they may exceed it by before all warps have to
// agree anew.
struct FewHeadsState {
  float peak, slack;
};

template <class Rows, class Tile>
struct FewHeadsSmem {
  static constexpr int kBlocks = (kLatent + Rows::kRope) / 64;  // of 64 dimensions: 128 bytes
  static constexpr int kBlockBytes = Tile::kHeads * 128;
  static constexpr int kStride = kLatent + 4;            // of a head's share, in floats: no bank twice
  static constexpr int kCopies = Rows::kScaled ? 4 : 1;  // of P, one per scale group
  static constexpr int kRowBytes = Tile::kSlots * 16 * Rows::kStride;
  static constexpr int kShareBytes = Tile::kGroups * Tile::kHeads * kStride * 4;
  static constexpr int most_brought() {  // heads
    int most = 0;
    for (int parts = 2; parts <= kMostCluster; ++parts)
      most = std::max(most, (parts - 1) * ((Tile::kHeads + parts - 1) / parts));
    return most;
  }
  static constexpr int kMultiplied = (kBlocks + Tile::kGroups * kCopies) * kBlockBytes;
  static constexpr int kEndBytes =
      std::max(kRowBytes, kShareBytes + std::max(0, most_brought() * kLatent * 4 - kMultiplied));

  alignas(1024) unsigned char q[kBlocks][kBlockBytes];
  alignas(1024) unsigned char weights[Tile::kGroups][kCopies][kBlockBytes];
  union {
    alignas(128) unsigned char rows[Tile::kSlots][16 * Rows::kStride];
    alignas(128) unsigned char end[kEndBytes];
  };
  alignas(8) std::uint64_t full[Tile::kSlots], empty[Tile::kSlots];  // mbarriers
  unsigned short live[Tile::kSlots];                                 // bit per row: not a hole
  std::int64_t names[4][kNames][32];                                 // of rows to come, by the producer's warp
  int visible[Tile::kHeads];                                         // lanes of this part that the head may see
  std::int64_t out_at[Tile::kHeads];                                 // of the head's row in out, in elements
  FewHeadsState state[Tile::kGroups][Tile::kHeads];                  // of a consumer
  float scale[Tile::kHeads];                                         // of scores, to log2
  float most[Tile::kGroups][4][Tile::kHeads], sum[Tile::kGroups][4][Tile::kHeads];  // of a consumer's warp
  float log2[Tile::kHeads];                                                         // of the sum
  float factor[Tile::kGroups][Tile::kHeads];                                        // of a consumer's share
  PlanSmem plan;
  Place place;
  int is_last;

  // In the end: a consumer's O of a head, behind `brought`.
  __device__ float* share(int group, int head) {
    return reinterpret_cast<float*>(end + kEndBytes - kShareBytes) + (group * Tile::kHeads + head) * kStride;
  }
  // What the cluster's other CTAs bring of this one's heads, over q, weights and rows.
  __device__ float* brought(int i) { return reinterpret_cast<float*>(q) + i * kLatent; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Rows, class Tile>
struct FewHeads : Ring<FewHeads<Rows, Tile>, Rows, Tile::kSlots> {
  using Smem = FewHeadsSmem<Rows, Tile>;
  using Base = Ring<FewHeads, Rows, Tile::kSlots>;
  using Base::slot_of, Base::round_of, Base::full, Base::empty;
  static constexpr int kHeads = Tile::kHeads, kTokens = Tile::kTokens, kSlots = Tile::kSlots;
  static constexpr int kGroups = Tile::kGroups, kGroup = 128, kConsumers = kGroups * kGroup;
  static constexpr int kBatch = Tile::kBatch;  // fragments made while as many are multiplied
  static constexpr int kMine = kHeads / 4;     // heads that a thread meets: 8 (i / 2) + 2 c + i % 2
  static constexpr float kSlack = 8.f;         // not p.slack: all warps settle a peak together
  // P carries kCarried, its sums do not.
  static constexpr float kCarried = Rows::kScaled ? kWeightFactor : 1.f,
                         kOutFactor = Rows::kScaled ? kCodeFactor / kWeightFactor : 1.f;
  static constexpr bool kFirstAlone = false;
  static constexpr int kReady = 1 + kGroups, kMet = 2 + kGroups;  // barriers, after one of each consumer

  const CudaParams& p;
  Smem& s;
  Part part;
  const int begin, end;  // lanes of the unit that are this part's
  const int first_head, tiles;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = uniform(thread / 32 % 4), group = uniform(thread / kGroup);

  // Known to the compiler to be the same in all lanes, as an operand's address in shared memory should be.
  __device__ static int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  __device__ FewHeads(const CudaParams& params, Smem& smem, const Part& of, LaneRange lanes, int head)
      : p(params),
        s(smem),
        part(of),
        begin(lanes.begin),
        end(lanes.end),
        first_head(head),
        tiles(uniform(max(0, end - begin + kTokens - 1) / kTokens)) {}

  // The first operand in shared memory, s.q.
  const std::uint64_t operands = cuda::matrix(uniform(static_cast<int>(cuda::shared_address(s.q[0]))), 16, 1024);

  __device__ void produce() {
    this->fill(part.unit, 4, kMet, kReady, Tile::kThreads, [](int) {});
  }

  // ---- consumers ------------------------------------------------------------------------------------

  int g = lane / 4, c = lane % 4;  // fragment row and column
  // A fragment's rows g and g + 8 are rows g and 8 + (g ^ 4) of the slot: so neither keys nor, where they are
  // neighbours in P, values meet a bank twice.
  // Where the lane reads of a slot, as key and as value: worked out once.
  const int key_place = kept((lane % 8 + lane / 8 % 2 * 8 ^ lane / 8 % 2 * 4) * Rows::kStride + lane / 16 * 16);
  const int value_place = kept(value_row(Rows::value_row(lane)) * Rows::kStride +
                               (Rows::kScaled ? lane / 16 : lane / 8 % 2) * 16 + warp * (Rows::kValueBytes / 16));
  __device__ int kept(int x) const { return __shfl_sync(~0u, x, lane); }  // the compiler cannot work it out anew
  __device__ static int value_row(int k) { return k % 2 ? 8 + (k / 2 ^ 4) : k / 2; }
  __device__ int row(int r) const { return r ? 8 + (g ^ 4) : g; }

  float o[8][kHeads / 2] = {};  // block 2 i + m: dimensions 128 i + 32 warp + 16 m + ..
  float x[kHeads / 2];          // scores, of rows row(0), row(1) of this warp's slot
  float y[kHeads / 2];          // weights
  float sum[kMine];             // of this thread's weights
  std::uint32_t fragment[2][kBatch][4];
  Raw raw[kBatch / 2];

  __device__ int head_of(int mine) const { return mine / 2 * 8 + 2 * c + mine % 2; }
  // Of x and y: head `mine`, row(r).
  __device__ static constexpr int place(int mine, int r) { return mine / 2 * 4 + 2 * r + mine % 2; }
  __device__ static float shift_of(float top) { return top == -INFINITY ? 0.f : top; }
  __device__ void sync() const { cuda::barrier_sync(1 + group, kGroup); }
  __device__ bool any(bool x) const { return uniform(cuda::barrier_any(1 + group, kGroup, x)) != 0; }
  __device__ static void sync_all() { cuda::barrier_sync(kReady, kConsumers); }

  __device__ void load_q() {
    if constexpr (Rows::kScaled) {
      const ScaledHeads<Rows, kHeads, kConsumers / 32> heads(s.q, thread, lane);
      heads.fetch(p, part.unit, first_head);
      heads.scale(s.scale, p.scale_log2);
    } else {
      if (thread < kHeads) s.scale[thread] = p.scale_log2;
      copy_q();
    }
  }
  // Heads past the last compute on a copy of it.
  __device__ void copy_q() {
    constexpr int kSteps = (kLatent + Rows::kRope) / 16;
#pragma unroll 2
    for (int i = thread; i < kHeads * kSteps; i += kConsumers) {
      const int local = i / kSteps, step = i % kSteps;
      const HeadPlace at = place_of(p, part.unit, min(first_head + local, p.fold * p.heads - 1));
      const bool latent = step < kLatent / 16;
      const auto* from = latent ? static_cast<const __nv_bfloat16*>(p.q) + at.token * p.q_token + at.head * p.q_head
                                : static_cast<const __nv_bfloat16*>(p.q_rope) + at.token * p.q_rope_token +
                                      at.head * p.q_rope_head - kLatent;
      const auto* pieces = reinterpret_cast<const uint4*>(from + step * 16);
      const uint4 z[2] = {__ldg(pieces), __ldg(pieces + 1)};
#pragma unroll
      for (int j = 0; j < 2; ++j)
        *reinterpret_cast<uint4*>(s.q[step / 4] + cuda::swizzled(local, step % 4 * 2 + j)) = z[j];
    }
    cuda::fence_async();
  }

  // Fragments of a batch come straight from the slot, or of what was loaded into `raw` a batch earlier.
  __device__ void load_rope(std::uint32_t s_rows, int b) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      cuda::ldmatrix_x4(fragment[b % 2][i], s_rows + key_place + Rows::kRopeOffset + 32 * (b * kBatch + i));
  }
  __device__ void load_keys(std::uint32_t s_rows, int latent) {
#pragma unroll
    for (int i = 0; i < kBatch / 2; ++i) {
      const int step = latent * kBatch + 2 * i;
      Rows::load_keys(raw[i], s_rows + key_place, step / 8, step % 8 / 2, 0);
    }
  }
  __device__ void make_keys(int b) {
    if constexpr (Rows::kScaled) make(b, f16_key);
    else make(b, [](const Raw& of, int k) { return Rows::key(of, k); });
  }
  // Of 16 rows by kBatch / 2 scale groups, 32 columns each.
  __device__ void load_values(std::uint32_t s_rows, int b) {
#pragma unroll
    for (int i = 0; i < kBatch / 2; ++i)
      Rows::load_values(raw[i], s_rows + value_place, b % (8 / kBatch) * (kBatch / 2) + i, 0, 0);
  }
  __device__ void make_values(int b) {
    make(b, [](const Raw& of, int k) { return Rows::value(of, k); });
  }
  template <class Of>
  __device__ void make(int b, Of of) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Fragment f = of(raw[i / 2], i % 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) fragment[b % 2][i][j] = f.a[j];
    }
  }
  __device__ void hold(int b) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) cuda::hold(fragment[b % 2][i]);
  }

  // Of row(0) and row(1).
  __device__ float2 scales(std::uint32_t s_rows, int scale_group) const {
    if constexpr (!Rows::kScaled) return {1.f, 1.f};
    else {
      const std::uint32_t from = s_rows + Rows::kScaleOffset + 4 * scale_group;
      return {cuda::load_shared(from + row(0) * Rows::kStride), cuda::load_shared(from + row(1) * Rows::kStride)};
    }
  }

  // x = K Q^T, scaled.
  __device__ void score(std::uint32_t s_rows) {
    constexpr int kGroupBatches = 8 / kBatch, kLatentBatches = 4 * kGroupBatches;
    constexpr int kRopeBatches = Rows::kRope / 16 / kBatch, kBatches = kRopeBatches + kLatentBatches;
    const auto make = [&](int b) {
      if (b >= kBatches) return;
      if (b < kRopeBatches) return load_rope(s_rows, b);
      make_keys(b);
      if (b + 1 < kBatches) load_keys(s_rows, b + 1 - kRopeBatches);
    };
    float share[kHeads / 2];
    load_keys(s_rows, 0);
    make(0);
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      const int latent = b - kRopeBatches;
      const bool apart = Rows::kScaled && latent >= 0;  // a sum of its own for each scale group
      float (&to)[kHeads / 2] = apart ? share : x;
      cuda::hold(to);
      cuda::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int step = b < kRopeBatches ? 32 + b * kBatch + i : latent * kBatch + i;
        const bool first = i == 0 && (apart ? latent % kGroupBatches == 0 : b == 0);
        const std::uint64_t q = cuda::moved(operands, step / 4 * Smem::kBlockBytes + step % 4 * 32);
        if (apart) cuda::wgmma_a_f16(to, fragment[b % 2][i], q, !first);
        else cuda::wgmma_a(to, fragment[b % 2][i], q, !first);
      }
      cuda::wgmma_commit();
      make(b + 1);  // meanwhile
      if (b + 1 < kBatches) hold(b + 1);
      cuda::wgmma_wait<0>();
      hold(b);
      cuda::hold(to);
      if (apart && latent % kGroupBatches == kGroupBatches - 1) {
        const float2 scale = scales(s_rows, latent / kGroupBatches);
#pragma unroll
        for (int i = 0; i < kHeads / 2; ++i)
          x[i] =
              fmaf(share[i], i / 2 % 2 ? scale.y : scale.x, kRopeBatches == 0 && latent < kGroupBatches ? 0.f : x[i]);
      }
    }
  }

  // Holes and what a head may not see. NaN there must not reach it as 0 * NaN either; whoever sees it has its score by
  // now.
  __device__ void mask(int at, int slot, int least) {
    const unsigned live = s.live[slot];
    if (live == 0xFFFFu && at + kTokens <= least) return;
#pragma unroll
    for (int m = 0; m < kMine; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (!(live >> row(r) & 1) || at + warp * 16 + row(r) >= s.visible[head_of(m)]) x[place(m, r)] = -INFINITY;
    if (p.fold == 1) return;
#pragma unroll 1
    for (int i = max(0, least - at - warp * 16); i < 16; ++i)
      Rows::clear_not_finite(s.rows[slot] + i * Rows::kStride, lane);
    __syncwarp();
  }

  // y = exp(x - peak). True: a score exceeds the peak by much, or the rounding of a weight to bf16 might show.
  __device__ bool weigh() {
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const FewHeadsState& state = s.state[group][head_of(m)];
      const float scale = s.scale[head_of(m)], shift = shift_of(state.peak);
      float most = -INFINITY;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float z = fmaf(x[place(m, r)], scale, -shift);
        y[place(m, r)] = cuda::exp2_approx(z);
        most = fmaxf(most, z);
      }
      exceeds |= most > state.slack;
    }
    return exceeds;
  }

  // Of all rows of the warp's slot, by any `with`.
  template <class With>
  __device__ static float over_rows(float z, With with) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) z = with(z, __shfl_xor_sync(~0u, z, d));
    return z;
  }

  // New peaks and sums from those of all four warps; y is weighed anew. True: some of P is so large a part of the sum
  // so far that its rounding to bf16 would show.
  __device__ bool settle() {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float (&most)[4][kHeads] = s.most[group];
    float (&all)[4][kHeads] = s.sum[group];
    const auto largest = [&](int h) { return fmaxf(fmaxf(most[0][h], most[1][h]), fmaxf(most[2][h], most[3][h])); };
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const float z = over_rows(fmaxf(x[place(m, 0)], x[place(m, 1)]), larger);
      if (g == 0) most[warp][head_of(m)] = z;
    }
    sync();
    float next[kMine];
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const float peak = s.state[group][head_of(m)].peak, z = largest(head_of(m)) * s.scale[head_of(m)];
      next[m] = z > peak + kSlack ? z : peak;  // O is rescaled only where P would grow beyond 2^kSlack
      const float rescale = next[m] == peak ? 1.f : cuda::exp2_approx(peak - next[m]);
      sum[m] *= rescale;
      if (__any_sync(~0u, rescale != 1.f)) {
#pragma unroll
        for (int b = 0; b < 8; ++b) o[b][place(m, 0)] *= rescale, o[b][place(m, 1)] *= rescale;
      }
    }
    sync();
    if (warp == 0 && g == 0) {
#pragma unroll
      for (int m = 0; m < kMine; ++m) s.state[group][head_of(m)].peak = next[m];
    }
    sync();
    weigh();
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const float y0 = y[place(m, 0)], y1 = y[place(m, 1)];
      const float z = over_rows(sum[m] + y0 + y1, [](float a, float b) { return a + b; });
      const float heaviest = over_rows(fmaxf(y0, y1), larger);
      if (g == 0) all[warp][head_of(m)] = z, most[warp][head_of(m)] = heaviest;
    }
    sync();
    bool heavy = false;
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int h = head_of(m);
      const float part = (all[0][h] + all[1][h] + all[2][h] + all[3][h]) / p.heavy;
      heavy |= largest(h) > part;
      if (warp == 0 && g == 0) s.state[group][h].slack = fminf(kSlack, log2f(part));
    }
    return heavy;
  }

  // P, or what rounding took from it, into shared memory.
  template <bool Residue>
  __device__ void put_weights(std::uint32_t s_rows) {
#pragma unroll
    for (int copy = 0; copy < Smem::kCopies; ++copy) {
      const float2 scale = scales(s_rows, copy);
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
        float2 z = {y[place(m, 0)] * (scale.x * kCarried), y[place(m, 1)] * (scale.y * kCarried)};
        if constexpr (Residue) {
          z.x -= __bfloat162float(__float2bfloat16_rn(z.x));
          z.y -= __bfloat162float(__float2bfloat16_rn(z.y));
        }
        *reinterpret_cast<std::uint32_t*>(s.weights[group][copy] + cuda::swizzled(head_of(m), 2 * warp + g / 4) +
                                          g % 4 * 4) = cuda::pack_bf16x2(z.x, z.y);
      }
    }
    cuda::fence_async();
  }

  // O^T += V^T P^T; gives the slots back.
  __device__ void accumulate(int tile, bool give_back) {
    constexpr int kBatches = 8 / kBatch;  // of a slot
    const std::uint64_t weights = cuda::moved(
        operands, static_cast<int>(offsetof(Smem, weights)) + group * static_cast<int>(sizeof(s.weights[0])));
#pragma unroll
    for (int b = 0; b < 8; ++b) cuda::hold(o[b]);
    const auto load = [&](int b) {
      if (b >= 4 * kBatches) return;
      const int slot = slot_of(tile, b / kBatches);
      if (b % kBatches == 0) cuda::mbarrier_wait(full(slot), round_of(tile, b / kBatches) & 1);
      load_values(cuda::shared_address(s.rows[slot]), b);
    };
    const auto make = [&](int b) {
      if (b >= 4 * kBatches) return;
      make_values(b);
      if (b % kBatches == kBatches - 1 && give_back) {
        __syncwarp();
        if (lane == 0) cuda::mbarrier_arrive(empty(slot_of(tile, b / kBatches)));
      }
      load(b + 1);
    };
    load(0), make(0);
#pragma unroll
    for (int b = 0; b < 4 * kBatches; ++b) {
      hold(b);
      cuda::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int block = b % kBatches * kBatch + i;
        const int copy = Rows::kScaled ? block / 2 : 0;
        cuda::wgmma_a(o[block], fragment[b % 2][i], cuda::moved(weights, copy * Smem::kBlockBytes + b / kBatches * 32),
                      true);
      }
      cuda::wgmma_commit();
      cuda::wgmma_wait<1>();
      if (b > 0) hold(b - 1);
      make(b + 1);  // meanwhile
    }
    cuda::wgmma_wait<0>();
    hold(4 * kBatches - 1);
#pragma unroll
    for (int b = 0; b < 8; ++b) cuda::hold(o[b]);
  }

  __device__ void consume(const Place& here, int groups) {
    if (thread == 0) s.place = here;
    if (thread < kGroups * kHeads) s.state[thread / kHeads][thread % kHeads] = {-INFINITY, -INFINITY};
    if (thread < kHeads) {
      const int head = first_head + thread;
      const bool exists = head < p.fold * p.heads;
      const HeadPlace at = place_of(p, part.unit, exists ? head : 0);
      s.visible[thread] =
          exists ? lanes_of_token(p, part.unit, static_cast<int>(at.token) - part.unit * p.fold) - begin : INT_MAX;
      s.out_at[thread] = at.token * p.out_token + at.head * p.out_head;
    }
    load_q();
    cuda::barrier_sync(kReady, Tile::kThreads);
    const int least = __reduce_min_sync(~0u, s.visible[lane % kHeads]);
#pragma unroll
    for (int m = 0; m < kMine; ++m) sum[m] = 0.f;
#pragma unroll 1
    for (int tile = group; tile < tiles; tile += kGroups) {
      const int mine = slot_of(tile, warp);
      cuda::mbarrier_wait(full(mine), round_of(tile, warp) & 1);
      const std::uint32_t s_rows = cuda::shared_address(s.rows[mine]);
      bool residue = false;
      do {
        score(s_rows);
        mask(tile * kTokens, mine, least);
        bool heavy = false;
        if (any(weigh() && !residue)) heavy = settle();
#pragma unroll
        for (int m = 0; m < kMine; ++m) sum[m] += residue ? 0.f : y[place(m, 0)] + y[place(m, 1)];
        if (residue) put_weights<true>(s_rows);
        else put_weights<false>(s_rows);
        residue = any(heavy);
        accumulate(tile, !residue);
      } while (residue);  // V takes in what rounding took from P; scores and weights are worked out again
    }
    write(groups);
  }

  // This consumer's O into shared memory.
  __device__ void put_share() {
#pragma unroll
    for (int b = 0; b < 8; ++b)
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
        float* const at = s.share(group, head_of(m)) + b / 2 * 128 + warp * 32 + b % 2 * 16;
        const float2 z = {o[b][place(m, 0)], o[b][place(m, 1)]};
        if constexpr (Rows::kPairedColumns) *reinterpret_cast<float2*>(at + 2 * g) = z;
        else at[g] = z.x, at[g + 8] = z.y;
      }
  }
  // What each consumer's O of a head has to be multiplied with, and what is to be told of the head.
  __device__ void weigh_shares(int local, std::int64_t partial) {
    const int head = first_head + local;
    float top = s.state[0][local].peak, all = 0.f;
#pragma unroll
    for (int i = 1; i < kGroups; ++i) top = fmaxf(top, s.state[i][local].peak);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float (&sums)[4][kHeads] = s.sum[i];
      const float weight = cuda::exp2_approx(s.state[i][local].peak - shift_of(top));
      s.factor[i][local] = weight;
      all += (sums[0][local] + sums[1][local] + sums[2][local] + sums[3][local]) * weight;
    }
    if (head >= p.fold * p.heads) return;
    const HeadPlace at = place_of(p, part.unit, head);
    float inverse;
    if (part.parts == 1) {
      inverse = inverse_with_sink(p, all, top, at.head);
      if (p.lse) write_lse(p, at, all, top);
    } else {
      inverse = all == 0.f ? 0.f : 1.f / all;
      if (p.merge == Merge::cluster) s.log2[local] = log2_of(all, top);
      else p.partial_log2[partial + local] = log2_of(all, top);
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) s.factor[i][local] *= inverse * kOutFactor;
  }
  // The consumers' shares together.
  __device__ float4 share_at(int local, int column) const {
    float4 sum{};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float4 z = *reinterpret_cast<const float4*>(s.share(i, local) + column);
      const float factor = s.factor[i][local];
      sum.x += factor * z.x, sum.y += factor * z.y, sum.z += factor * z.z, sum.w += factor * z.w;
    }
    return sum;
  }

  // What part i's share of a head has to be multiplied with.
  __device__ float& part_weight(int i, int local) { return s.most[i / 4][i % 4][local]; }
  static_assert(4 * kGroups >= kMostCluster);
  __device__ void weigh_parts(int local, float (&log2)[kMostCluster]) {
    float top = -INFINITY, total = 0.f;
#pragma unroll
    for (int i = 0; i < kMostCluster; ++i) top = fmaxf(top, log2[i]);
#pragma unroll
    for (int i = 0; i < kMostCluster; ++i) total += log2[i] = cuda::exp2_approx(log2[i] - shift_of(top));
    const HeadPlace at = place_of(p, part.unit, first_head + local);
    const float inverse = inverse_with_sink(p, total, top, at.head);
    if (p.lse) write_lse(p, at, total, top);
#pragma unroll
    for (int i = 0; i < kMostCluster; ++i) part_weight(i, local) = log2[i] * inverse;
  }
  // The cluster's CTAs each add up some of the `heads`: of the others', they bring them their part, and then add what
  // was brought to their own.
  __device__ void add_up(int heads) {
    const int parts = uniform(p.parts), index = cuda::cluster_rank();  // not from before the loop, in registers
    const auto first_of = [&](int i) { return heads * i / parts; };
    const int first = first_of(index), mine = first_of(index + 1) - first;
    cuda::cluster_wait();  // log2 of all sums is there, and all have done with their rows
    float log2[kMostCluster];
    const std::uint32_t s_log2 = cuda::shared_address(&s.log2[first + thread]);
#pragma unroll
    for (int i = 0; i < kMostCluster; ++i) {
      log2[i] = -INFINITY;
      if (thread < mine && i < parts) log2[i] = cuda::cluster_load(cuda::cluster_address(s_log2, i));
    }
#pragma unroll 1
    for (int j = 1; j < parts; ++j) {
      const int to = index + j < parts ? index + j : index + j - parts;
      const int from = first_of(to), theirs = first_of(to + 1) - from;
      const std::uint32_t there = cuda::cluster_address(cuda::shared_address(s.brought((parts - 1 - j) * theirs)), to);
#pragma unroll 3
      for (int i = thread; i < theirs * (kLatent / 4); i += kConsumers)
        cuda::cluster_store4(there + i * 16, share_at(from + i / (kLatent / 4), i % (kLatent / 4) * 4));
    }
    if (thread < mine) weigh_parts(first + thread, log2);
    __syncwarp();
    cuda::cluster_arrive();  // what is the others' is there
#pragma unroll 3
    for (int i = thread; i < mine * (kLatent / 4); i += kConsumers) {
      const int local = first + i / (kLatent / 4), column = i % (kLatent / 4) * 4;
      *reinterpret_cast<float4*>(s.share(0, local) + column) = share_at(local, column);
    }
    cuda::cluster_wait();
#pragma unroll 1
    for (int i = thread; i < mine * (kLatent / 4); i += kConsumers) {
      const int local = first + i / (kLatent / 4), column = i % (kLatent / 4) * 4;
      float4 sum = *reinterpret_cast<const float4*>(s.share(0, local) + column);
      const float own = part_weight(index, local);
      sum.x *= own, sum.y *= own, sum.z *= own, sum.w *= own;
#pragma unroll 1
      for (int j = 1; j < parts; ++j) {
        const float4 x = *reinterpret_cast<const float4*>(s.brought((j - 1) * mine) + i * 4);
        const float weight = part_weight(index + j < parts ? index + j : index + j - parts, local);
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
      }
      store4(p, s.out_at[local] + column, sum);
    }
  }

  __device__ void write(int groups) {
    part = s.place.part;  // not from before the loop, in registers
    const int item = s.place.item, cta_group = s.place.group;
    const std::int64_t partial = (static_cast<std::int64_t>(item) * groups + cta_group) * kHeads;
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const float all = over_rows(sum[m], [](float a, float b) { return a + b; });
      if (g == 0) s.sum[group][warp][head_of(m)] = all;
    }
    sync_all();
    if (thread < kHeads) weigh_shares(thread, partial);
    put_share();
    const bool cluster = part.parts > 1 && p.merge == Merge::cluster;
    if (cluster) cuda::cluster_arrive();  // log2 of the sums is there
    sync_all();
    const int heads = min(kHeads, p.fold * p.heads - first_head);
    if (cluster) return add_up(heads);
#pragma unroll 4
    for (int i = thread; i < heads * (kLatent / 4); i += kConsumers) {
      const int local = i / (kLatent / 4), column = i % (kLatent / 4) * 4;
      const float4 z = share_at(local, column);
      if (part.parts == 1) store4(p, s.out_at[local] + column, z);
      else *reinterpret_cast<float4*>(p.partial + (partial + local) * kLatent + column) = z;
    }
    if (part.parts == 1 || p.merge != Merge::last) return;

    static_assert(Smem::kShareBytes >= kMergeBytes / kHeadBytes * sizeof(float));
    merge_if_last(p, part, cta_group, groups, kHeads, s.is_last, s.share(0, 0), s.out_at, kConsumers,
                  [] { sync_all(); });
  }
};

#endif

template <class Arch, class Rows, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    few_heads_kernel(const __grid_constant__ CudaParams p, int groups) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char few_heads_smem[];
  auto& s = *reinterpret_cast<FewHeadsSmem<Rows, Tile>*>(few_heads_smem);
  using Loop = FewHeads<Rows, Tile>;
  cuda::let_next_start();
  cuda::wait_for_kernel();
  const Place place = find_place(p, groups, Tile::kTokens, s.plan);
  if (place.part.parts == 0) return;  // the whole CTA
  const LaneRange lanes = range_of(place.part, Tile::kTokens);
  if (threadIdx.x >= Loop::kConsumers) {
    cuda::give_registers<Tile::kProducerRegisters>();
    Loop(p, s, place.part, lanes, 0).produce();
  } else {
    cuda::take_registers<Tile::kConsumerRegisters>();
    if (threadIdx.x == 0) tell_merger(p, place);
    Loop(p, s, place.part, lanes, place.group * Tile::kHeads).consume(place, groups);
  }
#endif
}

}  // namespace sievemla::stage::attention
