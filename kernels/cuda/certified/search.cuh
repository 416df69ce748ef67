// With tables: the search for the winner of a step that is not proved. A request's team of CTAs looks through all base logits and scores
// the rows that can win. Few are left as a rule; where many are, this is a pass over W2.
//
// The last CTA of a team leads: it walks, and orders a search when a step needs one. The others wait for orders.
#pragma once
#include "certified/reach.cuh"

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

  // The request is done.
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

  // Of all warps that search.
  struct Share {
    int own, all;
  };

  const CertifiedParams& p;
  typename Reach<S>::Smem& smem;

  // One warp: the best key of its share of the rows that can reach the order of `best` goes to `mail.found`. The key of `best`.
  __device__ uint64_t run(int request, const Order& order, const Share& share, uint32_t round, Mail& mail) const {
    const Params& walk = p.walk;
    const int lane = fresh_thread() % 32, step = order.step;
    const uint16_t* base = base_row(p, request, step);
    const Rule rule = Rule::of(walk, request, step, round);
    const float bias = __ldg(p.list_bound + order.previous);
    const float largest = S.sampling ? largest_base(request * walk.steps + step, round) : 0.0f;
    const uint4 latent = __ldg(reinterpret_cast<const uint4*>(walk.latents) + static_cast<int64_t>(order.previous) * 32 + lane);
    Reach<S> reach{walk, rule, base, latent, bias, largest, 0, smem};
    const uint64_t known = certified_order(order.best) ? order.best : again(reach, order.best);
    reach.needed = certified_order(known);
    const uint32_t below = rule.greedy ? reach.below() : 0;
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
        reach.add(row < walk.vocab && reach.can(row, static_cast<uint16_t>(word >> (16 * (e % 2))), below), row);
      }
      pairs = next;
    }
    const uint64_t best = reach.finish();
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

  // Base logits of eight rows; anything past the vocabulary.
  __device__ uint4 eight(const uint16_t* base, int row, bool aligned) const {
    if (aligned && row + kOfLane <= p.walk.vocab) return __ldg(reinterpret_cast<const uint4*>(base + row));
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < kOfLane; e++)
      if (row + e < p.walk.vocab) words[e / 2] |= static_cast<uint32_t>(__ldg(base + row + e)) << (16 * (e % 2));
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // One warp: the key of a row of which `entry` has only the lower bits.
  __device__ static uint64_t again(const Reach<S>& reach, uint64_t entry) {
    const uint32_t row = certified_row(entry);
    float sum = reach.dot(__ldg(reach.p.weights + static_cast<int64_t>(row) * 32 + threadIdx.x % 32));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    const Rule& rule = reach.rule;
    return certified_key(rule.order(Rule::corrected(sum, widen(__ldg(reach.base + row))), rule.noise(row)), row, certified_place(entry));
  }
};

}  // namespace wts
