// A step that is not proved: of all rows only those can win whose base logit and the largest bias outside the list reach the best score
// found. A request's team of CTAs looks for them and scores them. Few are left as a rule; where many are, this is a pass over W2.
//
// The last CTA of a team leads: it walks, and orders a search when a step needs one. The others wait for orders.
#pragma once
#include "certified/rule.cuh"

namespace wts {

// An order in two words of Mail: number << 56 | step << 48 | previous token, and the best key so far. Numbers count from 1; kDismissed ends
// the walk.
constexpr uint32_t kDismissed = 0xFF;

struct Order {
  uint32_t number, step, previous;
  uint64_t best;

  __device__ static Order of(uint64_t word, uint64_t best) {
    return {static_cast<uint32_t>(word >> 56), static_cast<uint32_t>(word >> 48 & 0xFF), static_cast<uint32_t>(word), best};
  }

  __device__ void post(Mail& mail) const {
    store_relaxed(&mail.best, best);
    const uint64_t word = static_cast<uint64_t>(number) << 56 | static_cast<uint64_t>(step) << 48 | previous;
    store_release(&mail.order, word);
  }
};

template <CertifiedShape S>
struct Search {
  using Rule = RowRule<S.sampling>;
  static constexpr int kAhead = 4, kAtOnce = 4;  // base logits that a lane, rows of W2 that a warp has under way

  const CertifiedParams& p;

  // All threads of CTA `member` of the team: the best key of its rows that can reach the order of `best`; 0 for none. Warps' keys go to
  // `mail.found`.
  __device__ void run(int request, const Order& order, int member, float largest, uint32_t round, Mail& mail) const {
    const Params& walk = p.walk;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int step = order.step;
    const uint16_t* base = walk.base + request * walk.base_request_stride + step * walk.base_step_stride;
    const Rule rule = Rule::of(walk, request, step, round);
    const float bias = __ldg(p.list_bound + order.previous);
    const uint32_t needed = certified_order(order.best);
    const uint4 latent = __ldg(reinterpret_cast<const uint4*>(walk.latents) + static_cast<int64_t>(order.previous) * 32 + lane);
    uint64_t best = 0;
    const int stride = S.team * (32 * S.warps);
    for (int begin = (member * S.warps + warp) * 32; begin < walk.vocab; begin += kAhead * stride) {
      float logits[kAhead];
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ahead++) {
        const int row = begin + ahead * stride + lane;
        logits[ahead] = row < walk.vocab ? widen(__ldg(base + row)) : kMinusInfinity;
      }
#pragma unroll 1
      for (int ahead = 0; ahead < kAhead; ahead++) {
        const int first = begin + ahead * stride, row = first + lane;
        if (first >= walk.vocab) break;
        float logit = logits[0];
#pragma unroll
        for (int a = 1; a < kAhead; a++) logit = a == ahead ? logits[a] : logit;
        best = max(best, survivors(rule, latent, first, row, logit, bias, largest, needed));
      }
    }
    if (lane == 0 && best) red_max_relaxed(&mail.found[order.number - 1], best);
  }

 private:
  // One warp, 32 neighbouring rows: the best key of those that can reach the order `needed`.
  __device__ uint64_t survivors(const Rule& rule, const uint4& latent, int first, int row, float logit, float bias, float largest,
                                uint32_t needed) const {
    const Params& walk = p.walk;
    const int lane = threadIdx.x % 32;
    const float noise = rule.noise(row);
    const float reach = rule.greedy ? logit : row_score(logit, rule.inverse, noise);
    const bool can = row < walk.vocab && rule.bound(fmaxf(reach, kMinusInfinity), bias, largest) >= needed;
    uint32_t votes = __ballot_sync(~0u, can);
    uint64_t best = 0;
    while (votes) {
      int lanes[kAtOnce];
      uint4 weights[kAtOnce];
      float sum[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) {
        lanes[n] = votes ? __ffs(votes) - 1 : -1;
        votes &= votes - 1;
        const int of = first + (lanes[n] < 0 ? lanes[0] : lanes[n]);
        weights[n] = __ldg(walk.weights + static_cast<int64_t>(of) * 32 + lane);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) sum[n] = dot(weights[n], latent);
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) sum[n] = __fadd_rn(sum[n], __shfl_xor_sync(~0u, sum[n], distance));
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) {
        if (lanes[n] < 0) break;
        const uint32_t score = rule.order(Rule::corrected(sum[n], __shfl_sync(~0u, logit, lanes[n])), __shfl_sync(~0u, noise, lanes[n]));
        best = max(best, certified_key(score, first + lanes[n], 0));
      }
    }
    return best;
  }

  __device__ static float dot(const uint4& a, const uint4& b) {
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum = __fmaf_rn(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), sum);
      sum = __fmaf_rn(__uint_as_float(x[i] & 0xFFFF0000u), __uint_as_float(y[i] & 0xFFFF0000u), sum);
    }
    return sum;
  }
};

}  // namespace wts
