// Which rows of a step may win: every warp looks through a slice of its base logits and offers the best few.
//
// Lines of 64 rows are dealt to slices in turn, since token ids are sorted by frequency: of neighbours many would be good at once.
#pragma once
#include "certified/rule.cuh"
#include "common/unroll.cuh"

namespace wts {

template <CertifiedShape S>
struct Offer {
  static constexpr int kValues = 8 * S.vectors, kLineRows = 64;
  using Rule = RowRule<S.sampling>;

  const CertifiedParams& p;

  __device__ static int first_row(int slice, int vector) {
    const int lane = threadIdx.x % 32;
    return (slice + S.slices * (lane / 8 + 4 * vector)) * kLineRows + lane % 8 * 8;
  }

  // Eight base logits of one lane; -inf past the vocabulary.
  __device__ static uint4 load(const uint16_t* row, bool vectors, int first, int vocab) {
    if (vectors && first + 8 <= vocab) return __ldg(reinterpret_cast<const uint4*>(row + first));
    uint16_t bits[8];
#pragma unroll
    for (int e = 0; e < 8; e++) bits[e] = first + e < vocab ? row[first + e] : 0xFF80;
    const auto pair = [&](int e) { return static_cast<uint32_t>(bits[e]) | static_cast<uint32_t>(bits[e + 1]) << 16; };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
  }

  // One warp: slice `slice` of a step of a request. `pair` numbers requests and steps.
  __device__ void slice(int request, int step, int pair, int slice, uint32_t round, Mail& mail) const {
    const Params& walk = p.walk;
    const int lane = threadIdx.x % 32;
    const uint16_t* row = walk.base + request * walk.base_request_stride + step * walk.base_step_stride;
    const bool vectors = reinterpret_cast<uint64_t>(row) % 16 == 0;
    uint4 loaded[S.vectors];
#pragma unroll
    for (int i = 0; i < S.vectors; i++) loaded[i] = load(row, vectors, first_row(slice, i), walk.vocab);
    const Rule rule = Rule::of(walk, request, step, round);
    uint32_t order[kValues], best_of[S.vectors];
    float largest = 0.0f;
    unrolled<S.vectors>([&](auto i) {
      const uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
      Words noise[2] = {};
      if (S.sampling && !rule.greedy) {
        noise[0] = rule.words(first_row(slice, i));
        noise[1] = rule.words(first_row(slice, i) + 4);
      }
      best_of[i] = 0;
      unrolled<8>([&](auto e) {
        const float logit = widen(static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16)));
        if constexpr (S.sampling) {
          if (fabsf(logit) < -kMinusInfinity) largest = fmaxf(largest, fabsf(logit));
        }
        const float drawn = S.sampling && !rule.greedy ? gumbel(noise[e / 4].w[e % 4]) : 0.0f;
        order[8 * i + e] = first_row(slice, i) + e < walk.vocab ? rule.order(logit, drawn) : 0;  // 0: no row
        best_of[i] = max(best_of[i], order[8 * i + e]);
      });
    });
    uint64_t mine = 0;
    uint32_t left = 0;
#pragma unroll 1
    for (int n = 0; n <= S.local; n++) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < S.vectors; i++) best = max(best, best_of[i]);
      left = __reduce_max_sync(~0u, best);
      if (n == S.local) break;
      const int owner = __ffs(__ballot_sync(~0u, best == left)) - 1;
      uint32_t taken = 0;
      if (lane == owner) {
        bool done = false;
        unrolled<S.vectors>([&](auto i) {
          if (done || best_of[i] != left) return;
          done = true;
          uint32_t second = 0;
          bool found = false;
          unrolled<8>([&](auto e) {
            const bool here = !found && order[8 * i + e] == left;
            if (here) taken = first_row(slice, i) + e, order[8 * i + e] = 0;
            found |= here;
            second = max(second, order[8 * i + e]);
          });
          best_of[i] = second;
        });
      }
      taken = __shfl_sync(~0u, taken, owner);
      if (lane == n) mine = static_cast<uint64_t>(left) << 32 | taken;
    }
    const int64_t at = static_cast<int64_t>(pair) * S.slices + slice;
    if (lane < S.local) p.offered[at * S.local + lane] = mine;
    if constexpr (S.sampling) {
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
      if (lane == 0) p.largest[at] = largest;
    }
    if (lane == 0) p.passed_over[at] = left;
    __syncwarp();
    if (lane == 0) red_add_release(&mail.offered[step], 1);
  }
};

}  // namespace wts
