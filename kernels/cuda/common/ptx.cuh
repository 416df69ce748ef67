// PTX that CCCL has no function for: one instruction a function, with its PTX ISA section. Everything else goes through cuda::ptx.
#pragma once
#include <cuda/std/cstdint>

namespace wts {
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

__device__ inline uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// 10.1: threadIdx.x, read anew, so that nothing computed from it is kept in registers from one turn of a loop to the next.
__device__ inline int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// 9.7.14.5: D[16,8] += A[16,32] B[32,8], int8 in, int32 out. Not volatile: independent chains may interleave.
__device__ inline void mma_s8(int32_t (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// 9.7.14.5: D[16,8] += A[16,16] B[16,8], bf16 in, fp32 out.
__device__ inline void mma_bf16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// 9.7.15.5.1: D[64,64] (+)= A[64,32] B[32,64], int8 in, int32 out, asynchronous; A in registers, B in shared memory (`wgmma_operand`). All
// 128 threads of a warpgroup; D may not be touched before wgmma_wait.
template <bool kAccumulate>
__device__ inline void wgmma_s8_n64(int32_t (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
      "%28, %29, %30, %31}, {%32, %33, %34, %35}, %36, %37;"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]),
        "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]),
        "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]),
        "+r"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kAccumulate));
}
// 9.7.15.7.1 to 9.7.15.7.3: order registers before the MMAs that use them, end a group of MMAs, wait for all groups. `d` is what they
// computed: naming it keeps whoever reads it behind the wait.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_wait(int32_t (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]),
                 "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]),
                 "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]),
                 "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])::"memory");
}

// 9.7.15.5.1.2.2: the descriptor of a K-major operand in 8 x 16-byte core matrices without swizzle; distances between neighbouring core
// matrices along K (`k_bytes`) and along the rows (`row_bytes`).
__device__ inline uint64_t wgmma_operand(const void* shared, uint32_t k_bytes, uint32_t row_bytes) {
  const uint32_t low = (smem_address(shared) >> 4 & 0x3FFF) | k_bytes >> 4 << 16;
  // The shuffle tells the compiler that all lanes agree: it then steps from operand to operand in uniform registers, not by a move to
  // them before each MMA, which waits for the MMA before it.
  return __shfl_sync(~0u, low, 0) | static_cast<uint64_t>(row_bytes >> 4) << 32;
}

// 9.7.13.1: a barrier of whole warps, `threads` in all; number 0 is __syncthreads().
__device__ inline void barrier_sync(int number, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// 9.7.13, griddepcontrol: let the next kernel of the stream start, as soon as every CTA of this grid has said so or has ended; wait until
// the kernels before have ended and all they wrote can be seen. Without programmatic launch neither does anything.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 9.7.9.25.4.1: a bulk copy to shared memory under an L2 policy; `barrier` counts its bytes.
__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   smem_address(shared)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
               : "memory");
}
// 9.7.9.25.4.3: start bringing a range into L2; address and size are multiples of 16.
__device__ inline void prefetch_bulk_l2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// 9.7.9.25.3.1: 16 or 4 bytes from global to shared memory without a register; .cg keeps them out of L1.
__device__ inline void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
__device__ inline void copy_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// 9.7.9.25.3.2, 9.7.9.25.3.3: end a group of this thread's copies; wait until at most the newest groups are under way.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewest>
__device__ inline void copy_async_wait_older() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

// 10.29: the wall clock in nanoseconds, the same for all SMs; it ticks coarsely.
__device__ inline uint64_t globaltimer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// 9.7.3.21: the logarithm to base 2; absolute error below 2^-22 for x in (0.5, 2), else relative error below 2^-22.
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.9.15: start bringing a line into L2.
__device__ inline void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// 9.7.9.8: a streaming 16-byte load that leaves no trace in L1: weights are read once.
__device__ inline uint4 load_once(const uint4* global) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global));
  return v;
}

// 9.7.9.18: an L2 policy that keeps this share of the lines it is used for (evict_last) and lets the others pass (evict_first).
__device__ inline uint64_t l2_policy(float kept) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, %1;" : "=l"(policy) : "f"(kept));
  return policy;
}

// 9.7.9.8: as load_once, under an L2 policy.
__device__ inline uint4 load_with_policy(const uint4* global, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy));
  return v;
}

// 9.7.9.8: two 8-byte words, each single-copy atomic, neither ordered with the other.
__device__ inline void load_relaxed_x2(const uint64_t* global, uint64_t& a, uint64_t& b) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(global) : "memory");
}
// 9.7.9.8: one 8-byte word; the acquiring load sees all that came before the release it reads from.
__device__ inline uint64_t load_relaxed(const uint64_t* global) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(global) : "memory");
  return v;
}
__device__ inline uint64_t load_acquire(const uint64_t* global) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(global) : "memory");
  return v;
}
// 9.7.9.12
__device__ inline void store_relaxed(uint64_t* global, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}
__device__ inline void store_release(uint64_t* global, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}
// 9.7.13.8: a reduction without an answer.
__device__ inline void red_max_relaxed(uint64_t* global, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}
__device__ inline void red_add_relaxed(uint64_t* global, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}
__device__ inline void red_add_release(uint64_t* global, uint64_t value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

}  // namespace wts
