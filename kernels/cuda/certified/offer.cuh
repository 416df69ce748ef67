// Which rows of a step may win: every warp looks through a slice of its base logits and offers the best few.
//
// Lines of 64 rows are dealt to slices in turn, since token ids are sorted by frequency: of neighbours many would be good at once. A row
// counts by the upper half of its order, which is all of a greedy one's; two rows share a register. The threshold of a slice is the
// `wanted`th largest of its lanes' best rows, so a few more rows than that reach it.
#pragma once
#include "certified/rule.cuh"
#include "common/unroll.cuh"

namespace wts {

constexpr uint32_t kLeastUpper = 0x007F;  // of -inf

// Two bf16 (greedy) as the upper halves of their orders: larger is better. NaN is -inf.
__device__ inline uint32_t upper_orders(uint32_t pair) {
  const uint32_t negative = (pair >> 15 & 0x00010001u) * 0xFFFFu;
  const uint32_t orders = pair ^ (negative | 0x80008000u);
  constexpr uint32_t kPlusInf = 0xFF80FF80u;
  return __vmaxu2(orders & ~__vcmpgtu2(orders, kPlusInf), kLeastUpper << 16 | kLeastUpper);
}

// The largest order whose upper half is this one, of numbers with a bf16's digits: what the row is, if it is greedy.
__device__ inline uint32_t order_of_upper(uint32_t upper) { return upper << 16 | (upper & 0x8000u ? 0 : 0xFFFFu); }

template <CertifiedShape S>
struct Offer {
  static constexpr int kWords = 4 * S.vectors, kLineRows = 64;
  using Rule = RowRule<S.sampling>;
  static_assert(S.wanted <= S.local && S.local <= 32 && S.vectors <= 8);

  const CertifiedParams& p;

  __device__ static int first_row(int slice, int vector) {
    const int lane = threadIdx.x % 32;
    return (slice + S.slices * (lane / 8 + 4 * vector)) * kLineRows + lane % 8 * 8;
  }

  // Eight base logits of one lane, from row `first` on; what lies past the vocabulary is anything.
  __device__ static uint4 load(const uint16_t* row, bool aligned, int first, int vocab) {
    if (aligned && first + 8 <= vocab) return __ldg(reinterpret_cast<const uint4*>(row + first));
    uint32_t words[4] = {};
#pragma unroll 1
    for (int e = 0; e < 8 && first + e < vocab; e++) {
      const uint32_t shifted = static_cast<uint32_t>(row[first + e]) << (e % 2 * 16);
#pragma unroll
      for (int w = 0; w < 4; w++) words[w] |= e / 2 == w ? shifted : 0;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // Eight rows' upper orders, two a word; 0 past the vocabulary. `largest` grows by finite logits; sampling only.
  __device__ static void rate(const Rule& rule, const uint4& loaded, int first, int vocab, uint32_t (&upper)[4], float& largest) {
    const uint32_t pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    if constexpr (S.sampling) {
#pragma unroll 1
      for (int half = 0; half < 2; half++) {
        Words noise{};
        if (!rule.greedy) noise = rule.words(first + 4 * half);
#pragma unroll
        for (int w = 0; w < 2; w++) {
          const uint32_t pair = half == 0 ? pairs[w] : pairs[2 + w];
          uint32_t orders[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float logit = widen(static_cast<uint16_t>(pair >> (16 * e)));
            if (fabsf(logit) < -kMinusInfinity) largest = fmaxf(largest, fabsf(logit));
            orders[e] = rule.order(logit, rule.greedy ? 0.0f : gumbel(noise.w[2 * w + e]));
          }
          const uint32_t word = __byte_perm(orders[0], orders[1], 0x7632);
          upper[w] = half == 0 ? word : upper[w], upper[2 + w] = word;
        }
      }
    } else {
#pragma unroll
      for (int w = 0; w < 4; w++) upper[w] = upper_orders(pairs[w]);
    }
    if (first + 8 > vocab) {
#pragma unroll
      for (int w = 0; w < 4; w++) upper[w] &= (first + 2 * w < vocab ? 0xFFFFu : 0) | (first + 2 * w + 1 < vocab ? 0xFFFF0000u : 0);
    }
  }

  // The largest threshold that `wanted` lanes' best reach; 0 where fewer lanes have a row.
  __device__ static uint32_t threshold(uint32_t best) {
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t bit = 0x8000; bit > 0; bit >>= 1)
      if (__popc(__ballot_sync(~0u, best >= (found | bit))) >= S.wanted) found |= bit;
    return found;
  }

  // One warp: slice `slice` of a step of a request. `pair` numbers requests and steps.
  __device__ void slice(int request, int step, int pair, int slice, uint32_t round, Mail& mail) const {
    const Params& walk = p.walk;
    const int lane = threadIdx.x % 32;
    const uint16_t* row = walk.base + request * walk.base_request_stride + step * walk.base_step_stride;
    const bool aligned = reinterpret_cast<uint64_t>(row) % 16 == 0;
    uint4 loaded[S.vectors];
#pragma unroll
    for (int i = 0; i < S.vectors; i++) loaded[i] = load(row, aligned, first_row(slice, i), walk.vocab);
    const Rule rule = Rule::of(walk, request, step, round);
    uint32_t upper[kWords], both = 0;
    float largest = 0.0f;
    unrolled<S.vectors>([&](auto i) {
      uint32_t words[4];
      rate(rule, loaded[i], first_row(slice, i), walk.vocab, words, largest);
#pragma unroll
      for (int w = 0; w < 4; w++) upper[4 * i + w] = words[w], both = __vmaxu2(both, words[w]);
    });
    const uint32_t best = max(both & 0xFFFFu, both >> 16), least = max(threshold(best), 1u);
    uint64_t hits = 0;
    if (best >= least) {
#pragma unroll
      for (int w = 0; w < kWords; w++) {
        const uint32_t reached = __vcmpgeu2(upper[w], least | least << 16);
        hits |= static_cast<uint64_t>((reached & 1u) | (reached >> 30 & 2u)) << (2 * w);
      }
    }
    const int64_t at = static_cast<int64_t>(pair) * S.slices + slice;
    uint64_t* offered = p.offered + at * S.local;
    int count = 0;
#pragma unroll 1
    for (uint32_t votes; (votes = __ballot_sync(~0u, hits != 0)) != 0; count += __popc(votes)) {
      const int place = count + __popc(votes & ((1u << lane) - 1));
      if (hits != 0 && place < S.local) {
        const int element = __ffsll(static_cast<int64_t>(hits)) - 1, own = first_row(slice, element / 8) + element % 8;
        offered[place] = static_cast<uint64_t>(rule.order(widen(__ldg(row + own)), rule.noise(own))) << 32 | own;
      }
      hits &= hits - 1;
    }
    if (lane >= count && lane < S.local) offered[lane] = 0;
    if constexpr (S.sampling) {
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
      if (lane == 0) p.largest[at] = largest;
    }
    // With more hits than places some stay behind, the best perhaps.
    const uint32_t outside = count > S.local ? __reduce_max_sync(~0u, best) : least - 1;
    if (lane == 0) p.passed_over[at] = outside < kLeastUpper ? 0 : S.sampling ? outside << 16 | 0xFFFFu : order_of_upper(outside);
    __syncwarp();
    if (lane == 0) red_add_release(&mail.offered[step], 1);
  }
};

}  // namespace wts
