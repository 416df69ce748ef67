// A step that is not proved: of all rows only those can win whose base logit and the largest bias outside the list reach the best score
// found. A request's team of CTAs looks for them and scores them. Few are left as a rule; where many are, this is a pass over W2.
//
// The last CTA of a team leads: it walks, and orders a search when a step needs one. The others wait for orders. Without tables a team is
// one CTA, and those that lead none help everybody, between two slices of base logits and after the last.
#pragma once
#include "certified/offer.cuh"

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

  // The request is done. Where tokens do not go with it, it need not wait for what was stored before.
  __device__ static void dismiss(Mail& mail, bool with_tokens) {
    constexpr uint64_t kWord = static_cast<uint64_t>(kDismissed) << 56;
    if (with_tokens)
      store_release(&mail.order, kWord);
    else
      store_relaxed(&mail.order, kWord);
  }

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
  static constexpr int kAtOnce = 8;  // rows of W2 that a warp has under way

  struct Smem {
    uint32_t rows[64];  // that can reach, until there are enough to score
  };

  // Of all warps that search.
  struct Share {
    int own, all;
  };

  const CertifiedParams& p;
  Smem& smem;

  // One warp: the best key of its share of the rows that can reach the order of `best` goes to `mail.found`. The key of `best`.
  __device__ uint64_t run(int request, const Order& order, const Share& share, uint32_t round, Mail& mail) const {
    const Params& walk = p.walk;
    const int lane = fresh_thread() % 32, step = order.step;
    const uint16_t* base = walk.base + request * walk.base_request_stride + step * walk.base_step_stride;
    const Rule rule = Rule::of(walk, request, step, round);
    const float bias = __ldg(p.list_bound + order.previous);
    const uint4 latent = __ldg(reinterpret_cast<const uint4*>(walk.latents) + static_cast<int64_t>(order.previous) * 32 + lane);
    const uint64_t known = certified_order(order.best) ? order.best : again(rule, latent, base, order.best);
    const uint32_t needed = certified_order(known);
    const uint32_t below = rule.greedy ? below_reach(rule, bias, needed) : 0;
    const float largest = S.sampling ? largest_base(request * walk.steps + step, round) : 0.0f;
    uint32_t* rows = smem.rows;
    uint64_t best = 0;
    int found = 0;
    const int stride = share.all * 32 * kOfLane;
    const bool aligned = reinterpret_cast<uint64_t>(base) % 16 == 0;
    int begin = share.own * 32 * kOfLane;
    uint4 pairs = eight(base, begin + lane * kOfLane, aligned);
#pragma unroll 1
    for (; begin < walk.vocab; begin += stride) {
      const uint4 next = eight(base, begin + stride + lane * kOfLane, aligned);
#pragma unroll 1
      for (int e = 0; e < kOfLane; e++) {
        const uint32_t word = e < 4 ? (e < 2 ? pairs.x : pairs.y) : (e < 6 ? pairs.z : pairs.w);
        const int row = begin + lane * kOfLane + e;
        const uint16_t logit = static_cast<uint16_t>(word >> (16 * (e % 2)));
        const bool can = row < walk.vocab && (rule.greedy ? max(upper_order(logit), kLeastUpper) > below
                                                          : reaches(rule, row, widen(logit), bias, largest, needed));
        const uint32_t votes = __ballot_sync(~0u, can);
        if (can) rows[found + __popc(votes & ((1u << lane) - 1))] = row;
        found += __popc(votes);
        __syncwarp();
        if (found < 32) continue;
        best = max(best, scored(rule, latent, base, rows, 32));
        found -= 32;
        const uint32_t kept = rows[32 + lane];
        __syncwarp();
        rows[lane] = kept;
      }
      pairs = next;
    }
    __syncwarp();
    best = over_warp(max(best, scored(rule, latent, base, rows, found)));
    if (lane == 0 && best) red_max_relaxed(&mail.found[order.number - 1], best);
    return known;
  }

 private:
  // One warp: the largest |base logit| of a step, request * steps + step.
  __device__ float largest_base(int pair, uint32_t round) const {
    uint32_t most = 0, word[1];
    const uint64_t* bounds = p.offered + static_cast<int64_t>(pair) * S.slices * kSliceWords + kOffers;
#pragma unroll 1
    for (int first = 0; first < S.slices; first += 32) {
      const int slice = first + fresh_thread() % 32;
      await_tagged(round, [&](int) { return slice < S.slices ? bounds + slice * kSliceWords : nullptr; }, word);
      most = max(most, word[0] & 0xFFFF0000u);
    }
    return __uint_as_float(__reduce_max_sync(~0u, most));
  }

  // One warp: the key of a row of which `entry` has only the lower bits.
  __device__ uint64_t again(const Rule& rule, const uint4& latent, const uint16_t* base, uint64_t entry) const {
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

  // Of a drawn row.
  __device__ static bool reaches(const Rule& rule, int row, float logit, float bias, float largest, uint32_t needed) {
    return rule.bound(fmaxf(row_score(logit, rule.inverse, rule.noise(row)), kMinusInfinity), bias, largest) >= needed;
  }

  // Of a greedy step: the largest upper order of a base logit that cannot reach `needed`.
  __device__ static uint32_t below_reach(const Rule& rule, float bias, uint32_t needed) {
    uint32_t below = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 15; bit > 0; bit >>= 1)
      if (rule.bound(rule.most_of_upper(below + bit), bias, 0.0f) < needed) below += bit;
    return below;
  }

  // One warp: of `count` rows, 32 at most, each lane's best key.
  __device__ uint64_t scored(const Rule& rule, const uint4& latent, const uint16_t* base, const uint32_t* rows, int count) const {
    const int lane = threadIdx.x % 32;
    uint64_t best = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      uint4 weights[kAtOnce];
      float sum[kAtOnce], own = 0.0f;
#pragma unroll
      for (int n = 0; n < kAtOnce; n++)
        weights[n] = __ldg(p.walk.weights + static_cast<int64_t>(rows[min(first + n, count - 1)]) * 32 + lane);
      const uint32_t row = rows[min(first + lane % kAtOnce, count - 1)];
      const float logit = widen(__ldg(base + row));
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) sum[n] = dot(weights[n], latent);
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
