// How rows of a step are judged: rule TWICE, greedy or with one Gumbel a row, and what no row outside can reach (kernels/certificate.py).
#pragma once
#include "certified/params.cuh"
#include "common/noise.cuh"
#include "common/score.cuh"

namespace wts {

// The number that an order stands for.
__device__ inline float unordered(uint32_t order) { return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order); }

// Of a bf16, and back: the upper half of its order, of which larger is better; 0 for a NaN.
__device__ inline uint32_t upper_order(uint32_t bf16_bits) {
  return (bf16_bits & 0x7FFFu) > 0x7F80u ? 0 : order_of_bits(bf16_bits << 16) >> 16;
}
__device__ inline uint16_t bf16_of_upper(uint32_t upper) { return static_cast<uint16_t>(upper & 0x8000u ? upper ^ 0x8000u : ~upper); }

constexpr uint32_t kLeastUpper = 0x007F;  // of -inf

// What gumbel(x) is at most: E = -log(1 - u) is above the first terms of its series, and a logarithm of the hardware's takes one
// instruction where the exact one takes thirty. Above it by 0.04 at u = 1/2 and by less for the smaller u that a row with little else
// needs.
__device__ inline float gumbel_bound(uint32_t x) {
  constexpr float kSlack = 0x1p-12f;  // of conversion, polynomial, logarithm and of gumbel() itself less than 2^-16
  const float u = __fmaf_rn(__uint2float_rn(x), 0x1p-32f, 0x1p-33f);
  const float least = __fmul_rn(u, __fmaf_rn(u, __fmaf_rn(u, 0x1.55554p-2f, 0.5f), 1.0f));
  return __fmaf_rn(log2_approx(least), -0x1.62e43p-1f, kSlack);
}

// Orders (score_order) of the rows of one step of one request.
template <bool kSampling>
struct RowRule {
  float inverse;  // 1 / T
  bool greedy;
  PhiloxKey key;
  uint32_t step, slot, round;

  __device__ static RowRule of(const Params& p, int request, int step, uint32_t round) {
    if constexpr (!kSampling) return {1.0f, true, {0, 0}, 0, 0, 0};
    const RowTemperature temperature = RowTemperature::of(p.temperature[request]);
    return {temperature.inverse,
            temperature.greedy,
            philox_key(p.seed[request]),
            static_cast<uint32_t>(step),
            static_cast<uint32_t>(request),
            round};
  }

  __device__ Words words(uint32_t row) const { return philox(noise_counter(row / kRowsPerWords, step, slot, round, kDraftRows), key); }

  // 0 for a greedy row.
  __device__ float noise(uint32_t row) const {
    if (!kSampling || greedy) return 0.0f;
    const Words w = words(row);
    const uint32_t low = row & 1 ? w.w[1] : w.w[0], high = row & 1 ? w.w[3] : w.w[2];
    return gumbel(row & 2 ? high : low);
  }

  // A logit, or a base logit, that holds a bf16. NaN counts as -inf.
  __device__ uint32_t order(float logit, float noise) const {
    if constexpr (!kSampling) return score_order(fmaxf(logit, kMinusInfinity));
    return score_order(greedy ? fmaxf(logit, kMinusInfinity) : row_score(logit, inverse, noise));
  }

  // What no row exceeds whose order has this upper half, or a lower one; 0 is none's. A greedy row is a bf16, which the half is all of.
  __device__ float most_of_upper(uint32_t upper) const {
    constexpr uint32_t kPlusInf = 0xFF800000u;  // of more than it no number has the order
    if (upper == 0) return kMinusInfinity;
    return !kSampling || greedy ? widen(bf16_of_upper(upper)) : unordered(min(upper << 16 | 0xFFFFu, kPlusInf));
  }

  // Two rows at once share their conversions: their bias is rounded, then the sum.
  __device__ static void corrected(float& low, float& high, float base_low, float base_high) {
    score_twice(low, high, base_low, base_high);
    round_bf16(low, high);
  }
  __device__ static float corrected(float bias, float base) {
    float low = bias, high = 0.0f;
    corrected(low, high, base, 0.0f);
    return low;
  }

  // What no row exceeds whose base logit (noised) is at most `outside` and whose bias is at most `bias`, in a step whose finite base logits
  // are at most `largest` in size.
  __device__ uint32_t bound(float outside, float bias, float largest) const {
    if (!kSampling || greedy) return score_order(corrected(bias, outside));
    if (outside == kMinusInfinity || bias == kMinusInfinity) return score_order(kMinusInfinity);
    // All roundings upward. 2^-8 (1 + 2^-7) of base and of twice the bias: rounding to bf16 before the noise; the rest: fp32 operations.
    constexpr float kOfBf16 = 0x1.02p-8f;
    const float size = fabsf(bias);
    const float halves = __fmul_ru(kOfBf16, __fadd_ru(largest, __fadd_ru(size, size)));
    const float slack = __fadd_ru(halves, __fmul_ru(0x1p-23f, __fadd_ru(largest, size)));
    const float reach = __fmaf_ru(__fadd_ru(bias, slack), inverse, outside);
    return score_order(__fadd_ru(reach, __fmul_ru(0x1p-22f, __fadd_ru(fabsf(outside), fabsf(reach)))));
  }
};

}  // namespace wts
