// The order in which tokens win: larger bf16 logit first, then the lower row. NaN counts as -inf, -0 equals +0.
#pragma once
#include <cuda/std/limits>

#include "common/ptx.cuh"

namespace wts {

constexpr float kMinusInfinity = -cuda::std::numeric_limits<float>::infinity();
constexpr uint32_t kLastRow = 0xFFFF;  // a CTA's rows are numbered below this in its keys

// Order-preserving bits of an fp32 that is not NaN; -0 and +0 are the same.
__host__ __device__ constexpr uint32_t order_of_bits(uint32_t bits) {
  return bits == 0x80000000u ? 0x80000000u : bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ inline uint32_t score_order(float score) { return order_of_bits(__float_as_uint(score)); }

// 32-bit key of a CTA's candidate: order-preserving bits of the bf16 logit, then the inverted row within the CTA. `logit_bits` are those of
// an fp32 that holds a bf16 exactly, is not NaN and not -0.
__host__ __device__ constexpr uint32_t candidate_key(uint32_t logit_bits, uint32_t row) {
  const uint32_t ordered = logit_bits ^ (static_cast<uint32_t>(static_cast<int32_t>(logit_bits) >> 31) | 0x80000000u);
  return (ordered & 0xFFFF0000u) | (kLastRow - row);
}

__host__ __device__ constexpr uint32_t key_row(uint32_t key) { return kLastRow - (key & 0xFFFFu); }
__host__ __device__ constexpr uint32_t key_order(uint32_t key) { return key >> 16; }

// A row and what it is judged by: its bf16 logit in an fp32 (greedy) or its drawn score. Never NaN.
struct Candidate {
  float logit;
  uint32_t row;

  // NaN counts as -inf.
  __device__ static Candidate of(float logit, uint32_t row) { return {fmaxf(logit, kMinusInfinity), row}; }

  // The better of two; of equal ones `a`, which must hold the lower row.
  __host__ __device__ static constexpr Candidate better(const Candidate& a, const Candidate& b) { return b.logit > a.logit ? b : a; }

  // Adding +0 turns -0 into +0, so that the two tie.
  __device__ uint32_t key() const { return candidate_key(__float_as_uint(__fadd_rn(logit, 0.0f)), row); }
};

// What warps and CTAs compare. Lanes with the same `lane % kBatch` hold candidates of the same request; `over_warp` finds the best of each
// such set for all its lanes, `over` that of `kLanes` neighbouring lanes.

// Greedy walks: the 16 bits of a bf16 logit and the row fit one word.
struct NarrowKey {
  using Bits = uint32_t;

  __device__ static Bits of(const Candidate& candidate) { return candidate.key(); }
  __host__ __device__ static constexpr uint32_t order(Bits key) { return key & 0xFFFF0000u; }

  template <int kBatch>
  __device__ static Bits over_warp(Bits key) {
    if constexpr (kBatch == 1) return __reduce_max_sync(~0u, key);
#pragma unroll
    for (int distance = 16; distance >= kBatch; distance /= 2) key = max(key, __shfl_xor_sync(~0u, key, distance));
    return key;
  }
  template <int kLanes>
  __device__ static Bits over(Bits key) {
    return __reduce_max_sync(~0u, threadIdx.x % 32 < kLanes ? key : 0);
  }
};

// Sampling walks: scores are fp32.
struct WideKey {
  using Bits = uint64_t;

  __device__ static Bits of(const Candidate& candidate) {
    return static_cast<uint64_t>(score_order(candidate.logit)) << 16 | (kLastRow - candidate.row);
  }
  __host__ __device__ static constexpr uint32_t order(Bits key) { return static_cast<uint32_t>(key >> 16); }

  template <int kBatch>
  __device__ static Bits over_warp(Bits key) {
#pragma unroll
    for (int distance = 16; distance >= kBatch; distance /= 2) key = max(key, __shfl_xor_sync(~0u, key, distance));
    return key;
  }
  template <int kLanes>
  __device__ static Bits over(Bits key) {
    if (threadIdx.x % 32 >= kLanes) key = 0;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) key = max(key, __shfl_xor_sync(~0u, key, distance));
    return key;
  }
};

}  // namespace wts
