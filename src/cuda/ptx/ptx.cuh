// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/cuda/ptx/ptx.cuh -- one PTX instruction per function. All of them exist from sm_80 on.
#pragma once
#include <cstdint>

namespace sievemla::cuda {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- L2 --------------------------------------------------------------------------------------------

// What is read with this policy leaves L2 before all else, or in its turn.
__device__ inline std::uint64_t l2_policy(bool leaves_first) {
  std::uint64_t r;
  if (leaves_first) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r));
  else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(r));
  return r;
}
// Has the line brought into L2.
__device__ inline void prefetch_l2(const void* g_from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(g_from)); }

// ---- global -> shared, asynchronously ---------------------------------------------------------------

// Copies the first `bytes` (16 or 0) of 16 bytes past L1 and fills up with zeros: with 0 g_from is not read.
__device__ inline void cp_async_16(std::uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_to), "l"(g_from), "r"(bytes) : "memory");
}
__device__ inline void cp_async_16(std::uint32_t s_to, const void* g_from, int bytes, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(s_to), "l"(g_from), "r"(bytes),
               "l"(policy)
               : "memory");
}
// The same as cp_async_16 with 4 bytes, or 0.
__device__ inline void cp_async_4(std::uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s_to), "l"(g_from), "r"(bytes) : "memory");
}
// All of 8 bytes.
__device__ inline void cp_async_8(std::uint32_t s_to, const void* g_from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(s_to), "l"(g_from) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `Left` of the newest groups are in flight.
template <int Left>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// ---- global -> registers ----------------------------------------------------------------------------

// Loads 16 bytes past L1, if `wanted`. In program order.
__device__ inline void load_once(float4& x, const float4* g_from, bool wanted, std::uint64_t policy) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %6;\n}"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(g_from), "r"(static_cast<int>(wanted)), "l"(policy)
      : "memory");
}

// A load of its own, whatever is loaded from there before or after.
__device__ inline int load_now(const int* g_from) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(g_from) : "memory");
  return x;
}

// ---- barriers among some warps ----------------------------------------------------------------------

__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts this warp as there, and goes on.
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// As barrier_sync; whether `x` holds for any thread.
__device__ inline bool barrier_any(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.s32 mine, %1, 0;\nbar.red.or.pred any, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(x)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// ---- the next kernel of the stream, where it was launched as a dependent (sm_90 on; earlier nothing) ----------------

// It may start; what it reads of this one it reads after wait_for_kernel.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel before is done, and its writes are there.
__device__ inline void wait_for_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- clusters (sm_90 on) --------------------------------------------------------------------------------------------

// All threads of the cluster that still run; shared memory written before can be read after, in any of its CTAs.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_sync() { cluster_arrive(), cluster_wait(); }
// The same for its timing alone: what was written is not there for others, so nobody waits for their writes to memory.
__device__ inline void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// This CTA's place in its cluster.
__device__ inline int cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Where CTA `rank` of the cluster has what this one has at s_address.
__device__ inline std::uint32_t cluster_address(std::uint32_t s_address, int rank) {
  std::uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(s_address), "r"(rank));
  return r;
}
__device__ inline float cluster_load(std::uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ inline float4 cluster_load4(std::uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ inline void cluster_store4(std::uint32_t address, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
__device__ inline uint4 cluster_load_u4(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ inline void cluster_store(std::uint32_t address, unsigned long long x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}

// ---- shared -> registers, as matrix fragments -------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Afterwards r[i] holds
// elements (row l / 4, columns 2 (l % 4) and the next) of matrix i; `_trans`: (rows 2 (l % 4) and the next, column l /
// 4).
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

__device__ inline void store_shared(std::uint32_t s_to, std::uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(s_to), "r"(x) : "memory");
}
__device__ inline float load_shared(std::uint32_t s_from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(s_from) : "memory");
  return x;
}

// ---- arithmetic -------------------------------------------------------------------------------------

// d[16 x 8] += a[16 x 16] b[16 x 8], bf16 with f32 sums. g = lane / 4, c = lane % 4:
//   a: (g, 2c..) (g + 8, 2c..) (g, 2c + 8..) (g + 8, 2c + 8..)   b: (2c.., g) (2c + 8.., g)
//   d: (g, 2c) (g, 2c + 1) (g + 8, 2c) (g + 8, 2c + 1)
__device__ inline void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Bytes of x picked by the nibbles of `Pick`; a nibble + 8 repeats the sign of that byte.
template <std::uint32_t Pick>
__device__ inline std::uint32_t prmt(std::uint32_t x) {
  std::uint32_t r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "n"(Pick));
  return r;
}

__device__ inline std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// {low, high} rounded to nearest even.
__device__ inline std::uint32_t pack_bf16x2(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// {low, high} as f16, rounded to nearest even; infinite beyond 65504.
__device__ inline std::uint32_t pack_f16x2(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ inline float exp2_approx(float x) {  // 2 ulp; exp2(-inf) = 0, NaN stays NaN
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace sievemla::cuda
