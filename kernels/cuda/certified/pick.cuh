// The candidates of a step: of all rows that its slices offer, those above a threshold that leaves as many as there is room for.
//
// Every CTA that needs the candidates of a step picks them again from what was offered, in the same order, so that places agree: it costs
// less than another exchange. The threshold lies between two values of the upper 16 bits of an order, which are those of a bf16.
#pragma once
#include "certified/rule.cuh"

namespace wts {

template <CertifiedShape S>
struct Pick {
  static constexpr int kWarps = S.warps / 2, kThreads = 32 * kWarps;  // half a CTA
  static constexpr int kOffered = S.slices * S.local, kEach = (kOffered + kThreads - 1) / kThreads;
  static constexpr int kPlaces = kEach * kThreads;
  static constexpr int kBins = 512;  // values of a bf16 below the best: four binades. What lies lower is no candidate.
  static_assert(S.local % 2 == 0, "copied 16 bytes at a time");
  static_assert(kBins % kThreads == 0 && kBins % 32 == 0 && S.candidates < 1 << 16);

  struct Set {
    uint32_t order[S.candidates];
    uint32_t row[S.candidates];
    uint32_t count, previous;  // how many; the first of them may be previous tokens, see CertifiedShape
    uint32_t outside;          // the largest order of all other rows
    float largest;             // |base logit|; sampling only
  };

  struct Scratch {
    alignas(16) uint64_t key[kPlaces];
    uint32_t bins[kBins];
    uint32_t best[kWarps];
    uint32_t before[kEach][kWarps];
    int cut, previous_cut;
  };

  // All threads; ends with a barrier. Each half of the CTA picks the candidates of one step.
  __device__ static void run(const CertifiedParams& p, const int (&pairs)[2], Set (&sets)[2], Scratch (&both)[2]) {
    const int half = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32;
    const int pair = half == 0 ? pairs[0] : pairs[1];
    Set& set = sets[half];
    Scratch& scratch = both[half];
    const uint64_t* offered = p.offered + static_cast<int64_t>(pair) * kOffered;
#pragma unroll 1
    for (int i = thread; i < kOffered / 2; i += kThreads) copy_async_16(&scratch.key[2 * i], offered + 2 * i);
    const int64_t at = static_cast<int64_t>(pair) * S.slices;
    uint32_t outside = 0;
    float largest = 0.0f;
#pragma unroll 1
    for (int i = thread; i < S.slices; i += kThreads) {
      outside = max(outside, __ldcg(p.passed_over + at + i));
      if constexpr (S.sampling) largest = fmaxf(largest, __ldcg(p.largest + at + i));
    }
#pragma unroll
    for (int i = thread; i < kBins; i += kThreads) scratch.bins[i] = 0;
    if (kOffered < kPlaces && thread < kPlaces - kOffered) scratch.key[kOffered + thread] = 0;
    copy_async_wait();
    __syncthreads();
    uint32_t best = 0;
#pragma unroll 1
    for (int i = thread; i < kOffered; i += kThreads) best = max(best, order(scratch.key[i]));
    best = __reduce_max_sync(~0u, best);
    if (lane == 0) scratch.best[warp] = best;
    if (thread == 0) set.outside = 0, set.largest = 0.0f;
    __syncthreads();
    best = __reduce_max_sync(~0u, scratch.best[lane % kWarps]) >> 16;
#pragma unroll 1
    for (int i = thread; i < kOffered; i += kThreads)
      if (const uint32_t own = bin(scratch.key[i], best); own < kBins) atomicAdd(&scratch.bins[own], 1);
    __syncthreads();
    if (warp == 0) cut(scratch);
    __syncthreads();
    const int last = scratch.cut, last_previous = scratch.previous_cut;
#pragma unroll 1
    for (int j = 0; j < kEach; j++) {
      const uint64_t key = scratch.key[thread + j * kThreads];
      const int own = static_cast<int>(bin(key, best));
      if (own > last) outside = max(outside, order(key));
      const uint32_t previous = __ballot_sync(~0u, own <= last_previous), others = __ballot_sync(~0u, own <= last) & ~previous;
      if (lane == 0) scratch.before[j][warp] = __popc(previous) | __popc(others) << 16;
    }
    outside = __reduce_max_sync(~0u, outside);
    if (lane == 0) atomicMax(&set.outside, outside);
    if constexpr (S.sampling) {
      const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));
      if (lane == 0) atomicMax(reinterpret_cast<uint32_t*>(&set.largest), bits);
    }
    __syncthreads();
    if (warp == 0) count_before(scratch, set);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < kEach; j++) {
      const uint64_t key = scratch.key[thread + j * kThreads];
      const int own = static_cast<int>(bin(key, best));
      const uint32_t previous = __ballot_sync(~0u, own <= last_previous), others = __ballot_sync(~0u, own <= last) & ~previous;
      const uint32_t lower = (1u << lane) - 1, before = scratch.before[j][warp];
      if (own <= last) {
        const uint32_t place =
            own <= last_previous ? (before & 0xFFFFu) + __popc(previous & lower) : set.previous + (before >> 16) + __popc(others & lower);
        set.order[place] = order(key);
        set.row[place] = static_cast<uint32_t>(key);
      }
    }
    __syncthreads();
  }

 private:
  __device__ static uint32_t order(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

  // Below the best; kBins where there is no row, or it lies too far below.
  __device__ static uint32_t bin(uint64_t key, uint32_t best) {
    return key == 0 ? kBins : min(best - (order(key) >> 16), static_cast<uint32_t>(kBins));
  }

  // One warp: the last bins that still fit; -1 where not even the first does.
  __device__ static void cut(Scratch& scratch) {
    constexpr int kOwn = kBins / 32;
    const int lane = threadIdx.x % 32;
    uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < kOwn; i++) sum += scratch.bins[lane * kOwn + i];
    uint32_t through = sum_of_lower_lanes(sum);
    int fit = 0, previous = 0;  // bins of this lane that fit: those after one that does not, do not either
#pragma unroll 1
    for (int i = 0; i < kOwn; i++) {
      through += scratch.bins[lane * kOwn + i];
      fit += through <= S.candidates, previous += through <= S.previous;
    }
    fit = __reduce_add_sync(~0u, fit), previous = __reduce_add_sync(~0u, previous);
    if (lane == 0) scratch.cut = fit - 1, scratch.previous_cut = previous - 1;
  }

  // One warp: from counts of warps to counts of all before, of previous tokens and of others in the halves of a word.
  __device__ static void count_before(Scratch& scratch, Set& set) {
    const int lane = threadIdx.x % 32;
    uint32_t running = 0;
#pragma unroll 1
    for (int j = 0; j < kEach; j++) {
      const uint32_t own = lane < kWarps ? scratch.before[j][lane] : 0;
      const uint32_t before = running + sum_of_lower_lanes(own);
      if (lane < kWarps) scratch.before[j][lane] = before;
      running = __shfl_sync(~0u, before + own, 31);
    }
    if (lane == 0) set.previous = running & 0xFFFFu, set.count = set.previous + (running >> 16);
  }

  __device__ static uint32_t sum_of_lower_lanes(uint32_t own) {
    const int lane = threadIdx.x % 32;
    uint32_t total = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, total, distance);
      if (lane >= distance) total += other;
    }
    return total - own;
  }
};

}  // namespace wts
