// A whole walk in one launch, int8 W2 on chip: one CTA a SM holds its rows in registers and shared memory, loads them once, and exchanges
// one token a step. Batch 1, greedy.
//
// A warp's tiles in shared memory feed mma.sync through a ring of `kRing` fragments: a fragment is loaded `kRing` k-steps before its use,
// between the MMAs of register tiles, so the shared-memory pipe (128 B a clock) and the tensor pipe work side by side. Weights do not
// depend on the token, so the ring is full again when a step's exchange ends. (wgmma straight from shared memory reads 64 B a clock and
// holds the tensor pipe: slower.)
#pragma once
#include <cuda/ptx>

#include "common/base.cuh"
#include "common/latent.cuh"
#include "common/score.cuh"
#include "common/walk_loop.cuh"

namespace wts {

struct ResidentShape {
  int tiles_rf;    // 16-row tiles a warp holds in registers (32 registers a thread each)
  int tiles_smem;  // 16-row tiles a warp holds in shared memory
  int max_ctas;
  bool clocks;  // stamp cycles and nanoseconds at every step
};

template <ResidentShape S>
struct Resident {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kTiles = S.tiles_rf + S.tiles_smem;  // of a warp
  static constexpr int kRows = kWarps * kTiles * 16;        // of a CTA
  static constexpr int kSteps = kRank / 32;                 // MMA k-steps
  // 6 and 8 win 30 to 80 clocks of the step and lose them to registers; with six register tiles and more than three groups, 4 spills.
  static constexpr int kRing = S.tiles_rf >= 6 && S.tiles_smem > 3 ? 2 : 4;
  static constexpr int kFragments = S.tiles_smem * kSteps;  // of a warp in shared memory, 16 bytes a lane each
  static constexpr int kSmemWeightBytes = kWarps * kFragments * 512;
  // A step works through groups of up to four tiles: its share of the register tiles, then one tile from shared memory. A warp's rows are
  // numbered in that order (kernels/placement.py, `in_registers`).
  static constexpr int kNear = S.tiles_smem ? 3 : 4;  // register tiles a group holds at most
  static constexpr int kGroups = S.tiles_smem * kNear >= S.tiles_rf ? S.tiles_smem : (S.tiles_rf + kNear - 1) / kNear;
  static constexpr int first_register_tile(int group) { return group * S.tiles_rf / kGroups; }
  static constexpr int first_tile(int group) { return first_register_tile(group) + (group < S.tiles_smem ? group : S.tiles_smem); }

  using Latent = LatentInt8;

  struct Smem {
    alignas(128) uint8_t weights[kSmemWeightBytes ? kSmemWeightBytes : 128];
    alignas(16) uint8_t latent[Latent::kSmemBytes];
    alignas(16) float2 row_scale[kRows / 2];  // rows g and g + 8 of a tile side by side
    LoopState shared;
    alignas(8) uint64_t loaded;
    alignas(16) uint16_t base[kRows];  // of step 0; the other steps follow, [steps, kRows] in all
  };

  const Params& p;
  Smem& smem;
  LoopState& shared;
  const Latent latent;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint4* shared_tiles = reinterpret_cast<const uint4*>(smem.weights) + warp * kFragments * 32 + lane;
  uint4 a[S.tiles_rf ? S.tiles_rf : 1][kSteps];
  uint4 ring[kRing];

  __device__ void load() {
    const uint4* weights = p.weights + static_cast<int64_t>(blockIdx.x) * kRows * kRank / 16;
    if constexpr (kFragments > 0)
      if (threadIdx.x == 0) {
        cuda::ptx::mbarrier_init(&smem.loaded, 1);
        cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
        cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, &smem.loaded,
                                             kSmemWeightBytes);
        cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, smem.weights,
                                 weights + kWarps * S.tiles_rf * kSteps * 32, kSmemWeightBytes, &smem.loaded);
      }
#pragma unroll
    for (int j = 0; j < S.tiles_rf; j++)
#pragma unroll
      for (int k = 0; k < kSteps; k++) a[j][k] = load_once(weights + ((warp * S.tiles_rf + j) * kSteps + k) * 32 + lane);
    fetch_base(smem.base, p, kRows, threadIdx.x, kThreads);
    for (int i = threadIdx.x; i < kRows / 4; i += kThreads) copy_async_16(smem.row_scale + 2 * i, p.row_scale + blockIdx.x * kRows + 4 * i);
    copy_async_wait();
    __syncthreads();
    if constexpr (kFragments > 0) {
      while (!cuda::ptx::mbarrier_try_wait_parity(&smem.loaded, 0)) {
      }
#pragma unroll
      for (int i = 0; i < kRing; i++) ring[i] = shared_tiles[i * 32];
    }
  }

  // This thread's best row of the step. Every row of the CTA is some thread's.
  //
  // A group's MMAs leave only two integers a thread. What turns them into logits waits for `kSettled` groups, so that its latency is paid
  // once for all of them; more would need more registers than there are.
  __device__ Candidate score(int step) {
    constexpr int kSettled = 3;
    const uint4* chunks = latent.chunks(shared.latent_slot);
    const float latent_scale = latent.scale(shared.latent_slot);
    uint4 ahead = chunks[0];
    int32_t sums[kGroups][2];
    Candidate best[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      project(sums[group], group, chunks, ahead);
      if ((group + 1) % kSettled && group + 1 < kGroups) continue;
      const int first = group / kSettled * kSettled;
#pragma unroll
      for (int i = first; i <= group; i++) best[i] = settle(step, i, sums[i], latent_scale);
#pragma unroll
      for (int i = first + 1; i <= group; i++) best[first] = Candidate::better(best[first], best[i]);
      if (first) best[0] = Candidate::better(best[0], best[first]);
    }
    return best[0];
  }

  // The integer sums of this thread's two rows of a group.
  __device__ void project(int32_t (&sums)[2], int group, const uint4* chunks, uint4& ahead) {
    const int first = first_register_tile(group), near = first_register_tile(group + 1) - first;
    int32_t d[4][4] = {};
    uint4 b;
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      if (k % 2 == 0) b = ahead, ahead = chunks[(k / 2 + 1) % (kSteps / 2) * 4];
      const uint32_t b0 = k % 2 ? b.z : b.x, b1 = k % 2 ? b.w : b.y;
      if (group < S.tiles_smem) {
        const int fragment = group * kSteps + k;
        mma_s8(d[near], ring[fragment % kRing], b0, b1);
        ring[fragment % kRing] = shared_tiles[(fragment + kRing) % kFragments * 32];
      }
#pragma unroll
      for (int j = 0; j < near; j++) mma_s8(d[j], a[first + j][k], b0, b1);
    }
    // Columns 0, 2, 4, 6 all hold plane hi and 1, 3, 5, 7 plane lo, so lane t can take tile t of the group.
    const int slot = min(t, tiles(group) - 1);
    int32_t mine[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      mine[e] = d[0][e];
#pragma unroll
      for (int j = 1; j < tiles(group); j++) mine[e] = slot == j ? d[j][e] : mine[e];
    }
    sums[0] = mine[0] * 256 + mine[1];
    sums[1] = mine[2] * 256 + mine[3];
  }

  // The better of this thread's two rows of a group.
  __device__ Candidate settle(int step, int group, const int32_t (&sums)[2], float latent_scale) const {
    const uint16_t* base = smem.base + step * kRows + row(group);
    const float2 scale = smem.row_scale[row(group) / 16 * 8 + g];
    float low = score_int8(widen(base[0]), scale.x, latent_scale, sums[0]);
    float high = score_int8(widen(base[8]), scale.y, latent_scale, sums[1]);
    round_bf16(low, high);
    return Candidate::better(Candidate::of(low, row(group)), Candidate::of(high, row(group) + 8));
  }

  __device__ static constexpr int tiles(int group) { return first_tile(group + 1) - first_tile(group); }

  // The first of the two rows this thread takes from a group; lanes beyond its tiles repeat the last one's.
  __device__ int row(int group) const { return (warp * kTiles + first_tile(group) + min(t, tiles(group) - 1)) * 16 + g; }
};

template <ResidentShape S, template <int> class Exchange>
__device__ void walk_resident(const Params& p) {
  run_walk<Resident<S>, S.clocks, Exchange<S.max_ctas>>(p);
}

}  // namespace wts
