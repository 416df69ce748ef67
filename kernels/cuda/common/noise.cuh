// From random words to a drawn token. kernels/noise.py and kernels/sampling.py compute the same bits: every multiplication, addition and
// fma below is rounded once, to nearest but for fma_rd, and nothing else happens to a number. No divisions; the functions that decide are
// constexpr, so that tests evaluate this very code without a GPU. One instruction is the hardware's own, ex2.approx: on the 4,096 fractions
// it is asked for, its results were recorded (exp2_table.inc), and a GPU test compares every one.
//
// Two rules (kernels/walk.py, NoiseRule). GUMBEL: the row with the largest logit / T + gumbel(its word). GROUPS: 16 rows are one group, of
// 64 rows group g holds rows 8 g to 8 g + 7 and 32 + 8 g to 32 + 8 g + 7; the group with the largest log-sum-exp + gumbel(its word) wins,
// and one uniform number, from a word of its own, picks the row inside by inverse CDF.
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
  kDraftGroups = 0x44520002,  // rule GROUPS, which group
  kDraftPlaces = 0x44520003,  // rule GROUPS, which of its rows
  kVerify = 0x56450001,       // reserved for a verifier that resamples
};

constexpr int kRowsPerWords = 4;    // GUMBEL: row r takes word r % 4 of index r / 4
constexpr int kGroupRows = 16;      // GROUPS: rows of a group
constexpr int kGroupsPerWords = 4;  // GROUPS: group g takes word g % 4 of index g / 4, in both of its streams

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

// a b + c in a double, rounded to odd, so that rounding it once more, to a float, is the only rounding that counts (Boldo and Melquiond,
// "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008). The product is exact there.
__host__ __device__ constexpr double fma_odd(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b), addend = static_cast<double>(c);
  const double sum = product + addend, grown = sum - product;
  const double lost = (product - (sum - grown)) + (addend - grown);
  const uint64_t truncated = cuda::std::bit_cast<uint64_t>(sum) - (lost * sum < 0);
  return cuda::std::bit_cast<double>(truncated | (lost < 0 || lost > 0));
}

__host__ __device__ constexpr float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) return __fmaf_rn(a, b, c);
#endif
  return static_cast<float>(fma_odd(a, b, c));
}

// The same rounded down.
__host__ __device__ constexpr float fma_rd(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) return __fmaf_rd(a, b, c);
#endif
  const double exact = fma_odd(a, b, c);
  const float nearest = static_cast<float>(exact);
  if (!(static_cast<double>(nearest) > exact)) return nearest;
  const uint32_t bits = cuda::std::bit_cast<uint32_t>(nearest);
  return cuda::std::bit_cast<float>(nearest > 0.0f ? bits - 1 : nearest < 0.0f ? bits + 1 : 0x80000001u);
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

// Mantissas of ex2.approx.ftz at exponents with fraction j / 4096 below 0, recorded on an H200; at most 2 units in the last place below the
// exact ones. (On average 0.69 = ln 2 units, as if the hardware took the complement of a negative number for its opposite. So above 0 other
// mantissas must be expected.)
constexpr uint32_t kExp2Mantissas[4096] = {
#include "common/exp2_table.inc"
};

// 2^x for x <= 0 that is a multiple of 2^-12; 0 below -126, where -inf is too, and NaN for a NaN.
__host__ __device__ constexpr float exp2_units(float x) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }
#endif
  if (!(x >= -126.0f)) return x != x ? x : 0.0f;
  const int32_t units = static_cast<int32_t>(x * 4096.0f) + (127 << 12);
  return cuda::std::bit_cast<float>(static_cast<uint32_t>(units >> 12 << 23) | kExp2Mantissas[units & 4095]);
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
  float scale;    // log2(e) / T: from logits to exponents of 2

  __host__ __device__ static constexpr RowTemperature of(float temperature) {
    const bool greedy = !(temperature > 0.0f);
    const float divisor = greedy ? 1.0f : min_number(max_number(temperature, 1e-5f), 1e4f);
    const float inverse = reciprocal_rn(divisor);
    return {greedy, inverse, mul_rn(inverse, 1.44269504f)};
  }
};

// GUMBEL: the score of a row; NaN logits are -inf. Greedy rows pass noise 0 (and their inverse is 1).
__host__ __device__ constexpr float row_score(float logit, float inverse, float noise) {
  return max_number(fma_rn(logit, inverse, noise), -cuda::std::numeric_limits<float>::infinity());
}

// GROUPS: a row's weight is 2^((logit - top) scale) with the exponent in units of 2^-12, to which the sum with 3072 rounds it: as a share
// of its group it is exact up to 1.7e-4, a twentieth of what rounding a logit just above 1 to bf16 does to it. `top` is the group's largest
// logit that is not NaN.
constexpr float kWeightShift = 3072.0f;

// GROUPS: what the group's rows add to their scaled logits. Rounded down, so that no exponent is above 0. That makes all weights of the
// group smaller by one factor: by up to a unit, and where top / T is far from 0 by up to twice what rounding it to fp32 does.
__host__ __device__ constexpr float group_shift(float top, float scale) {
  return fma_rd(top > -cuda::std::numeric_limits<float>::infinity() ? -top : 0.0f, scale, kWeightShift);
}

// GROUPS: the weight of a row, unless the group is rare.
__host__ __device__ constexpr float row_weight(float logit, float scale, float shift) {
  return exp2_units(add_rn(fma_rn(logit, scale, shift), -kWeightShift));
}

// GROUPS: whether `top` is so far from 0, in exponents, that the shift has lost the logits' last digits, or is infinite.
__host__ __device__ constexpr bool is_far(float shift) { return !(shift > -0x1p20f && shift < 0x1p20f); }

// GROUPS: whether rare_weight must do for row_weight, whose weights sum up to `sum`. A NaN row makes that NaN.
__host__ __device__ constexpr bool is_rare(float shift, float sum) { return is_far(shift) || sum != sum; }

// GROUPS: the weight of a row in any group. NaN has none. Where the group is far, two logits that differ, differ by exponents of 2^12 at
// least, since they have eight digits: all weight is the largest logit's, +inf or not.
__host__ __device__ constexpr float rare_weight(float logit, float top, float scale, float shift) {
  if (is_far(shift)) return logit == top ? 1.0f : 0.0f;
  return logit != logit ? 0.0f : row_weight(logit, scale, shift);
}

// GROUPS: the score of a group from the sum of its weights in row order, top / T + log(sum) - log(E), with one logarithm for both. Where
// `top` is -inf it means nothing, and the caller's score is -inf.
__host__ __device__ constexpr float group_score(float top, float sum, float inverse, uint32_t word) {
  return fma_rn(top, inverse, -log_positive(mul_rn(exponential(word), reciprocal_rn(sum))));
}

// GROUPS: the winner's row is the first whose running sum of weights is above this. Where no score is above -inf, the token is 0.
__host__ __device__ constexpr float row_threshold(float sum, uint32_t word) { return mul_rn(uniform(word), sum); }

}  // namespace wts
