// The candidates of a step: of all rows that its slices offer, those above a threshold that leaves as many as there is room for.
//
// Every CTA that needs the candidates of a step picks them again from what was offered, in the same order, so that places agree: it costs
// less than another exchange. The threshold lies between two values of the upper 16 bits of an order, which are those of a bf16.
#pragma once
#include "certified/rule.cuh"
#include "common/unroll.cuh"

namespace wts {

template <CertifiedShape S>
struct Pick {
  static constexpr int kOffered = S.slices * S.local, kEach = (kOffered + kCertifiedThreads - 1) / kCertifiedThreads;
  static constexpr int kBins =
      kCertifiedThreads;  // below the best: 512 values of a bf16 are four binades. What lies lower is no candidate.
  static constexpr int kWarps = kCertifiedWarps;
  static_assert(S.candidates < 1 << 9, "counts of two steps share a word");

  struct Set {
    uint32_t order[S.candidates];
    uint32_t row[S.candidates];
    uint32_t count;
    uint32_t outside;  // the largest order of all other rows
    float largest;     // |base logit|; sampling only
  };

  struct Scratch {
    uint32_t bins[2][kBins];
    uint32_t best[2][kWarps];
    uint32_t before[2][kEach * kWarps];
    int cut[2];
  };

  // All threads; ends with a barrier. The candidates of two steps at once, since both wait for the same barriers.
  __device__ static void run(const CertifiedParams& p, int pair_here, int pair_before, Set& here, Set& before_here, Scratch& scratch) {
    constexpr int kSets = 2;
    const int pairs[kSets] = {pair_here, pair_before};
    Set* const sets[kSets] = {&here, &before_here};
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    uint64_t key[kSets][kEach];
    uint32_t passed[kSets];
    float largest[kSets];
    unrolled<kSets>([&](auto s) {
      const uint64_t* offered = p.offered + static_cast<int64_t>(pairs[s]) * kOffered;
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const int i = thread + j * kCertifiedThreads;
        key[s][j] = i < kOffered ? __ldcg(offered + i) : 0;
      }
      const int64_t at = static_cast<int64_t>(pairs[s]) * S.slices;
      passed[s] = 0, largest[s] = 0.0f;
      for (int i = thread; i < S.slices; i += kCertifiedThreads) {
        passed[s] = max(passed[s], __ldcg(p.passed_over + at + i));
        if constexpr (S.sampling) largest[s] = fmaxf(largest[s], __ldcg(p.largest + at + i));
      }
      scratch.bins[s][thread] = 0;
    });
    unrolled<kSets>([&](auto s) {
      uint32_t best = 0;
#pragma unroll
      for (int j = 0; j < kEach; j++) best = max(best, static_cast<uint32_t>(key[s][j] >> 32));
      best = __reduce_max_sync(~0u, best);
      if (lane == 0) scratch.best[s][warp] = best;
      if (thread == 0) sets[s]->outside = 0, sets[s]->largest = 0.0f;
    });
    __syncthreads();
    uint32_t bin[kSets][kEach];
    unrolled<kSets>([&](auto s) {
      const uint32_t best = __reduce_max_sync(~0u, scratch.best[s][lane % kWarps]) >> 16;
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const uint32_t order = static_cast<uint32_t>(key[s][j] >> 32);
        bin[s][j] = order == 0 ? kBins : min(best - (order >> 16), static_cast<uint32_t>(kBins));
        if (bin[s][j] < kBins) atomicAdd(&scratch.bins[s][bin[s][j]], 1);
      }
    });
    __syncthreads();
    if (warp < kSets) cut(scratch, warp);
    __syncthreads();
    unrolled<kSets>([&](auto s) {
      const int last = scratch.cut[s];
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const bool taken = static_cast<int>(bin[s][j]) <= last;
        if (!taken) passed[s] = max(passed[s], static_cast<uint32_t>(key[s][j] >> 32));
        const uint32_t votes = __ballot_sync(~0u, taken);
        if (lane == 0) scratch.before[s][j * kWarps + warp] = __popc(votes);
      }
      passed[s] = __reduce_max_sync(~0u, passed[s]);
      if (lane == 0) atomicMax(&sets[s]->outside, passed[s]);
      if constexpr (S.sampling) {
        const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest[s]));
        if (lane == 0) atomicMax(reinterpret_cast<uint32_t*>(&sets[s]->largest), bits);
      }
    });
    __syncthreads();
    unrolled<kSets>([&](auto s) {
      const int last = scratch.cut[s];
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const bool taken = static_cast<int>(bin[s][j]) <= last;
        const uint32_t votes = __ballot_sync(~0u, taken);
        uint32_t before = 0;
        for (int i = lane; i < j * kWarps + warp; i += 32) before += scratch.before[s][i];
        before = __reduce_add_sync(~0u, before) + __popc(votes & ((1u << lane) - 1));
        if (taken) {
          sets[s]->order[before] = static_cast<uint32_t>(key[s][j] >> 32);
          sets[s]->row[before] = static_cast<uint32_t>(key[s][j]);
        }
        if (j == kEach - 1 && thread == kCertifiedThreads - 1) sets[s]->count = before + taken;
      }
    });
    __syncthreads();
  }

 private:
  // One warp: the last bin that still fits; -1 where not even the first does.
  __device__ static void cut(Scratch& scratch, int set) {
    constexpr int kOwn = kBins / 32;
    const int lane = threadIdx.x % 32;
    uint32_t own[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i++) own[i] = sum += scratch.bins[set][lane * kOwn + i];
    uint32_t total = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, total, distance);
      if (lane >= distance) total += other;
    }
    int fit = 0;  // bins of this lane that fit: those after one that does not, do not either
#pragma unroll
    for (int i = 0; i < kOwn; i++) fit += total - sum + own[i] <= S.candidates;
    fit = __reduce_add_sync(~0u, fit);
    if (lane == 0) scratch.cut[set] = fit - 1;
  }
};

}  // namespace wts
