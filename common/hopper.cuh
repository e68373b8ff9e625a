/* SPDX-License-Identifier: Apache-2.0 */
/* Hopper's own instructions (sm_90a) as functions: mbarriers, bulk tensor copies, warpgroup products. Shared-memory
 * addresses are the 32-bit ones of the shared window; every function says which threads call it.
 *
 * Source: PTX ISA 9.0, sections on mbarrier, cp.async.bulk.tensor, wgmma and setmaxnreg. */
#ifndef LEV_COMMON_HOPPER_CUH
#define LEV_COMMON_HOPPER_CUH

#include <cstdint>
#include <cuda.h>

__device__ __forceinline__ uint32_t lev_shared_address(const void *at) {
  return (uint32_t)__cvta_generic_to_shared(at);
}

/* ---- clusters ---- */

__device__ __forceinline__ uint32_t lev_cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/* All threads of the cluster. Orders their shared-memory accesses. */
__device__ __forceinline__ void lev_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* ---- mbarriers ----
 *
 * Release and acquire have the scope of a block (PTX's default): enough for data that copies bring and tensor cores
 * read. Ordinary writes of one block that another reads need more, which costs a memory barrier of the whole GPU. */

/* One thread; lev_barriers_ready by the same thread, then a barrier of the cluster, make them visible. */
__device__ __forceinline__ void lev_barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void lev_barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Arrives and announces `bytes` that copies will complete. One thread. */
__device__ __forceinline__ void lev_barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* The same place in the shared memory of block `rank` of the cluster. */
__device__ __forceinline__ uint32_t lev_cluster_address(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
/* Arrives at a barrier of any block of the cluster, at its lev_cluster_address. One thread. */
__device__ __forceinline__ void lev_barrier_arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Waits until the phase of this parity is over. Any threads. */
__device__ __forceinline__ void lev_barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{\n.reg .pred done;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
/* A named barrier (1 to 15; 0 is __syncthreads) of `threads` threads. */
__device__ __forceinline__ void lev_named_sync(uint32_t name, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/* ---- bulk tensor copies ---- */

/* One thread. The map lies in kernel parameters (__grid_constant__). */
__device__ __forceinline__ void lev_tma_prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* Box at (x, y), x along the contiguous dimension, to shared memory; its bytes complete on `barrier`. One thread. */
__device__ __forceinline__ void lev_tma_load(uint32_t to, const CUtensorMap *map, uint32_t barrier, int32_t x,
                                             int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(x), "r"(y)
               : "memory");
}
/* The same to every block of the cluster whose bit is set in `blocks`: same place, each block's own barrier. */
__device__ __forceinline__ void lev_tma_load_to(uint32_t to, const CUtensorMap *map, uint32_t barrier, int32_t x,
                                                int32_t y, uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
               "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
               : "memory");
}
/* Ordinary shared-memory writes of this thread become visible to the tensor cores and the copy engine. */
__device__ __forceinline__ void lev_async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- warpgroups ---- */

template <int registers> __device__ __forceinline__ void lev_take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> __device__ __forceinline__ void lev_give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
__device__ __forceinline__ void lev_wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void lev_wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most `pending` committed groups run. */
template <int pending> __device__ __forceinline__ void lev_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Descriptor of an operand in 128-byte swizzled tiles, 1024-byte aligned, with groups of 8 rows 1024 bytes apart: its
 * low word. `leading`: bytes between blocks of 64 elements along the contiguous dimension (used where that is M or N).
 * An offset of n bytes inside the tile adds n / 16. The high word is the same for all of them. */
__device__ __forceinline__ uint32_t lev_wgmma_operand(uint32_t address, uint32_t leading) {
  return (address & 0x3ffff) >> 4 | (leading >> 4) << 16;
}
#define LEV_WGMMA_HIGH "0x40000040" /* groups of 8 rows: 1024 / 16; bit 62: swizzle of 128 bytes */

/* d [64, 256] = A [64, 16] B [16, 256] + (accumulate ? d : 0), bf16 operands in shared memory, by one warpgroup.
 * trans_a, trans_b: 0 where K is the contiguous dimension, 1 where it is M or N. Thread t of the warpgroup holds rows
 * t / 32 * 16 + t % 32 / 4 (+ 8) and columns 8 i + t % 4 * 2 (+ 1): d[4 i], d[4 i + 1] of the first row, d[4 i + 2],
 * d[4 i + 3] of the second. */
template <int trans_a, int trans_b>
__device__ __forceinline__ void lev_wgmma_64x256(float (&d)[128], uint32_t a, uint32_t b, int accumulate) {
  asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %130, 0;\n"
               "mov.b64 a, {%128, " LEV_WGMMA_HIGH "};\nmov.b64 b, {%129, " LEV_WGMMA_HIGH "};\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
               "a, b, add, 1, 1, %131, %132;\n}"
#define D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D(i), D(i + 4), D(i + 8), D(i + 12)
               : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80), D16(96), D16(112)
#undef D16
#undef D
               : "r"(a), "r"(b), "r"(accumulate), "n"(trans_a), "n"(trans_b));
}

#endif
