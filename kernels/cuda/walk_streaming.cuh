// A whole walk in one launch that keeps nothing on chip: W2 comes from L2 or HBM again at every step. The fusion-only arm, beside which the
// gain of residency shows. Batch 1, greedy; int8 weights in the rule INT8 or bf16 weights in the rule TWICE.
//
// Weights do not depend on the token, so each warp keeps `depth` loads of 4 KB in flight through the exchange and into the next step.
#pragma once
#include <cuda/std/type_traits>

#include "common/base.cuh"
#include "common/latent.cuh"
#include "common/score.cuh"
#include "common/unit.cuh"
#include "common/walk_loop.cuh"

namespace wts {

struct StreamingShape {
  bool bf16;  // weights: bf16, else int8
  int warps;
  int tiles;         // 16-row tiles a warp scores at every step
  int depth;         // 4 KB units in flight a warp; divides `tiles`, at most 4
  int kept_percent;  // of W2 that L2 is asked to keep from step to step
  int max_ctas;
  bool clocks;
};

template <StreamingShape S>
struct Streaming {
  static constexpr int kThreads = 32 * S.warps, kBatch = 1;
  using Key = NarrowKey;
  static constexpr int kRows = S.warps * S.tiles * 16;
  static_assert(kRows <= static_cast<int>(kLastRow), "a key has 16 bits for a row");
  static constexpr int kUnitsPerTile = units_per_tile(S.bf16);
  static constexpr int kUnits = S.tiles * kUnitsPerTile;
  static constexpr int kShared = S.depth;  // tiles whose results a lane quad shares out; the ring's slots are the same in every batch
  static_assert(kShared <= 4 && S.tiles % kShared == 0);
  using Latent = cuda::std::conditional_t<S.bf16, LatentBf16<latent_slots(1)>, LatentInt8<latent_slots(1)>>;
  using Sum = cuda::std::conditional_t<S.bf16, float, int32_t>;

  struct Smem {
    alignas(16) uint8_t latent[Latent::kSmemBytes];
    alignas(16) float row_scale[kRows];
    LoopState<kBatch, Key> shared;
    alignas(16) uint16_t base[kRows];  // of step 0; the other steps follow, [steps, kRows] in all
  };

  const Params& p;
  Smem& smem;
  LoopState<kBatch, Key>& shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint4* weights = p.weights + static_cast<int64_t>(blockIdx.x * S.warps + warp) * kUnits * 256 + lane;
  const uint64_t policy = l2_policy(S.kept_percent / 100.0f);
  uint4 ring[S.depth][8];

  __device__ Latent latent(int = 0) const { return {smem.latent}; }

  __device__ void meanwhile(int, int, int) const {}

  // Unit `unit` of a step, or of the next one, into its ring slot.
  __device__ void refill(int slot, int unit) {
    const uint4* source = weights + (unit < kUnits ? unit : unit - kUnits) * 256;
#pragma unroll
    for (int k = 0; k < 8; k++) ring[slot][k] = load_with_policy(source + k * 32, policy);
  }

  __device__ void load(uint32_t) {
#pragma unroll
    for (int unit = 0; unit < S.depth; unit++) refill(unit, unit);
    for (int step = 0; step < p.steps; step++) fetch_base(smem.base + step * kRows, p, 0, step, kRows, threadIdx.x, kThreads);
    if constexpr (!S.bf16)
      for (int i = threadIdx.x; i < kRows / 4; i += kThreads)
        copy_async_16(smem.row_scale + 4 * i, p.row_scale + blockIdx.x * kRows + 4 * i);
    copy_async_wait();
    __syncthreads();
  }

  // The better of the two rows `row` and `row + 8` of a tile.
  __device__ Candidate offer(int step, int row, const Sum (&d)[4]) const {
    const uint16_t* base = smem.base + step * kRows + row;
    float low, high;
    if constexpr (S.bf16) {
      low = d[0], high = d[2];
      score_twice(low, high, widen(base[0]), widen(base[8]));
    } else {
      const float latent_scale = latent().scale(shared.latent_slot[0]);
      low = score_int8(widen(base[0]), smem.row_scale[row], latent_scale, d[0] * 256 + d[1]);
      high = score_int8(widen(base[8]), smem.row_scale[row + 8], latent_scale, d[2] * 256 + d[3]);
    }
    round_bf16(low, high);
    return Candidate::better(Candidate::of(low, row), Candidate::of(high, row + 8));
  }

  // The sums of tile `j` of the batch that starts with unit `first`. Its units are consumed and their slots refilled with what comes
  // `depth` units later, in this step or the next.
  __device__ void tile(Sum (&d)[4], int first, int j, const uint4* chunks) {
    Sum odd[4] = {};
#pragma unroll
    for (int half = 0; half < kUnitsPerTile; half++) {
      const int unit = j * kUnitsPerTile + half, slot = unit % S.depth;
      multiply_unit(d, odd, ring[slot], chunks + half * 16);
      refill(slot, first + unit + S.depth);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) d[e] += odd[e];
  }

  // This thread's best row of the step. Every row of the CTA is some thread's.
  __device__ void score(int step, Candidate (&found)[1]) {
    constexpr int kUnroll = S.bf16 ? 1 : 3;  // bf16 unrolled spills at some vocabularies and gains nothing
    const uint4* chunks = latent().chunks(shared.latent_slot[0]);
    int row = (warp * S.tiles + t) * 16 + g;  // all columns (int8: all pairs of columns) are alike, so lane t takes tile t of a batch
    Candidate best{kMinusInfinity, static_cast<uint32_t>((warp * S.tiles) * 16 + g)};
#pragma unroll kUnroll
    for (int first = 0; first < kUnits; first += kShared * kUnitsPerTile, row += kShared * 16) {
      Sum d[4][4] = {};
#pragma unroll
      for (int j = 0; j < kShared; j++) tile(d[j], first, j, chunks);
      // A branch, though idle lanes could repeat a row: without it the compiler mixes this with the next tiles and delays their loads,
      // which costs 1.4 us a step.
      if (t < kShared) {
        const bool odd = t & 1, upper = t & 2;
        Sum sums[4];
#pragma unroll
        for (int e = 0; e < 4; e++) sums[e] = upper ? (odd ? d[3][e] : d[2][e]) : (odd ? d[1][e] : d[0][e]);
        best = Candidate::better(best, offer(step, row, sums));
      }
    }
    found[0] = best;
  }
};

template <StreamingShape S, template <int, int> class Exchange>
__device__ void walk_streaming(const Params& p) {
  run_walk<Streaming<S>, S.clocks, Exchange<S.max_ctas, 1>>(p);
}

}  // namespace wts
