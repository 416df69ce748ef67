// Rows that can still win a step that is not proved: those whose base logit and the largest bias outside the list reach the best score
// found.
#pragma once
#include "certified/offer.cuh"

namespace wts {

// Of one warp: it is told rows, and scores 32 at once.
template <CertifiedShape S>
struct Reach {
  using Rule = RowRule<S.sampling>;
  static constexpr int kAtOnce = S.warps <= 16 ? 8 : S.sampling ? 2 : 4;  // rows of W2 that are under way: more warps have fewer registers

  struct Smem {
    uint32_t rows[64];  // until there are enough to score
  };

  const Params& p;
  const Rule& rule;      // of the step
  const uint16_t* base;  // its logits
  uint4 latent;          // of the previous token, this lane's chunk
  float bias, largest;   // outside the token's list; the step's largest |base logit|, for drawn rows
  uint32_t needed;       // order of the best score found
  Smem& smem;
  int found = 0;
  uint64_t best = 0;

  // All lanes: the largest upper half of a base logit's order, of drawn rows of a bound of their score, that cannot reach. Every lane asks
  // for another one, so four turns find it, not sixteen.
  __device__ uint32_t below() const {
    uint32_t below = 0;
#pragma unroll 1
    for (int bits = 15; bits >= 0; bits -= 5) {
      const uint32_t lane = fresh_thread() % 32, mine = below + (lane << bits);
      const bool can = lane > 0 && (mine > 0xFFFFu || rule.bound(rule.most_of_upper(mine), bias, largest) >= needed);
      below += (__popc(__ballot_sync(~0u, !can)) - 1) << bits;
    }
    return below;
  }

  // Whether a row can; `below` is that of greedy rows.
  __device__ bool can(uint32_t row, uint16_t logit, uint32_t below) const {
    if (rule.greedy) return max(upper_order(logit), kLeastUpper) > below;
    const float score = fmaxf(row_score(widen(logit), rule.inverse, rule.noise(row)), kMinusInfinity);
    return rule.bound(score, bias, largest) >= needed;
  }

  // All lanes: a row of each that can reach, if `can`.
  __device__ void add(bool can, uint32_t row) {
    const int lane = fresh_thread() % 32;
    const uint32_t votes = __ballot_sync(~0u, can);
    if (can) smem.rows[found + __popc(votes & ((1u << lane) - 1))] = row;
    found += __popc(votes);
    __syncwarp();
    if (found < 32) return;
    best = max(best, scored(32));
    found -= 32;
    const uint32_t kept = smem.rows[32 + lane];
    __syncwarp();
    smem.rows[lane] = kept;
    __syncwarp();
  }

  // The best key of all rows.
  __device__ uint64_t finish() {
    __syncwarp();
    return over_warp(max(best, scored(found)));
  }

  // What products of one row come to, over the warp.
  __device__ float dot(const uint4& row) const {
    const uint32_t x[4] = {row.x, row.y, row.z, row.w}, y[4] = {latent.x, latent.y, latent.z, latent.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum = __fmaf_rn(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), sum);
      sum = __fmaf_rn(__uint_as_float(x[i] & 0xFFFF0000u), __uint_as_float(y[i] & 0xFFFF0000u), sum);
    }
    return sum;
  }

 private:
  // Each lane's best key of the first `count` rows, 32 at most.
  __device__ uint64_t scored(int count) const {
    const int lane = fresh_thread() % 32;
    uint64_t best = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      uint4 rows[kAtOnce];
      float sum[kAtOnce], own = 0.0f;
#pragma unroll
      for (int n = 0; n < kAtOnce; n++)
        rows[n] = __ldg(p.weights + static_cast<int64_t>(smem.rows[min(first + n, count - 1)]) * (kRank256 / 8) + lane);
      const uint32_t row = smem.rows[min(first + lane % kAtOnce, count - 1)];
      const float logit = widen(__ldg(base + row));
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) sum[n] = dot(rows[n]);
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) sum[n] = __fadd_rn(sum[n], __shfl_xor_sync(~0u, sum[n], distance));
#pragma unroll
      for (int n = 0; n < kAtOnce; n++)
        if (lane % kAtOnce == n) own = sum[n];
      best = max(best, certified_key(rule.order(Rule::corrected(own, logit), rule.noise(row)), row, 0));
    }
    return best;
  }
};

}  // namespace wts
