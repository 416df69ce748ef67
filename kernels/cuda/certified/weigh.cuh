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
  static constexpr int kTiles = S.candidates / 16;  // of 16 candidates, one a warp
  static constexpr int kShares = S.warps / kTiles, kRows = S.block / 16;
  static constexpr int kHalves = kShares < kRows ? kShares : kRows;  // warps that share a tile, each with its part of the previous tokens
  static constexpr int kRowTiles = kRows / kHalves;                  // of 16 previous tokens, of a warp
  static constexpr int kLatentBytes = 2 * kRank256 + 64;             // 36 chunks apart, so that eight lanes meet eight groups of banks
  static constexpr int kListParts = S.list / 32, kListLoads = S.block * S.list / kThreads, kAtOnce = kListLoads < 4 ? kListLoads : 4;
  static_assert(kHalves > 0 && kRowTiles * kHalves * 16 == S.block);
  static_assert(S.list % 32 == 0 && kListLoads * kThreads == S.block * S.list && kListLoads % kAtOnce == 0);
  static_assert(kTiles + kListParts <= 32, "a lane each");

  struct Smem {
    alignas(16) uint8_t latents[S.block * kLatentBytes];
    uint64_t best[kTiles + kListParts][S.block];  // of every tile, and of every 32 rows of a list
    float base[S.candidates];
    float noise[S.candidates];
    uint32_t previous[S.block];  // kNoRow where there is none
    float bound[S.block];        // of what their lists leave out
  };

  const CertifiedParams& p;
  const Rule& rule;  // of the step, and its base logits: in shared memory, for registers are short
  const uint16_t* const& base;
  const Set& set;
  Smem& smem;
  uint4 weights[2][8];

  // All threads: what follows each of the first `count` previous tokens in smem.previous, told once by `done(place, key, proved)`. The
  // first block gathers the candidates' rows too. Begins after a barrier; the caller's must follow.
  template <class Done>
  __device__ void block(int count, bool gathers, Done&& done) {
    const int thread = fresh_thread();
    Listed listed = ask(count, 0);  // first, for base logits wait for rows
    if (thread < count) smem.bound[thread] = __ldg(p.list_bound + previous(thread));
#pragma unroll 1
    for (int i = thread; i < count * 32; i += kThreads)  // whole warps
      copy_async_16(smem.latents + i / 32 * kLatentBytes + i % 32 * 16,
                    p.walk.latents + (static_cast<int64_t>(previous(i / 32)) * 32 + i % 32) * 16);
    if (gathers) gather();
    judge(listed, count, 0);
#pragma unroll 1
    for (int first = kAtOnce; first < kListLoads; first += kAtOnce) judge(ask(count, first), count, first);
    phase<S>(p, Phase::kListed);
    copy_async_wait();
    __syncthreads();
    phase<S>(p, Phase::kGathered);
    products(count);
    __syncthreads();
    phase<S>(p, Phase::kMultiplied);
#pragma unroll 1
    for (int i = thread / 32; i < count; i += S.warps) {
      const uint64_t own = thread % 32 < kTiles + kListParts ? smem.best[thread % 32][i] : 0;
      const uint64_t best = over_warp(own);
      if (thread % 32 == 0) done(i, best, proved(i, best));
    }
  }

 private:
  // All threads: gather W2 rows of the candidates.
  __device__ void gather() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool multiplies = warp < kTiles * kHalves;
#pragma unroll
    for (int half = 0; half < 2 && multiplies; half++) {
      const uint32_t row = set.row[warp % kTiles * 16 + half * 8 + g];
      const uint4* source = p.walk.weights + static_cast<int64_t>(row == kNoRow ? 0 : row) * (kRank256 / 8) + t;
#pragma unroll
      for (int i = 0; i < 8; i++) weights[half][i] = __ldg(source + 4 * i);
    }
#pragma unroll 1
    for (int place = threadIdx.x; place < S.candidates; place += kThreads) {
      const uint32_t row = set.row[place];
      if constexpr (S.sampling) {
        smem.base[place] = row != kNoRow ? widen(base[row]) : kMinusInfinity;
        smem.noise[place] = row != kNoRow ? rule.noise(row) : 0.0f;
      } else {
        smem.base[place] = row != kNoRow ? widen(bf16_of_upper(set.upper[place])) : kMinusInfinity;
      }
    }
  }

  // Row 0 stands for none.
  __device__ uint32_t previous(int i) const { return smem.previous[i] == kNoRow ? 0 : smem.previous[i]; }

  // The largest of a warp.
  __device__ static uint64_t over_warp(uint64_t own) {
    const uint32_t upper = own >> 32, most = __reduce_max_sync(~0u, upper);
    return static_cast<uint64_t>(most) << 32 | __reduce_max_sync(~0u, upper == most ? static_cast<uint32_t>(own) : 0u);
  }

  // Whether this key of previous token `i` is proved to be the step's.
  __device__ bool proved(int i, uint64_t best) const {
    const float largest = S.sampling ? __uint_as_float(set.largest) : 0.0f;
    return best != 0 && certified_order(best) > rule.bound(rule.most_of_upper(set.outside), smem.bound[i], largest);
  }

  // Entries of lists that a thread has under way.
  struct Listed {
    int32_t row[kAtOnce];
    uint16_t bias[kAtOnce];
  };
  __device__ static int entry(int thread, int first, int j) { return thread + (first + j) * kThreads; }

  __device__ Listed ask(int count, int first) const {
    const int thread = fresh_thread();
    Listed listed{};
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (entry(thread, first, j) / S.list >= count) break;
      const int64_t at = static_cast<int64_t>(previous(entry(thread, first, j) / S.list)) * S.list + entry(thread, first, j) % S.list;
      listed.row[j] = __ldg(p.list_rows + at);
      listed.bias[j] = __ldg(p.list_biases + at);
    }
    return listed;
  }

  __device__ void judge(const Listed& listed, int count, int first) const {
    const int thread = fresh_thread();
    uint16_t logit[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) logit[j] = __ldg(base + listed.row[j]);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (entry(thread, first, j) / S.list >= count) break;                        // whole warps
      float low = __fadd_rn(widen(logit[j]), widen(listed.bias[j])), high = 0.0f;  // the bias is rounded already
      round_bf16(low, high);
      const uint32_t order = rule.order(low, rule.noise(listed.row[j]));
      const uint32_t best = __reduce_max_sync(~0u, order);
      const uint32_t lowest = ~__reduce_max_sync(~0u, order == best ? ~static_cast<uint32_t>(listed.row[j]) : 0u);
      const int part = entry(thread, first, j) / 32;  // 32 entries of one list
      if (threadIdx.x % 32 == 0) smem.best[kTiles + part % kListParts][part / kListParts] = certified_key(best, lowest, 0);
    }
  }

  __device__ void products(int count) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int tile = warp % kTiles, first = warp / kTiles * kRowTiles;
    if (warp >= kTiles * kHalves) return;
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
            const uint32_t row = set.row[place + c];
            if (row == kNoRow) continue;
            const float noise = S.sampling ? smem.noise[place + c] : 0.0f;
            best = max(best, certified_key(rule.order(s[c], noise), row, place + c + 1));
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
