// Corrected logits from a tile's accumulators, in the rounding rules of kernels/reference.py.
#pragma once
#include <cuda_bf16.h>

#include "common/key.cuh"

namespace wts {

// bf16 is the upper half of an fp32.
__device__ inline float widen(uint16_t bf16_bits) { return __uint_as_float(static_cast<uint32_t>(bf16_bits) << 16); }

// Two fp32 to bf16 (nearest even), in one conversion; `low` in the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The larger of each half, NaN losing to any number.
__device__ inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 larger = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&larger);
}

// All bits of each half where the two are equal.
__device__ inline uint32_t equal_bf16x2(uint32_t a, uint32_t b) {
  return __heq2_mask(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
}

// All bits of each half where `a` is at least `b`, which neither is if it is NaN.
__device__ inline uint32_t reach_bf16x2(uint32_t a, uint32_t b) {
  return __hge2_mask(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
}

// All bits of each half where `a` is larger than `b`.
__device__ inline uint32_t exceed_bf16x2(uint32_t a, uint32_t b) {
  return __hgt2_mask(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
}

// Two fp32 to bf16 and back.
__device__ inline void round_bf16(float& low, float& high) {
  const uint32_t bits = pack_bf16(low, high);
  low = __uint_as_float(bits << 16);
  high = __uint_as_float(bits & 0xFFFF0000u);
}

// Rule INT8: base + (row scale * latent scale) * sum, sum = 256 hi + lo, every fp32 operation rounded on its own (never fused), so that
// torch, numpy and this kernel give the same bits. The caller rounds to bf16.
__device__ inline float score_int8(float base, float scale, int32_t sum) { return __fadd_rn(base, __fmul_rn(scale, __int2float_rn(sum))); }
__device__ inline float score_int8(float base, float row_scale, float latent_scale, int32_t sum) {
  return score_int8(base, __fmul_rn(row_scale, latent_scale), sum);
}

// Rule TWICE: the fp32 bias is rounded to bf16, then the sum (by the caller).
__device__ inline void score_twice(float& low, float& high, float base_low, float base_high) {
  round_bf16(low, high);
  low = __fadd_rn(base_low, low);
  high = __fadd_rn(base_high, high);
}

}  // namespace wts
