// Which rows of a step may win: every warp looks through a slice of its base logits and offers the best few.
//
// Sectors of 16 rows are dealt to slices in turn, since token ids are sorted by frequency: of neighbours many are good at once, and what
// bounds a step is the best row that any slice keeps back. On 56 rounds of a trained drafter 256 candidates out of what 119 slices with 8
// wanted rows offer prove 99.4 % of steps, the 256 best rows of all 99.8 (computed). Rows are compared two at once, as bf16: greedy ones
// are that, of drawn ones the upper half of the score counts. The threshold of a slice is the `wanted`th largest of its lanes' best rows,
// so a few more rows than that reach it.
//
// A slice leaves one line of 16 words: up to 15 rows and what bounds the others. Few instructions matter twice: with a cold L2 a walk waits
// for its own, and for many requests the rows go by as fast as warps can look at them.
#pragma once
#include "certified/rule.cuh"

namespace wts {

constexpr int kSliceWords = 16, kOffers = kSliceWords - 1;
constexpr uint32_t kNothing = 0x7FFF7FFF;  // two NaN: they reach no threshold

// An offered row: the upper half of its order << 16, then which of its slice's rows it is. 0 is none.
__device__ inline uint32_t offer_key(uint32_t upper, int element, int lane) {
  return upper << 16 | static_cast<uint32_t>(element) << 5 | static_cast<uint32_t>(lane);
}

template <CertifiedShape S>
struct Offer {
  static constexpr int kSectorRows = 16;  // 32 bytes
  using Rule = RowRule<S.sampling>;
  using Slice = uint4[S.vectors][32];  // of every lane of a warp its vectors
  struct Smem {
    Slice slices[S.buffers];
    uint32_t offered[kSliceWords];
  };
  static_assert(S.wanted <= kOffers && S.vectors <= 8);

  const CertifiedParams& p;
  Smem& smem;

  // Of the eight rows in a vector of a lane.
  __device__ static int first_row(int slice, int lane, int vector) {
    return (slice + S.slices * (lane / 2 + 16 * vector)) * kSectorRows + lane % 2 * 8;
  }
  // Which of a lane's rows: bits of `element` are, from the lowest one, the vector's lowest, which of the four words, the vector's second,
  // which half of the word, the vector's highest. So `reaching` has them.
  __device__ static int vector_of(int element) { return (element & 1) | (element >> 3 & 1) << 1 | (element >> 5) << 2; }
  __device__ static int place_of(int element) { return (element >> 1 & 3) << 1 | (element >> 4 & 1); }  // in the vector
  __device__ static uint32_t row_of(int slice, uint32_t key) {
    const int element = key >> 5 & 63;
    return first_row(slice, key & 31, vector_of(element)) + place_of(element);
  }

  // Begin to bring this lane's base logits of a slice.
  __device__ void load(const uint16_t* row, int slice, Slice& rows) const {
    const int lane = fresh_thread() % 32;
    const bool aligned = reinterpret_cast<uint64_t>(row) % 16 == 0;
    constexpr int kFull = S.vectors - 1;      // vectors that a vocabulary of some size fills for every slice
    uint32_t others = (1u << S.vectors) - 1;  // vectors that it does not fill, or that lie at an odd address
    if (aligned && S.slices * kFull * 16 * kSectorRows <= p.walk.vocab) {
      const uint16_t* source = row + first_row(slice, lane, 0);
#pragma unroll
      for (int i = 0; i < kFull; i++) copy_async_16(&rows[i][lane], source + i * (first_row(0, 0, 1) - first_row(0, 0, 0)));
      others = 1u << kFull;
    }
#pragma unroll 1
    for (; others; others &= others - 1) {
      const int i = __ffs(others) - 1, first = first_row(slice, lane, i);
      if (first >= p.walk.vocab) {
        rows[i][lane] = make_uint4(kNothing, kNothing, kNothing, kNothing);
      } else if (aligned && first + 8 <= p.walk.vocab) {
        copy_async_16(&rows[i][lane], row + first);
      } else {
        uint16_t* target = reinterpret_cast<uint16_t*>(&rows[i][lane]);
#pragma unroll 1
        for (int e = 0; e < 8; e++) target[e] = first + e < p.walk.vocab ? row[first + e] : static_cast<uint16_t>(kNothing);
      }
    }
    __syncwarp();
  }

  // One warp: the slice in `rows`, whose step of a request is number `pair`.
  __device__ void slice(const Rule& rule, int pair, int slice, uint32_t round, Slice& rows) const {
    const int lane = threadIdx.x % 32;
    const float largest = S.sampling && !rule.greedy ? draw(rule, slice, rows) : 0.0f;
    const uint32_t best = best_of(rows), upper = upper_order(best), rank = rank_of(best);
    const uint32_t lanes = __popc(__ballot_sync(~0u, upper != 0));  // that have a row
    uint32_t least, all;
#pragma unroll 1
    for (uint32_t wanted = S.wanted;; wanted /= 2) {  // one slice in fifty has more rows than places, and then offers half as many
      const uint32_t last = __reduce_min_sync(~0u, upper != 0 && rank < wanted ? upper : ~0u);
      least = lanes >= wanted ? last : kLeastUpper;  // what every row reaches, where fewer lanes have one
      all = collect(rows, least);
      if (all <= kOffers || wanted == 1) break;
      __syncwarp();  // other lanes' rows come to these places now
    }
    __syncwarp();
    // Of too many equal ones some stay behind. The largest |base logit| is a bf16.
    const uint32_t outside = all > kOffers ? least : least == kLeastUpper ? 0 : least - 1;
    const uint32_t bound = (S.sampling ? __float_as_uint(largest) & 0xFFFF0000u : 0) | outside;
    const int place = fresh_thread() % 32;
    const uint32_t word = place == kOffers ? bound : place < all ? smem.offered[place % kSliceWords] : 0;
    uint64_t* offered = p.offered + (static_cast<int64_t>(pair) * S.slices + slice) * kSliceWords;
    if (place < kSliceWords) store_relaxed(offered + place, tagged(round, word));
    __syncwarp();
  }

 private:
  // In place of base logits the upper halves of what drawn scores are at most. The largest |base logit| of the warp that is finite.
  __device__ float draw(const Rule& rule, int slice, Slice& rows) const {
    const int lane = fresh_thread() % 32;
    float largest = 0.0f;
#pragma unroll 1
    for (int i = 0; i < S.vectors; i++) {
      const int first = first_row(slice, lane, i);
      uint4 pairs = rows[i][lane];
      uint32_t* words = reinterpret_cast<uint32_t*>(&pairs);
      const Words noise[2] = {rule.words(first), rule.words(first + 4)};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        uint32_t bits[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float logit = widen(static_cast<uint16_t>(words[w] >> (16 * e)));
          const bool there = first + 2 * w + e < p.walk.vocab;
          if (there && fabsf(logit) < -kMinusInfinity) largest = fmaxf(largest, fabsf(logit));
          const float score = fmaxf(__fmaf_ru(logit, rule.inverse, gumbel_bound(noise[w / 2].w[w % 2 * 2 + e])), kMinusInfinity);
          bits[e] = there ? __float_as_uint(score) : kNothing;
        }
        words[w] = __byte_perm(bits[0], bits[1], 0x7632);
      }
      rows[i][lane] = pairs;
    }
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  }

  // This lane's best row; a NaN where there is none.
  __device__ static uint32_t best_of(const Slice& rows) {
    uint32_t best = kNothing;
#pragma unroll
    for (int i = 0; i < S.vectors; i++) {
      const uint4 pairs = rows[i][threadIdx.x % 32];
      best = max_bf16x2(best, max_bf16x2(max_bf16x2(pairs.x, pairs.y), max_bf16x2(pairs.z, pairs.w)));
    }
    return max_bf16x2(best, best >> 16) & 0xFFFFu;
  }

  // How many lanes' best exceed this one's. 16 shuffles of two lanes' that wait for nothing take less than eight maxima one after the
  // other.
  __device__ static uint32_t rank_of(uint32_t best) {
    const uint32_t both = best | best << 16, of_two = best | __shfl_xor_sync(~0u, best, 16) << 16;
    uint32_t sum = 0;  // minus -1 in 16 bits for each: below lower lanes, above upper ones less lower ones
#pragma unroll
    for (int lane = 0; lane < 16; lane++) sum -= exceed_bf16x2(__shfl_sync(~0u, of_two, lane), both);
    return (2 * sum + (sum >> 16)) & 0xFFFFu;
  }

  // One warp: offered rows, which are those that reach `least`. How many there are; those beyond kOffers have no place.
  __device__ uint32_t collect(const Slice& rows, uint32_t least) const {
    const int lane = threadIdx.x % 32;
    uint32_t hits[2], all = 0;
    reaching(rows, bf16_of_upper(least), hits);
#pragma unroll 1
    while (true) {
      const bool lower = hits[0] != 0, mine = lower || hits[1] != 0;
      const uint32_t votes = __ballot_sync(~0u, mine), place = all + __popc(votes & ((1u << lane) - 1));
      if (votes == 0) return all;
      if (mine && place < kOffers) {
        const int element = lower ? __ffs(hits[0]) - 1 : __ffs(hits[1]) + 31;
        const uint32_t row = reinterpret_cast<const uint16_t*>(&rows[vector_of(element)][lane])[place_of(element)];
        smem.offered[place] = offer_key(upper_order(row), element, lane);
      }
      hits[1] &= lower ? ~0u : hits[1] - 1;
      hits[0] &= hits[0] - 1;
      all += __popc(votes);
    }
  }

  // Which of this lane's rows reach `least`: bit `element` of both together.
  __device__ static void reaching(const Slice& rows, uint32_t least, uint32_t (&hits)[2]) {
    const uint32_t both = least | least << 16;
    hits[0] = hits[1] = 0;
#pragma unroll
    for (int i = 0; i < S.vectors; i++) {
      const uint4 pairs = rows[i][threadIdx.x % 32];
      const uint32_t own = (reach_bf16x2(pairs.x, both) & 0x00010001u) | (reach_bf16x2(pairs.y, both) & 0x00040004u) |
                           (reach_bf16x2(pairs.z, both) & 0x00100010u) | (reach_bf16x2(pairs.w, both) & 0x00400040u);
      hits[i / 4] |= own << (i % 2 + i % 4 / 2 * 8);
    }
  }
};

}  // namespace wts
