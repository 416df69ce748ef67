// What follows each of some previous tokens in a step: the best of the step's candidates and of the token's list, and whether that is
// proved.
//
// Products by tensor cores: previous tokens are rows of A, candidates columns of B. A warp keeps the W2 rows of its candidates in registers
// for all previous tokens of the CTA. A lane reads its row in 16-byte chunks t, t + 4, ...; both operands do, so a sum only has its
// terms in another order. bf16 products are exact in fp32.
#pragma once
#include "certified/pick.cuh"

namespace wts {

template <CertifiedShape S>
struct Weigh {
  using Rule = RowRule<S.sampling>;
  using Set = typename Pick<S>::Set;
  static constexpr int kThreads = 32 * S.warps;
  static constexpr int kTiles = S.candidates / 16;          // of 16 candidates, one a warp
  static constexpr int kHalves = S.warps / kTiles;          // warps that share a tile, each with its part of the previous tokens
  static constexpr int kRowTiles = S.block / 16 / kHalves;  // of 16 previous tokens, of a warp
  static constexpr int kLatentBytes = 2 * kRank256 + 64;    // 36 chunks apart, so that eight lanes meet eight groups of banks
  static constexpr int kListLoads = S.block * S.list / kThreads;
  static_assert(kTiles * kHalves == S.warps && kRowTiles * kHalves * 16 == S.block);
  static_assert(S.list % 32 == 0 && kListLoads * kThreads == S.block * S.list);

  struct Smem {
    alignas(16) uint8_t latents[S.block * kLatentBytes];
    uint64_t best[kTiles + 1][S.block];  // of every tile, and of the list
    float base[S.candidates];
    float noise[S.candidates];
    uint32_t previous[S.block];
    float bound[S.block];  // of what their lists leave out
  };

  const CertifiedParams& p;
  const Rule rule;
  const uint16_t* base;  // of this step
  const Set& set;
  Smem& smem;
  uint4 weights[2][8];

  // All threads: gather W2 rows of the candidates. A barrier must follow before `block`.
  __device__ void gather() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t place = warp % kTiles * 16 + half * 8 + g;
      const uint32_t row = place < set.count ? set.row[place] : 0;
      const uint4* source = p.walk.weights + static_cast<int64_t>(row) * (kRank256 / 8) + t;
#pragma unroll
      for (int i = 0; i < 8; i++) weights[half][i] = __ldg(source + 4 * i);
    }
#pragma unroll 1
    for (int place = threadIdx.x; place < S.candidates; place += kThreads) {
      const bool there = place < set.count;
      if constexpr (S.sampling) {
        smem.base[place] = there ? widen(base[set.row[place]]) : kMinusInfinity;
        smem.noise[place] = there ? rule.noise(set.row[place]) : 0.0f;
      } else {
        smem.base[place] = there ? unordered(set.order[place]) : kMinusInfinity;
      }
    }
  }

  // All threads: `count` previous tokens in smem.previous (the others anything valid). Then smem.best[kTiles] holds the best keys. Begins
  // after a barrier and ends with one.
  __device__ void block(int count) {
    const int thread = fresh_thread();
    if (thread < count) smem.bound[thread] = __ldg(p.list_bound + smem.previous[thread]);  // asked for early: it comes from memory
#pragma unroll 1
    for (int i = thread; i < S.block * 32; i += kThreads) {
      if (i / 32 >= count) break;
      copy_async_16(smem.latents + i / 32 * kLatentBytes + i % 32 * 16,
                    p.walk.latents + (static_cast<int64_t>(smem.previous[i / 32]) * 32 + i % 32) * 16);
    }
    lists(count);
    copy_async_wait();
    __syncthreads();
    phase<S>(p, Phase::kGathered);
    products(count);
    __syncthreads();
    phase<S>(p, Phase::kMultiplied);
#pragma unroll 1
    for (int i = thread / 32; i < count; i += S.warps) {
      uint64_t best = thread % 32 <= kTiles ? smem.best[thread % 32][i] : 0;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) best = max(best, __shfl_xor_sync(~0u, best, distance));
      if (thread % 32 == 0) smem.best[kTiles][i] = best;
    }
    __syncthreads();
  }

  // Whether the best key of previous token `i` is proved to be the step's.
  __device__ bool proved(int i) const {
    constexpr uint32_t kPlusInf = 0xFF800000u;  // of more than it no number has the order
    const float outside = set.outside ? unordered(min(set.outside, kPlusInf)) : kMinusInfinity;
    const uint64_t best = smem.best[kTiles][i];
    return best != 0 && certified_order(best) > rule.bound(outside, smem.bound[i], S.sampling ? set.largest : 0.0f);
  }

 private:
  __device__ void lists(int count) {
    constexpr int kAtOnce = kListLoads < 4 ? kListLoads : 4;
#pragma unroll 1
    for (int first = 0; first < kListLoads; first += kAtOnce) list_entries<kAtOnce>(count, first);
  }

  template <int kAtOnce>
  __device__ void list_entries(int count, int first) {
    const int lane = threadIdx.x % 32;
    int32_t row[kAtOnce];
    uint16_t bias[kAtOnce], logit[kAtOnce];
    const auto entry = [&](int j) { return static_cast<int>(threadIdx.x) + (first + j) * kThreads; };
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int previous = entry(j) / S.list;
      const int64_t at = static_cast<int64_t>(smem.previous[previous < count ? previous : 0]) * S.list + entry(j) % S.list;
      row[j] = __ldg(p.list_rows + at);
      bias[j] = __ldg(p.list_biases + at);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) logit[j] = __ldg(base + row[j]);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      float low = __fadd_rn(widen(logit[j]), widen(bias[j])), high = 0.0f;  // the bias is rounded already
      round_bf16(low, high);
      const uint32_t order = rule.order(low, rule.noise(row[j]));
      const uint32_t best = __reduce_max_sync(~0u, order);
      const uint32_t lowest = ~__reduce_max_sync(~0u, order == best ? ~static_cast<uint32_t>(row[j]) : 0u);
      constexpr int kRounds = S.list / 32;
      const int i = entry(j) / 32;  // 32 entries of one list
      if (lane == 0 && i / kRounds < count) list_best(i / kRounds, i % kRounds) = certified_key(best, lowest, 0);
    }
  }

  // Parts of a list's best wait where tiles' will be: products come behind a barrier.
  __device__ uint64_t& list_best(int previous, int part) const { return smem.best[part][previous]; }

  __device__ void products(int count) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int tile = warp % kTiles, first = warp / kTiles * kRowTiles;
    if (warp == 0) {
#pragma unroll 1
      for (int i = lane; i < count; i += 32) {
        uint64_t best = 0;
#pragma unroll
        for (int part = 0; part < S.list / 32; part++) best = max(best, list_best(i, part));
        smem.best[kTiles][i] = best;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int r = first; r < first + kRowTiles; r++) {
      if (r * 16 >= count) break;
      float sums[2][4] = {};
      const uint4* low = reinterpret_cast<const uint4*>(smem.latents + (r * 16 + g) * kLatentBytes) + t;
      const uint4* high = reinterpret_cast<const uint4*>(smem.latents + (r * 16 + g + 8) * kLatentBytes) + t;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint4 a = low[4 * i], b = high[4 * i];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          mma_bf16(sums[half], make_uint4(a.x, b.x, a.y, b.y), weights[half][i].x, weights[half][i].y);
          mma_bf16(sums[half], make_uint4(a.z, b.z, a.w, b.w), weights[half][i].z, weights[half][i].w);
        }
        asm volatile("" ::: "memory");  // no load ahead of its turn: there are no registers for it
      }
#pragma unroll
      for (int upper = 0; upper < 2; upper++) {  // previous token r * 16 + g, then + 8
        uint64_t best = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float s[2] = {sums[half][2 * upper], sums[half][2 * upper + 1]};
          const int place = tile * 16 + half * 8 + 2 * t;
          Rule::corrected(s[0], s[1], smem.base[place], smem.base[place + 1]);
#pragma unroll
          for (int c = 0; c < 2; c++) {
            if (place + c >= set.count) continue;
            const float noise = S.sampling ? smem.noise[place + c] : 0.0f;
            best = max(best, certified_key(rule.order(s[c], noise), set.row[place + c], place + c + 1));
          }
        }
        best = max(best, __shfl_xor_sync(~0u, best, 1));
        best = max(best, __shfl_xor_sync(~0u, best, 2));
        if (t == 0) smem.best[tile][r * 16 + 8 * upper + g] = best;
      }
    }
  }
};

}  // namespace wts
