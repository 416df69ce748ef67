// The order in which tokens win: larger bf16 logit first, then the lower row. NaN counts as -inf, -0 equals +0.
#pragma once
#include <cuda/std/limits>

#include "common/ptx.cuh"

namespace wts {

constexpr float kMinusInfinity = -cuda::std::numeric_limits<float>::infinity();
constexpr uint32_t kLastRow = 0xFFFF;  // a CTA's rows are numbered below this in its keys

// 32-bit key of a CTA's candidate: order-preserving bits of the bf16 logit, then the inverted row within the CTA. `logit_bits` are those of
// an fp32 that holds a bf16 exactly, is not NaN and not -0.
__host__ __device__ constexpr uint32_t candidate_key(uint32_t logit_bits, uint32_t row) {
  const uint32_t ordered = logit_bits ^ (static_cast<uint32_t>(static_cast<int32_t>(logit_bits) >> 31) | 0x80000000u);
  return (ordered & 0xFFFF0000u) | (kLastRow - row);
}

__host__ __device__ constexpr uint32_t key_row(uint32_t key) { return kLastRow - (key & 0xFFFFu); }
__host__ __device__ constexpr uint32_t key_order(uint32_t key) { return key >> 16; }

// A row and its logit: a bf16 value in an fp32, never NaN.
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

}  // namespace wts
