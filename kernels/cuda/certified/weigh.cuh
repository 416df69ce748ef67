// What follows each of some previous tokens in a step: the best of the step's candidates and of the token's list, and whether that is
// proved.
//
// Products by tensor cores: previous tokens are rows of A, candidates columns of B. A warp keeps the W2 rows of its candidates in registers
// for all previous tokens of the CTA. A lane reads its row in 16-byte chunks t, t + 4, ...; both operands do, so a sum only has its
// terms in another order. bf16 products are exact in fp32.
#pragma once
#include "certified/lists.cuh"

namespace wts {

template <CertifiedShape S>
struct Weigh {
  using Rule = RowRule<S.sampling>;
  using Set = typename Pick<S>::Set;
  static constexpr int kWarps = S.warps, kThreads = 32 * kWarps;
  static constexpr int kTiles = S.candidates / 16;  // of 16 candidates, one a warp
  static constexpr int kShares = kWarps / kTiles, kRows = S.block / 16;
  static constexpr int kHalves = kShares < kRows ? kShares : kRows;  // warps that share a tile, each with its part of the previous tokens
  static constexpr int kRowTiles = kRows / kHalves;                  // of 16 previous tokens, of a warp
  static constexpr int kMultiplying = kTiles * kHalves;              // warps
  static constexpr int kIdle = kMultiplying < kWarps ? kMultiplying : 0;  // the first warp that brings what is not W2: others have to do
  static constexpr int kLatentBytes = 2 * kRank256 + 64;                  // 36 chunks apart, so that eight lanes meet eight groups of banks
  static_assert(kHalves > 0 && kRowTiles * kHalves * 16 == S.block && kTiles <= 32);

  struct Smem {
    alignas(16) uint8_t latents[S.block * kLatentBytes];
    alignas(16) int32_t listed[S.block][S.list];
    alignas(16) uint16_t biases[S.block][S.list];
    float bound[S.block];            // of what lists leave out
    uint64_t best[kTiles][S.block];  // of every tile
    float base[S.candidates];
    float noise[S.candidates];
    uint32_t previous[S.block];  // kNoRow where there is none
    bool stopped[2];
  };

  const CertifiedParams& p;
  const Rule& rule;  // of the step, and its base logits: in shared memory, for registers are short
  const uint16_t* const& base;
  const Set& set;
  Smem& smem;
  uint4 weights[2][8];

  // All threads: what follows each of the first `count` previous tokens in smem.previous, told once by `done(place, key, proved)`. The
  // first block gathers the candidates' rows too. Whether all was done: not where `stop()`, which one thread asks, says so. Begins after a
  // barrier; the caller's must follow.
  template <class Stop, class Done>
  __device__ bool block(int count, bool gathers, Stop&& stop, Done&& done) {
    if (gathers) gather();
    bring(count);
    if (gathers) load_base();
    copy_async_wait();
    if (fresh_thread() == kThreads - 1) smem.stopped[0] = stop();
    __syncthreads();
    phase<S>(p, Phase::kGathered);
    if (smem.stopped[0]) return false;
    auto listed = ask(fresh_thread() / 32, count);
    products(count);
    if (fresh_thread() == kThreads - 1) smem.stopped[1] = stop();
    __syncthreads();
    if (smem.stopped[1]) return false;
    phase<S>(p, Phase::kMultiplied);
#pragma unroll 1
    for (int i = fresh_thread() / 32; i < count; i += kWarps) {
      const int lane = fresh_thread() % 32;
      const uint64_t best = list(i).better(listed, over_warp(lane < kTiles ? smem.best[lane][i] : 0));
      listed = ask(i + kWarps, count);
      if (best != 0 && certified_place(best) == 0) prefetch_row(certified_row(best), lane);
      if (lane == 0) done(i, best, list(i).proves(best));
    }
    return true;
  }

 private:
  // All threads: W2 rows of the candidates.
  __device__ void gather() {
    const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2 && warp < kMultiplying; half++) {
      const uint32_t row = set.row[warp % kTiles * 16 + half * 8 + g];
      const uint4* source = p.walk.weights + static_cast<int64_t>(row == kNoRow ? 0 : row) * (kRank256 / 8) + t;
#pragma unroll
      for (int i = 0; i < 8; i++) weights[half][i] = __ldg(source + 4 * i);
    }
  }

  // All threads: base logits of the candidates.
  __device__ void load_base() {
    if (fresh_thread() < 32 * kIdle) return;
#pragma unroll 1
    for (int place = fresh_thread() - 32 * kIdle; place < S.candidates; place += kThreads - 32 * kIdle) {
      const uint32_t row = set.row[place];
      if constexpr (S.sampling) {
        smem.base[place] = row != kNoRow ? widen(base[row]) : kMinusInfinity;
        smem.noise[place] = row != kNoRow ? rule.noise(row) : 0.0f;
      } else {
        smem.base[place] = row != kNoRow ? widen(bf16_of_upper(set.upper[place])) : kMinusInfinity;
      }
    }
  }

  // All threads: begin to bring latents and lists of the previous tokens. Of each a whole number of warps, so that lanes agree.
  __device__ void bring(int count) const {
    constexpr int kOfBiases = S.list / 8;
    if (fresh_thread() < 32 * kIdle) return;
    each_chunk<kRank256 / 8>(count, [&](int of, int chunk, int64_t token) {
      copy_async_16(smem.latents + of * kLatentBytes + chunk * 16, p.walk.latents + (token * (kRank256 / 8) + chunk) * 16);
    });
    each_chunk<S.list / 4>(count, [&](int of, int chunk, int64_t token) {
      copy_async_16(smem.listed[of] + chunk * 4, p.list_rows + token * S.list + chunk * 4);
    });
    each_chunk<kOfBiases>(count, [&](int of, int chunk, int64_t token) {
      copy_async_16(smem.biases[of] + chunk * 8, p.list_biases + token * S.list + chunk * 8);
    });
    each_chunk<1>(count, [&](int of, int, int64_t token) { copy_async_4(smem.bound + of, p.list_bound + token); });
  }

  template <int kChunks, class Body>
  __device__ void each_chunk(int count, Body&& body) const {
#pragma unroll 1
    for (int first = fresh_thread() / 32 * 32 - 32 * kIdle; first < count * kChunks; first += kThreads - 32 * kIdle) {
      const int i = first + fresh_thread() % 32, of = i / kChunks;
      if (of < count) body(of, i % kChunks, smem.previous[of] == kNoRow ? 0 : smem.previous[of]);
    }
  }

  __device__ BiasList<S> list(int i) const { return {rule, base, set, smem.listed[i], smem.biases[i], smem.bound[i]}; }

  // One warp: of previous token `i`, if there is one. While candidates are multiplied they are on their way.
  __device__ typename BiasList<S>::Some ask(int i, int count) const {
    if (i < count) return list(i).ask();
    return {};
  }

  // One warp: what weighing a token takes, for one that no candidate is and that will be weighed next if at all.
  __device__ void prefetch_row(uint32_t row, int lane) const {
    constexpr int kLatent = 2 * kRank256 / 128, kRowsOf = 4 * S.list / 128, kBiasesOf = 2 * S.list / 128;
    const int64_t token = row;
    const auto line = [&](const void* start, int64_t bytes, int n) {
      prefetch_l2(static_cast<const uint8_t*>(start) + token * bytes + n * 128);
    };
    if (lane < kLatent)
      line(p.walk.latents, 2 * kRank256, lane);
    else if (lane < kLatent + kRowsOf)
      line(p.list_rows, 4 * S.list, lane - kLatent);
    else if (lane < kLatent + kRowsOf + max(1, kBiasesOf))
      line(p.list_biases, 2 * S.list, lane - kLatent - kRowsOf);
  }

  __device__ void products(int count) {
    const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int tile = warp % kTiles, first = warp / kTiles * kRowTiles;
    if (warp >= kMultiplying) return;
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
