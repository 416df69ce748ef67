// The candidates of a step: of all rows that its slices offer, those above a threshold that leaves as many as there is room for.
//
// Every CTA that needs the candidates of a step picks them again from what was offered, in the same order, so that places agree: it costs
// less than another exchange. A warp has its share of the slices and of the places, and its own threshold, so warps need not meet: of 896
// steps of a trained drafter 8 of them prove 99.0 % with 128 candidates of 75 slices and 128 listed rows, where one threshold for all rows
// proves 99.4 (computed). The best rows have the first places, the others come from the last one on; places between may stay empty.
//
// All lanes of a warp take equally many turns of every loop here: where they did not, ptxas 13.0.88 left out what brings them together
// again (BSSY, WARPSYNC), and a warp that came to a barrier in two parts was counted twice. That build read counts before they were there.
#pragma once
#include "certified/offer.cuh"

namespace wts {

constexpr uint32_t kNoRow = ~0u;

template <CertifiedShape S>
struct Pick {
  static constexpr int kWarps = 8;
  static constexpr int kSlices = (S.slices + kWarps - 1) / kWarps, kLoads = (kSlices + 1) / 2;  // of a warp; of a lane
  static constexpr int kPlaces = S.candidates / kWarps, kFirst = S.previous / kWarps;
  static constexpr bool kAllLead = S.previous == S.candidates;
  static constexpr uint32_t kWindow = 512;  // values of a bf16 below the best: four binades. What lies lower is no candidate.
  static_assert(kPlaces * kWarps == S.candidates && kFirst * kWarps == S.previous);

  struct Set {
    uint32_t upper[S.candidates];  // halves of orders
    uint32_t row[S.candidates];    // kNoRow in an empty place; the first `previous` may be previous tokens
    uint32_t outside;              // the largest upper half of all other rows
    uint32_t largest;              // |base logit|, an fp32's bits; sampling only
    uint32_t cut[kWarps];          // the largest upper half that is no candidate, of each warp's slices

    __device__ void reset() { outside = largest = 0; }
  };

  // All threads of 2 kWarps warps; ends with a barrier, and one must have followed Set::reset. Each half of the CTA picks the candidates of
  // one step, of the second step only those with places from `begin` to `end`, of the first `previous`: these are each one warp's.
  __device__ static void run(const CertifiedParams& p, const int (&pairs)[2], int begin, int end, Set (&sets)[2], uint32_t round) {
    const int half = threadIdx.x / 32 / kWarps, warp = threadIdx.x / 32 % kWarps;
    if (half == 0 || (warp * kFirst < end && (warp + 1) * kFirst > begin)) one(p, half == 0 ? pairs[0] : pairs[1], warp, sets[half], round);
    __syncthreads();
  }

  // One warp of kWarps: its candidates of a step.
  __device__ static void one(const CertifiedParams& p, int pair, int warp, Set& set, uint32_t round) {
    const int lane = threadIdx.x % 32;
    const uint64_t* offered = p.offered + static_cast<int64_t>(pair) * S.slices * kSliceWords;
    const auto slice = [&](int j) { return warp + kWarps * (2 * j + lane / kSliceWords); };
    uint32_t keys[kLoads];
    const auto word = [&](int j) { return slice(j) < S.slices ? offered + slice(j) * kSliceWords + lane % kSliceWords : nullptr; };
    constexpr int kAtOnce = S.warps > 2 * kWarps ? 8 : kLoads;  // more warps have fewer registers
#pragma unroll
    for (int first = 0; first < kLoads; first += kAtOnce) await_tagged<kAtOnce>(round, first, word, keys);
    phase<S>(p, Phase::kAwaited);
    uint32_t outside = 0, largest = 0, best = 0;
#pragma unroll
    for (int j = 0; j < kLoads; j++) {
      if (lane % kSliceWords == kOffers) {
        outside = max(outside, keys[j] & 0xFFFFu);
        largest = max(largest, keys[j] & 0xFFFF0000u);
        keys[j] = 0;
      }
      best = max(best, keys[j]);
    }
    best = __reduce_max_sync(~0u, best) >> 16;
    const Cuts cuts = cut(keys, best - min(best, kWindow - 1));
    if (lane == 0) set.cut[warp] = cuts.last;
    int first = 0, others = 0;
#pragma unroll
    for (int j = 0; j < kLoads; j++) {
      const uint32_t upper = keys[j] >> 16, lower = (1u << lane) - 1;
      const bool fits = upper > cuts.last, leads = kAllLead ? fits : upper > cuts.first;
      const uint32_t leading = __ballot_sync(~0u, leads), following = kAllLead ? 0 : __ballot_sync(~0u, fits && !leads);
      if (fits) {
        const int at = place(warp, leads ? first + __popc(leading & lower) : kPlaces - 1 - others - __popc(following & lower));
        set.upper[at] = upper;
        set.row[at] = Offer<S>::row_of(slice(j), keys[j]);
      } else {
        outside = max(outside, upper);
      }
      first += __popc(leading), others += __popc(following);
    }
#pragma unroll
    for (int n = lane; n < kPlaces; n += 32)
      if (n >= first && n < kPlaces - others) set.row[place(warp, n)] = kNoRow;
    outside = __reduce_max_sync(~0u, outside);
    if (lane == 0) atomicMax(&set.outside, outside);
    if constexpr (S.sampling) {
      largest = __reduce_max_sync(~0u, largest);
      if (lane == 0) atomicMax(&set.largest, largest);
    }
  }

 private:
  struct Cuts {
    uint32_t first, last;  // rows above `last` are candidates, those above `first` previous tokens too
  };

  // Of a warp's place `n` the one among all.
  __device__ static int place(int warp, int n) {
    return n < kFirst ? warp * kFirst + n : S.previous + warp * (kPlaces - kFirst) + n - kFirst;
  }

  // One warp: the least cuts, from `floor` on, that leave no more rows than there are places.
  __device__ static Cuts cut(const uint32_t (&keys)[kLoads], uint32_t floor) {
    Cuts cuts{floor, floor};
#pragma unroll 1
    for (uint32_t bit = kWindow / 2; bit > 0; bit >>= 1) {
      const uint32_t last = (cuts.last + bit) << 16, first = (cuts.first + bit) << 16;
      uint32_t reached = 0;  // of the first cut in the upper half
#pragma unroll
      for (int j = 0; j < kLoads; j++) reached += (keys[j] >= last ? 1 : 0) + (!kAllLead && keys[j] >= first ? 0x10000 : 0);
      reached = __reduce_add_sync(~0u, reached);
      if ((reached & 0xFFFFu) > kPlaces) cuts.last += bit;
      if (reached >> 16 > kFirst) cuts.first += bit;
    }
    return cuts;
  }
};

}  // namespace wts
