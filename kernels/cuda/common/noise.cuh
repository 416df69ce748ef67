// From random words to a drawn token. kernels/noise.py and kernels/sampling.py compute the same bits: every multiplication, addition and
// fma below is rounded to nearest once, and nothing else happens to a number. No divisions, no branches; the functions that decide are
// constexpr, so that tests evaluate this very code without a GPU.
//
// Two rules (kernels/walk.py, NoiseRule). GUMBEL: the row with the largest logit / T + gumbel(its word). GROUPS: 16 rows are one group, of
// 64 rows group g holds rows 8 g to 8 g + 7 and 32 + 8 g to 32 + 8 g + 7; the group with the largest log-sum-exp + gumbel(its word) wins,
// and one uniform number picks the row inside by inverse CDF.
#pragma once
#include <cuda/std/bit>
#include <cuda/std/limits>
#include <cuda/std/type_traits>

#include "common/philox.cuh"

namespace wts {
using cuda::std::int32_t;

// Word 3 of a counter. No two streams share a word; a walk never uses the verifier's.
enum NoiseStream : uint32_t {
  kDraftRows = 0x44520001,    // rule GUMBEL
  kDraftGroups = 0x44520002,  // rule GROUPS
  kVerify = 0x56450001,       // reserved for a verifier that resamples
};

constexpr int kRowsPerWords = 4;    // GUMBEL: row r takes word r % 4 of index r / 4
constexpr int kGroupRows = 16;      // GROUPS: rows of a group
constexpr int kGroupsPerWords = 2;  // GROUPS: group g takes words 2 (g % 2), for its Gumbel, and 2 (g % 2) + 1, for its row, of index g / 2

// slot: the request's place in the batch, 0 to 63; step: 0 to 31; round: the launch.
__host__ __device__ constexpr Words noise_counter(uint32_t index, uint32_t step, uint32_t slot, uint32_t round, NoiseStream stream) {
  return {{index, step | slot << 8, round, stream}};
}

// Arithmetic that the compiler may not fuse or split: intrinsics on the device, the same rounding elsewhere (host compilers need
// -ffp-contract=off).
__host__ __device__ constexpr float mul_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) return __fmul_rn(a, b);
#endif
  return a * b;
}

__host__ __device__ constexpr float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) return __fadd_rn(a, b);
#endif
  return a + b;
}

__host__ __device__ constexpr float sub_rn(float a, float b) { return add_rn(a, -b); }

// The product is exact in a double. The sum is rounded to odd there, so that rounding it once more, to a float, is the only rounding that
// counts (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
__host__ __device__ constexpr float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) return __fmaf_rn(a, b, c);
#endif
  const double product = static_cast<double>(a) * static_cast<double>(b), addend = static_cast<double>(c);
  const double sum = product + addend, grown = sum - product;
  const double lost = (product - (sum - grown)) + (addend - grown);
  const uint64_t truncated = cuda::std::bit_cast<uint64_t>(sum) - (lost * sum < 0);
  return static_cast<float>(cuda::std::bit_cast<double>(truncated | (lost < 0 || lost > 0)));
}

// The larger and the smaller; of a NaN and a number the number.
__host__ __device__ constexpr float max_number(float a, float b) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) return fmaxf(a, b);
#endif
  return a != a || b > a ? b : a;
}

__host__ __device__ constexpr float min_number(float a, float b) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) return fminf(a, b);
#endif
  return a != a || b < a ? b : a;
}

// A positive normal x = 2^e (1 + f), with 1 + f in [sqrt(1/2), sqrt(2)); `exponent` is e in units of 2^-23, exactly.
struct Split {
  int32_t exponent;
  float f;
};

__host__ __device__ constexpr Split split(float x) {
  constexpr uint32_t kSqrtHalf = 0x3F3504F3;
  const uint32_t bits = cuda::std::bit_cast<uint32_t>(x), exponent = (bits - kSqrtHalf) & 0xFF800000u;
  return {static_cast<int32_t>(exponent), add_rn(cuda::std::bit_cast<float>(bits - exponent), -1.0f)};
}

// log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1] as f + f^2 P(f), P minimax of degree 6: relative error below 2.5e-7, rounding included.
__host__ __device__ constexpr float log1p_within(float f) {
  float p = -0.100823656f;
  p = fma_rn(p, f, 0.16180485f);
  p = fma_rn(p, f, -0.17243223f);
  p = fma_rn(p, f, 0.19906873f);
  p = fma_rn(p, f, -0.24971229f);
  p = fma_rn(p, f, 0.33334714f);
  p = fma_rn(p, f, -0.5000032f);
  return fma_rn(mul_rn(f, f), p, f);
}

constexpr float kLn2Units = 0x1.62e43p-24f;  // ln 2 / 2^23: what one unit of Split::exponent adds to a logarithm

// Natural logarithm of a positive normal number; relative error below 3e-7.
__host__ __device__ constexpr float log_positive(float x) {
  const Split s = split(x);
  return fma_rn(static_cast<float>(s.exponent), kLn2Units, log1p_within(s.f));
}

// E ~ Exp(1) = -log(1 - u), u = (x + 1/2) / 2^32. Both u and 1 - u are rounded from the integer, so that neither end loses digits: below
// u = 1 - sqrt(1/2) the logarithm starts from u, above it from 1 - u. Relative error below 4e-7.
__host__ __device__ constexpr float exponential(uint32_t x) {
  constexpr float kUnit = 0x1p-32f, kHalf = 0x1p-33f;
  const float u = fma_rn(static_cast<float>(x), kUnit, kHalf);
  const Split rest = split(fma_rn(static_cast<float>(~x), kUnit, kHalf));
  const float f = rest.exponent == 0 ? -u : rest.f;
  return fma_rn(static_cast<float>(rest.exponent), -kLn2Units, -log1p_within(f));
}

// G ~ Gumbel(0, 1), between -3.13 and 22.88; absolute error below 1.1e-6.
__host__ __device__ constexpr float gumbel(uint32_t x) { return -log_positive(exponential(x)); }

// U ~ Uniform(0, 1) = (floor(x / 2^9) + 1/2) / 2^23, exactly and strictly inside: the mantissa of a number in [1, 2), less 1 - 2^-24.
__host__ __device__ constexpr float uniform(uint32_t x) {
  return add_rn(cuda::std::bit_cast<float>((x >> 9) + 0x3F800000u), -0x1.fffffep-1f);
}

// a b + c, rounded once and clamped into [0, 1]; a NaN is 0.
__host__ __device__ constexpr float fma_sat(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) {
    float clamped;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(clamped) : "f"(a), "f"(b), "f"(c));
    return clamped;
  }
#endif
  const float sum = fma_rn(a, b, c);
  return sum > 0.0f ? min_number(sum, 1.0f) : 0.0f;
}

constexpr float kWeightSpan = 126.0f;  // a weight is a power of two between 2^-126, the smallest that is normal, and 1

// 2^(126 (t - 1)) for t in [0, 1]: integer part by rounding to units, rest by a polynomial of degree 4. Exact where 126 t is an integer,
// relative error elsewhere below 7e-6, half of it from t, which has 24 bits. (That is 1/500 of what a bf16 logit near 1 is rounded by.)
__host__ __device__ constexpr float exp2_weight(float t) {
  constexpr float kShift = 0x1.8p23f - kWeightSpan;
  const float shifted = fma_rn(t, kWeightSpan, kShift);
  const float f = fma_rn(t, kWeightSpan, sub_rn(kShift, shifted));
  float p = 0.009585382f;
  p = fma_rn(p, f, 0.055906627f);
  p = fma_rn(p, f, 0.24024038f);
  p = fma_rn(p, f, 0.6931242f);
  p = fma_rn(p, f, 1.0f);
  return cuda::std::bit_cast<float>(cuda::std::bit_cast<uint32_t>(p) + (cuda::std::bit_cast<uint32_t>(shifted) << 23));
}

// 1 / x, rounded once, for x within 2^-100 and 2^100. These are the instructions of __frcp_rn, less its test for other x and the call that
// answers them.
__host__ __device__ constexpr float reciprocal_rn(float x) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) {
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
    return fma_rn(guess, fma_rn(-x, guess, 1.0f), guess);
  }
#endif
  return 1.0f / x;
}

// What a request's temperature means. T <= 0 and NaN are greedy; any other T counts within [1e-5, 1e4].
struct RowTemperature {
  bool greedy;
  float inverse;  // 1 / T; 1 for greedy rows
  float scale;    // log2(e) / (126 T): of a difference of logits, in the units of exp2_weight

  __host__ __device__ static constexpr RowTemperature of(float temperature) {
    const bool greedy = !(temperature > 0.0f);
    const float divisor = greedy ? 1.0f : min_number(max_number(temperature, 1e-5f), 1e4f);
    const float inverse = reciprocal_rn(divisor);
    return {greedy, inverse, mul_rn(inverse, 1.44269504f / kWeightSpan)};
  }
};

// GUMBEL: the score of a row; NaN logits are -inf. Greedy rows pass noise 0 (and their inverse is 1).
__host__ __device__ constexpr float row_score(float logit, float inverse, float noise) {
  return max_number(fma_rn(logit, inverse, noise), -cuda::std::numeric_limits<float>::infinity());
}

// GROUPS: what stands for the group's largest logit, so that differences stay finite.
__host__ __device__ constexpr float group_top(float top) { return min_number(top, cuda::std::numeric_limits<float>::max()); }

// GROUPS: the weight of a row; `top` is group_top of the largest logit that is not NaN, and has weight 1.
__host__ __device__ constexpr float row_weight(float logit, float top, float scale) {
  return exp2_weight(fma_sat(sub_rn(logit, top), scale, 1.0f));
}

// GROUPS: the score of a group from the sum of its weights in row order, top / T + log(sum) - log(E), with one logarithm for both. Where
// `top` is -inf it means nothing: the caller's score is -inf.
__host__ __device__ constexpr float group_score(float top, float sum, float inverse, uint32_t word) {
  return fma_rn(top, inverse, -log_positive(mul_rn(exponential(word), reciprocal_rn(sum))));
}

// GROUPS: the winner's row is the first whose running sum of weights is above this. Where no score is above -inf, the token is 0.
__host__ __device__ constexpr float row_threshold(float sum, uint32_t word) { return mul_rn(uniform(word), sum); }

}  // namespace wts
