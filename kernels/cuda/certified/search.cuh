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

  // Nothing goes with it, so it need not wait for what was stored before.
  __device__ static void dismiss(Mail& mail) { store_relaxed(&mail.order, static_cast<uint64_t>(kDismissed) << 56); }

  // `best` may have the lower half of a key alone, as an entry of a table has.
  __device__ void post(Mail& mail) const {
    store_relaxed(&mail.best, best);
    const uint64_t word = static_cast<uint64_t>(number) << 56 | static_cast<uint64_t>(step) << 48 | previous;
    store_release(&mail.order, word);
  }
};

template <CertifiedShape S>
struct Search {
  using Rule = RowRule<S.sampling>;
  static constexpr int kOfLane = 8;  // neighbouring rows: 16 bytes of base logits
  static constexpr int kAtOnce = 4;  // rows of W2 that a warp has under way

  const CertifiedParams& p;

  // All threads of CTA `member` of the team: the best keys of its rows that can reach the order of `best` go to `mail.found`. The key of
  // `best`.
  __device__ uint64_t run(int request, const Order& order, int member, float largest, uint32_t round, Mail& mail) const {
    const Params& walk = p.walk;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int step = order.step;
    const uint16_t* base = walk.base + request * walk.base_request_stride + step * walk.base_step_stride;
    const Rule rule = Rule::of(walk, request, step, round);
    const float bias = __ldg(p.list_bound + order.previous);
    const uint4 latent = __ldg(reinterpret_cast<const uint4*>(walk.latents) + static_cast<int64_t>(order.previous) * 32 + lane);
    const uint64_t known = certified_order(order.best) ? order.best : scored(rule, latent, base, order.best);
    const uint32_t needed = certified_order(known);
    uint64_t best = 0;
    const int stride = S.team * S.warps * 32 * kOfLane;
    const bool aligned = reinterpret_cast<uint64_t>(base) % 16 == 0;
#pragma unroll 1
    for (int begin = (member * S.warps + warp) * 32 * kOfLane; begin < walk.vocab; begin += stride) {
      const uint4 pairs = eight(base, begin + lane * kOfLane, aligned);
#pragma unroll 1
      for (int e = 0; e < kOfLane; e++) {
        const uint32_t word = e < 4 ? (e < 2 ? pairs.x : pairs.y) : (e < 6 ? pairs.z : pairs.w);
        const float logit = widen(static_cast<uint16_t>(word >> (16 * (e % 2))));
        best = max(best, survivors(rule, latent, begin + e, logit, bias, largest, needed));
      }
    }
    if (lane == 0 && best) red_max_relaxed(&mail.found[order.number - 1], best);
    return known;
  }

 private:
  // One warp: the key of a row of which `entry` has only the lower bits.
  __device__ uint64_t scored(const Rule& rule, const uint4& latent, const uint16_t* base, uint64_t entry) const {
    const uint32_t row = certified_row(entry);
    float sum = dot(__ldg(p.walk.weights + static_cast<int64_t>(row) * 32 + threadIdx.x % 32), latent);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    return certified_key(rule.order(Rule::corrected(sum, widen(__ldg(base + row))), rule.noise(row)), row, certified_place(entry));
  }

  // Base logits of eight rows; anything past the vocabulary.
  __device__ uint4 eight(const uint16_t* base, int row, bool aligned) const {
    if (aligned && row + kOfLane <= p.walk.vocab) return __ldg(reinterpret_cast<const uint4*>(base + row));
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < kOfLane; e++)
      if (row + e < p.walk.vocab) words[e / 2] |= static_cast<uint32_t>(__ldg(base + row + e)) << (16 * (e % 2));
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // One warp, every eighth row from `first` on, one of each lane: the best key of those that can reach the order `needed`.
  __device__ uint64_t survivors(const Rule& rule, const uint4& latent, int first, float logit, float bias, float largest,
                                uint32_t needed) const {
    const Params& walk = p.walk;
    const int lane = threadIdx.x % 32, row = first + kOfLane * lane;
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
        const int of = first + kOfLane * (lanes[n] < 0 ? lanes[0] : lanes[n]);
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
        best = max(best, certified_key(score, first + kOfLane * lanes[n], 0));
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
