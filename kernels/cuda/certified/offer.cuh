// Which rows of a step may win: every warp looks through a slice of its base logits and offers the best few.
//
// Sectors of 16 rows are dealt to slices in turn, since token ids are sorted by frequency: of neighbours many are good at once, and what
// bounds a step is the best row that any slice keeps back. On 28 rounds of a trained drafter that proves 99.6 % of steps, as the 256 best
// rows do; with lines of 64 rows it is 96.7. A row counts by the upper half of its order, which is all of a greedy one's. The threshold of
// a slice is the `wanted`th largest of its lanes' best rows, so a few more rows than that reach it. A slice lies in shared memory, and
// loops are not unrolled: with a cold L2 a walk waits for its own instructions.
#pragma once
#include "certified/rule.cuh"

namespace wts {

constexpr uint32_t kLeastUpper = 0x007F, kMostUpper = 0xFF80;  // of -inf and +inf

// Two bf16 (greedy) as the upper halves of their orders: larger is better. A NaN lies above +inf, or below -inf if it is negative.
__device__ inline uint32_t upper_orders(uint32_t pair) {
  const uint32_t negative = (pair >> 15 & 0x00010001u) * 0xFFFFu;
  return pair ^ (negative | 0x80008000u);
}

// What lies above +inf becomes -inf.
__device__ inline uint32_t without_nan(uint32_t orders) {
  const uint32_t low = orders & 0xFFFFu, high = orders >> 16;
  return (low > kMostUpper ? kLeastUpper : low) | (high > kMostUpper ? kLeastUpper : high) << 16;
}

// The largest order whose upper half is this one, of numbers with a bf16's digits: what the row is, if it is greedy.
__device__ inline uint32_t order_of_upper(uint32_t upper) { return upper << 16 | (upper & 0x8000u ? 0 : 0xFFFFu); }

template <CertifiedShape S>
struct Offer {
  static constexpr int kSectorRows = 16;  // 32 bytes
  using Rule = RowRule<S.sampling>;
  // Of every lane of a warp its vectors: base logits, then the upper orders in their place.
  using Slice = uint4[S.vectors][32];
  static_assert(S.wanted <= S.local && S.local <= 32 && S.vectors <= 8);

  const CertifiedParams& p;
  Slice& own;

  __device__ static int first_row(int slice, int vector) {
    const int lane = threadIdx.x % 32;
    return (slice + S.slices * (lane / 2 + 16 * vector)) * kSectorRows + lane % 2 * 8;
  }

  __device__ const uint16_t* logits(int request, int step) const {
    return p.walk.base + request * p.walk.base_request_stride + step * p.walk.base_step_stride;
  }

  // Begin to bring this lane's base logits; what lies past the vocabulary is anything.
  __device__ void load(int request, int step, int slice) const {
    const int lane = threadIdx.x % 32;
    const uint16_t* row = logits(request, step);
    const bool aligned = reinterpret_cast<uint64_t>(row) % 16 == 0;
#pragma unroll 1
    for (int i = 0; i < S.vectors; i++) {
      const int first = first_row(slice, i);
      if (aligned && first + 8 <= p.walk.vocab) {
        copy_async_16(&own[i][lane], row + first);
      } else {
        uint16_t* target = reinterpret_cast<uint16_t*>(&own[i][lane]);
#pragma unroll 1
        for (int e = 0; e < 8 && first + e < p.walk.vocab; e++) target[e] = row[first + e];
      }
    }
  }

  // Eight rows' upper orders; 0 past the vocabulary. `largest` grows by finite logits; sampling only.
  __device__ uint4 rate(const Rule& rule, const uint4& pairs, int first, float& largest) const {
    uint4 upper = pairs;
    uint32_t* words = reinterpret_cast<uint32_t*>(&upper);
    if constexpr (S.sampling) {
      Words noise[2] = {};
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (!rule.greedy) noise[half] = rule.words(first + 4 * half);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        uint32_t orders[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float logit = widen(static_cast<uint16_t>(words[w] >> (16 * e)));
          if (first + 2 * w + e < p.walk.vocab && fabsf(logit) < -kMinusInfinity) largest = fmaxf(largest, fabsf(logit));
          orders[e] = rule.order(logit, rule.greedy ? 0.0f : gumbel(noise[w / 2].w[w % 2 * 2 + e]));
        }
        words[w] = __byte_perm(orders[0], orders[1], 0x7632);
      }
    } else {
#pragma unroll
      for (int w = 0; w < 4; w++) words[w] = upper_orders(words[w]);
    }
    if (first + 8 > p.walk.vocab) {
#pragma unroll
      for (int w = 0; w < 4; w++)
        words[w] &= (first + 2 * w < p.walk.vocab ? 0xFFFFu : 0) | (first + 2 * w + 1 < p.walk.vocab ? 0xFFFF0000u : 0);
    }
    return upper;
  }

  __device__ static uint32_t best_of(const uint4& upper) {
    const uint32_t both = __vmaxu2(__vmaxu2(upper.x, upper.y), __vmaxu2(upper.z, upper.w));
    return max(both & 0xFFFFu, both >> 16);
  }

  // The largest threshold that `wanted` lanes' best reach; 0 where fewer lanes have a row.
  __device__ static uint32_t threshold(uint32_t best, int wanted) {
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t bit = 0x8000; bit > 0; bit >>= 1)
      if (__popc(__ballot_sync(~0u, best >= (found | bit))) >= wanted) found |= bit;
    return found;
  }

  // Which of this lane's rows reach `least`: bit 8 i + e is element e of vector i.
  __device__ uint64_t reaching(uint32_t least) const {
    uint64_t hits = 0;
#pragma unroll 1
    for (int i = S.vectors - 1; i >= 0; i--) {
      const uint4 upper = own[i][threadIdx.x % 32];
      const uint32_t* words = reinterpret_cast<const uint32_t*>(&upper);
      uint32_t bits = 0;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const uint32_t reached = __vcmpgeu2(words[w], least | least << 16);
        bits |= ((reached & 1u) | (reached >> 30 & 2u)) << (2 * w);
      }
      hits = hits << 8 | bits;
    }
    return hits;
  }

  // Of a row of this lane: the order of its base logit, which is its upper half if it is greedy; a drawn one's lower half was not kept.
  __device__ uint32_t order(const Rule& rule, const uint16_t* row, int element, int here) const {
    if (!rule.greedy) return rule.order(widen(__ldg(row + here)), rule.noise(here));
    return order_of_upper(reinterpret_cast<const uint16_t*>(&own[element / 8][threadIdx.x % 32])[element % 8]);
  }

  // One warp: slice `slice` of a step of a request. `pair` numbers requests and steps.
  __device__ void slice(int request, int step, int pair, int slice, uint32_t round, Mail& mail) const {
    const Params& walk = p.walk;
    const int lane = threadIdx.x % 32;
    const uint16_t* row = logits(request, step);
    copy_async_wait();  // a lane reads only what it brought itself
    const Rule rule = Rule::of(walk, request, step, round);
    float largest = 0.0f;
    uint32_t best = 0;
#pragma unroll 1
    for (int i = 0; i < S.vectors; i++) {
      own[i][lane] = rate(rule, own[i][lane], first_row(slice, i), largest);
      best = max(best, best_of(own[i][lane]));
    }
    if (__any_sync(~0u, best > kMostUpper)) {  // seldom, and half as many instructions for all others
      best = 0;
#pragma unroll 1
      for (int i = 0; i < S.vectors; i++) {
        const uint4 upper = own[i][lane];
        own[i][lane] = make_uint4(without_nan(upper.x), without_nan(upper.y), without_nan(upper.z), without_nan(upper.w));
        best = max(best, best_of(own[i][lane]));
      }
    }
    uint32_t least;
    uint64_t hits;
    bool fit;
#pragma unroll 1
    for (int wanted = S.wanted;; wanted /= 2) {  // one slice in ten has more rows than places, and then offers half as many
      least = max(threshold(best, wanted), 1u);
      hits = best >= least ? reaching(least) : 0;
      fit = __reduce_add_sync(~0u, __popc(static_cast<uint32_t>(hits)) + __popc(static_cast<uint32_t>(hits >> 32))) <= S.local;
      if (fit || wanted == 1) break;
    }
    const int64_t at = static_cast<int64_t>(pair) * S.slices + slice;
    uint64_t* offered = p.offered + at * S.local;
    int count = 0;
#pragma unroll 1
    for (uint32_t votes; (votes = __ballot_sync(~0u, hits != 0)) != 0; count += __popc(votes)) {
      const int place = count + __popc(votes & ((1u << lane) - 1));
      if (hits != 0 && place < S.local) {
        const int element = __ffsll(static_cast<int64_t>(hits)) - 1, here = first_row(slice, element / 8) + element % 8;
        offered[place] = static_cast<uint64_t>(order(rule, row, element, here)) << 32 | here;
      }
      hits &= hits - 1;
    }
    if (lane >= count && lane < S.local) offered[lane] = 0;
    if constexpr (S.sampling) {
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
      if (lane == 0) p.largest[at] = largest;
    }
    // Of too many equal ones some stay behind.
    const uint32_t outside = fit ? least - 1 : __reduce_max_sync(~0u, best);
    if (lane == 0) p.passed_over[at] = outside < kLeastUpper ? 0 : !rule.greedy ? outside << 16 | 0xFFFFu : order_of_upper(outside);
    __syncwarp();
    if (lane == 0) red_add_release(&mail.offered[step], 1);
  }
};

}  // namespace wts
