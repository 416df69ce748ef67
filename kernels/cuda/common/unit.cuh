// A streamed unit of W2: 16 rows x 256 bytes, the A operands of eight MMA k-steps. A tile of 16 rows is one unit of int8 or two of bf16.
#pragma once
#include "common/ptx.cuh"

namespace wts {

constexpr int units_per_tile(bool bf16) { return bf16 ? 2 : 1; }

// One k-step, int8 or bf16.
__device__ inline void multiply(int32_t (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) { mma_s8(d, a, b0, b1); }
__device__ inline void multiply(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) { mma_bf16(d, a, b0, b1); }

// The k-steps of a unit, in two chains, so that an MMA need not wait for the one before it. chunks: the B operands (`Latent::chunks`), from
// the unit's part of the latent on; each serves two k-steps.
template <class Sum>
__device__ __forceinline__ void multiply_unit(Sum (&even)[4], Sum (&odd)[4], const uint4 (&a)[8], const uint4* chunks) {
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const uint4 b = chunks[k / 2 * 4];
    const uint32_t b0 = k % 2 ? b.z : b.x, b1 = k % 2 ? b.w : b.y;
    multiply(k % 2 ? odd : even, a[k], b0, b1);
  }
}

}  // namespace wts
