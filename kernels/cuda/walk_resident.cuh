// A whole walk of up to eight requests in one launch: one CTA a SM holds its rows of W2 in registers and shared memory, loads them once,
// and exchanges one token a step and request. Rows that fit in neither come from L2 again at every step. int8 weights (rule INT8) or bf16
// weights (rule TWICE).
//
// A warp's tiles in shared memory feed mma.sync through a ring of `kRing` fragments: a fragment is loaded `kRing` k-steps before its use,
// between the MMAs of register tiles, so the shared-memory pipe (128 B a clock) and the tensor pipe work side by side. Weights do not
// depend on the token, so the ring is full again when a step's exchange ends. (wgmma straight from shared memory reads 64 B a clock and
// holds the tensor pipe: slower at this batch.) A streamed tile is a shared-memory tile that lives in one of the warp's stages for the
// while; the warp asks for the next one as soon as it has read it, through the exchange and into the next step.
#pragma once
#include <cuda/ptx>
#include <cuda/std/type_traits>

#include "common/base.cuh"
#include "common/latent.cuh"
#include "common/noise.cuh"
#include "common/score.cuh"
#include "common/unroll.cuh"
#include "common/walk_loop.cuh"

namespace wts {

struct ResidentShape {
  bool bf16;           // weights: bf16, else int8
  int tiles_rf;        // 16-row tiles a warp holds in registers (int8: 32 registers a thread each, bf16: 64)
  int tiles_smem;      // 16-row tiles a warp holds in shared memory
  int tiles_streamed;  // 16-row tiles a warp reads from L2 at every step
  int stages;          // streamed units of 4 KB of a warp in shared memory at once; at least 2, so that one can fill while one is read
  int batch;           // requests: 1, 2, 4 or 8
  bool sampling;       // rule GUMBEL for rows with temperature > 0; up to 4 requests
  int max_ctas;
  bool clocks;  // stamp cycles and nanoseconds at every step
  bool window;  // the requests are positions of one walk: position p is step p / batch of request p % batch (walk_window.cuh)
};

template <ResidentShape S>
struct Resident {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kBatch = S.batch;
  // The eight columns of an MMA are four requests in two planes; more requests are more column blocks. A quad of lanes serves the requests
  // of all blocks, a lane one of each block. Up to four, a quad's lanes share the tiles of a group.
  static constexpr int kQuad = S.batch < 4 ? S.batch : 4, kBlocks = S.batch / kQuad;
  static constexpr int kGroupTiles = 4 / kBlocks;               // so that a group has four accumulators
  static constexpr int kItems = kBlocks == 1 ? S.batch : 4;     // pairs of rows that a lane turns into logits, of a full group
  static constexpr int kFar = S.tiles_smem + S.tiles_streamed;  // tiles of a warp that come through shared memory
  static constexpr int kTiles = S.tiles_rf + kFar;              // of a warp
  static constexpr int kRows = kWarps * kTiles * 16;            // of a CTA
  static_assert(kRows <= static_cast<int>(kLastRow), "a key has 16 bits for a row");
  static constexpr int kRowBytes = S.bf16 ? 2 * kRank : kRank;
  static constexpr int kSteps = kRowBytes / 32;  // MMA k-steps
  static constexpr int kTileBytes = 16 * kRowBytes;
  static constexpr int kUnitBytes = 4096, kUnitSteps = 8, kUnits = kTileBytes / kUnitBytes;  // what is streamed at once; k-steps; of a tile
  static constexpr int kStreamedUnits = S.tiles_streamed * kUnits;
  // 6 and 8 win 30 to 80 clocks of the step and lose them to registers. Where registers are full of weights and something else wants some
  // (a ring's bookkeeping, more requests, bf16), 4 spills.
  static constexpr bool kFull = S.tiles_rf * kSteps >= 48;
  static constexpr int kRing = kBlocks > 1 || (kFull && (S.tiles_streamed > 0 || S.bf16 || (S.batch > 1 && kFar > 3))) ? 2 : 4;
  // A step works through groups of up to four tiles (fewer with more blocks): the group's register tiles, then its share of the others. A
  // warp's rows are numbered in that order (kernels/placement.py, `places`), so that a lane's rows rise.
  static constexpr int kGroups = (kTiles + kGroupTiles - 1) / kGroupTiles;
  static constexpr int first_tile(int group) { return group * kTiles / kGroups; }
  static constexpr int first_far(int group) { return first_tile(group) * kFar / kTiles; }
  static constexpr int first_near(int group) { return first_tile(group) - first_far(group); }
  static constexpr int tiles(int group) { return first_tile(group + 1) - first_tile(group); }
  // Streamed tiles stand evenly between resident ones, so that their stages have time to fill.
  static constexpr int streamed_before(int far) { return kFar ? far * S.tiles_streamed / (kFar ? kFar : 1) : 0; }
  static constexpr bool streamed(int far) { return streamed_before(far + 1) > streamed_before(far); }

  using Latent = cuda::std::conditional_t<S.bf16, LatentBf16<latent_slots(S.batch)>, LatentInt8<latent_slots(S.batch)>>;
  using Key = cuda::std::conditional_t<S.sampling, WideKey, NarrowKey>;
  using Sum = cuda::std::conditional_t<S.bf16, float, int32_t>;

  template <int kCount, class T>
  struct alignas(16) Array {  // may be empty
    T at[kCount ? kCount : 1];
  };

  struct Smem {
    alignas(128) uint8_t resident[kWarps * S.tiles_smem * kTileBytes ? kWarps * S.tiles_smem * kTileBytes : 128];
    alignas(128) uint8_t stages[kWarps * S.stages ? kWarps * S.stages * kUnitBytes : 128];
    alignas(16) uint8_t latent[kBatch * Latent::kSmemBytes];
    Array<S.bf16 ? 0 : kRows, float> row_scale;  // rows g and g + 8 of a tile side by side
    Array<S.sampling ? kBatch * kRows : 0, float> noise;
    LoopState<kBatch, Key> shared;
    alignas(8) uint64_t loaded;
    uint64_t full[kWarps * S.stages ? kWarps * S.stages : 1];
    alignas(16) uint16_t base[kBatch * kRows];  // of slot 0; the other slots follow, [base_slots, batch, rows] in all
  };

  const Params& p;
  Smem& smem;
  LoopState<kBatch, Key>& shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int request = t % kQuad;     // of a block: whose logits this lane turns into candidates
  const int column = g / 2 % kQuad;  // of a block: whose latent this lane feeds to the MMA
  uint4 a[S.tiles_rf ? S.tiles_rf : 1][kSteps];
  uint4 ring[kRing];
  uint32_t round = 0;
  int base_slot = 0;              // of the current step
  int fills = 0;                  // streamed units this warp has asked for
  int units_read = 0;             // streamed units of the steps before this one
  const uint8_t* unit = nullptr;  // the streamed unit that is being read

  __device__ Latent latent(int of) const { return {smem.latent + of * Latent::kSmemBytes}; }

  __device__ void load(uint32_t launch) {
    round = launch;
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(p.weights) + static_cast<int64_t>(blockIdx.x) * kRows * kRowBytes;
    if (threadIdx.x == 0) {
      cuda::ptx::mbarrier_init(&smem.loaded, 1);
      for (uint64_t& barrier : smem.full) cuda::ptx::mbarrier_init(&barrier, 1);
      cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
      if constexpr (S.tiles_smem > 0) {
        constexpr uint32_t kBytes = kWarps * S.tiles_smem * kTileBytes;
        cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, &smem.loaded, kBytes);
        cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, smem.resident,
                                 weights + kWarps * S.tiles_rf * kTileBytes, kBytes, &smem.loaded);
      }
    }
    const uint4* registers = reinterpret_cast<const uint4*>(weights) + warp * S.tiles_rf * kSteps * 32 + lane;
#pragma unroll
    for (int j = 0; j < S.tiles_rf; j++)
#pragma unroll
      for (int k = 0; k < kSteps; k++) a[j][k] = load_once(registers + (j * kSteps + k) * 32);
    for (int slot = 0; slot < min(p.base_slots, p.steps); slot++) fetch_base_slot(slot, slot, threadIdx.x, kThreads);
    if constexpr (!S.bf16)
      for (int i = threadIdx.x; i < kRows / 4; i += kThreads)
        copy_async_16(smem.row_scale.at + 4 * i, p.row_scale + blockIdx.x * kRows + 4 * i);
    if constexpr (S.sampling) draw_noise(0, threadIdx.x, kThreads);
    copy_async_wait();
    __syncthreads();
    if constexpr (S.tiles_smem > 0) wait_barrier(&smem.loaded, 0);
    if constexpr (S.tiles_streamed > 0)
      for (int stage = 0; stage < S.stages; stage++) fill();
    if constexpr (kFar > 0) {
      unrolled<kRing>([&](auto number) { load_fragment<number>(); });
    }
  }

  // ---- weights through shared memory ----

  // Ask for the warp's next streamed unit. The stage it takes has been read by the whole warp.
  __device__ void fill() {
    if (fills >= p.steps * kStreamedUnits) return;
    const int stage = fills % S.stages, unit = fills % kStreamedUnits;
    fills++;
    if (lane > 0) return;
    const uint8_t* source = reinterpret_cast<const uint8_t*>(p.weights) + static_cast<int64_t>(blockIdx.x) * kRows * kRowBytes +
                            kWarps * (S.tiles_rf + S.tiles_smem) * kTileBytes + (warp * kStreamedUnits + unit) * kUnitBytes;
    uint64_t* full = &smem.full[warp * S.stages + stage];
    cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, full, kUnitBytes);
    copy_bulk(smem.stages + (warp * S.stages + stage) * kUnitBytes, source, kUnitBytes, full, l2_policy(1));
  }

  // Unit `number` of this step (from kStreamedUnits on: of the next) is in shared memory, at `unit`; or false: the walk ends before it.
  __device__ bool await_unit(int number) {
    const int sequence = units_read + number, stage = warp * S.stages + sequence % S.stages;
    if (streamed(0) && sequence >= p.steps * kStreamedUnits) return false;
    wait_barrier(&smem.full[stage], sequence / S.stages & 1);
    unit = smem.stages + stage * kUnitBytes;
    return true;
  }

  // Fragment `number` of this step (from kFragments on: of the next) into the ring.
  static constexpr int kFragments = kFar * kSteps;
  template <int number>
  __device__ __forceinline__ void load_fragment() {
    constexpr int far = number % kFragments / kSteps, k = number % kSteps;
    const uint8_t* from = smem.resident + (warp * S.tiles_smem + far - streamed_before(far)) * kTileBytes + k * 512;
    if constexpr (streamed(far)) {
      if (k % kUnitSteps == 0 && !await_unit(streamed_before(far) * kUnits + k / kUnitSteps + (number >= kFragments ? kStreamedUnits : 0)))
        return;
      from = unit + k % kUnitSteps * 512;
    }
    ring[number % kRing] = reinterpret_cast<const uint4*>(from)[lane];
  }

  // ---- what does not depend on the token: warps that exchange nothing, while the others exchange ----

  __device__ void meanwhile(int step, int thread, int threads) {
    if (step + p.base_slots < p.steps) fetch_base_slot(base_slot_of_last_step(), step + p.base_slots, thread, threads);
    copy_async_commit();
    if constexpr (S.sampling)
      if (step + 1 < p.steps) draw_noise(step + 1, thread, threads);
    // Base logits of the next step are there; those of a later one may be under way.
    if (p.base_slots > 1)
      copy_async_wait_older<1>();
    else
      copy_async_wait();
  }

  __device__ int base_slot_of_last_step() const { return base_slot == 0 ? p.base_slots - 1 : base_slot - 1; }

  __device__ void fetch_base_slot(int slot, int step, int thread, int threads) {
#pragma unroll
    for (int r = 0; r < kBatch; r++)
      if (r < p.batch && (!S.window || step * kBatch + r < p.steps))
        fetch_base(smem.base + (slot * kBatch + r) * kRows, p, r, step, kRows, thread, threads);
  }

  // One Gumbel a row for the rows that sample at `step`; of greedy rows nothing is read.
  __device__ void draw_noise(int step, int thread, int threads) {
    for (int r = 0; r < kBatch && r < p.batch; r++) {
      if (RowTemperature::of(p.temperature[r]).greedy) continue;
      const PhiloxKey key = philox_key(p.seed[r]);
      for (int quad = thread; quad < kRows / kRowsPerWords; quad += threads) {
        const Words words = philox(noise_counter(blockIdx.x * (kRows / kRowsPerWords) + quad, step, r, round, kDraftRows), key);
        reinterpret_cast<float4*>(smem.noise.at + r * kRows)[quad] = {gumbel(words.w[0]), gumbel(words.w[1]), gumbel(words.w[2]),
                                                                      gumbel(words.w[3])};
      }
    }
  }

  // ---- scoring ----

  // What a lane knows of one of its requests in this step.
  struct Scorer {
    const uint16_t* base;
    float latent_scale;
    RowTemperature temperature;
    const float* noise;
    uint16_t* logits;  // null: none are kept
  };

  __device__ Scorer scorer(int step, int block) const {
    const int of = block * kQuad + request;
    const int slot = S.window ? shared.latent_slot[of] >> 16 : base_slot;  // each position is at a step of its own
    Scorer s{smem.base + (slot * kBatch + of) * kRows, 0, {true, 1, 0}, nullptr, nullptr};
    if constexpr (!S.bf16) s.latent_scale = latent(of).scale(latent_offset(of));
    if constexpr (S.sampling) {
      if (of < p.batch) s.temperature = RowTemperature::of(p.temperature[of]);
      s.noise = smem.noise.at + of * kRows;
      if (p.logits && !s.temperature.greedy) s.logits = p.logits + of * p.logits_request_stride + step * p.logits_step_stride;
    }
    return s;
  }

  __device__ int latent_offset(int of) const { return S.window ? shared.latent_slot[of] & 0xFFFF : shared.latent_slot[of]; }

  // B operands of all blocks: two k-steps' worth.
  struct Operands {
    const uint4* chunks[kBlocks];
    uint4 ahead;
  };

  // This lane's best rows of the step. Every row of the CTA is some lane's, for every request.
  //
  // A group's MMAs leave only two sums a thread and item. What turns them into logits waits for `kSettled` groups, so that its latency is
  // paid once for all of them; more would need more registers than there are.
  __device__ void score(int step, Candidate (&found)[kBlocks]) {
    constexpr int kSettled = kBatch == 1 && !S.sampling && !S.bf16 ? 3 : 1;
    Operands b;
    Scorer s[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      const int of = block * kQuad + column;
      b.chunks[block] = latent(of).chunks(latent_offset(of));
      b.ahead = b.chunks[block][0];
      s[block] = scorer(step, block);
    }
    Sum sums[kGroups][kItems][2];
    Candidate best[kGroups][kBlocks];
    unrolled<kGroups>([&](auto group) {
      project<group>(sums[group], b);
      if constexpr ((group + 1) % kSettled && group + 1 < kGroups) return;
      constexpr int first = group / kSettled * kSettled;
#pragma unroll
      for (int block = 0; block < kBlocks; block++) {
#pragma unroll
        for (int i = first; i <= group; i++) best[i][block] = settle(s[block], i, block, sums[i]);
#pragma unroll
        for (int i = first + 1; i <= group; i++) best[first][block] = Candidate::better(best[first][block], best[i][block]);
        if (first) best[0][block] = Candidate::better(best[0][block], best[first][block]);
      }
    });
    units_read += kStreamedUnits;
    base_slot = base_slot + 1 == p.base_slots ? 0 : base_slot + 1;
#pragma unroll
    for (int block = 0; block < kBlocks; block++) found[block] = best[0][block];
  }

  // The next `score` is once more of the last step. Nothing may be streamed.
  __device__ void rewind() { base_slot = base_slot_of_last_step(); }

  // Item i of a lane in a group: its tile. With one block the 4 / kBatch lanes of a quad that have the same request share a group's tiles:
  // lane q = t / kBatch takes tiles q, q + 4 / kBatch, ...; lanes beyond the last tile repeat it.
  __device__ int tile_of(int group, int i) const { return kBlocks > 1 ? i / kBlocks : min(t / kQuad + i * (4 / kQuad), tiles(group) - 1); }

  // The sums of this lane's rows of a group.
  template <int group>
  __device__ __forceinline__ void project(Sum (&sums)[kItems][2], Operands& b) {
    constexpr int near = first_near(group + 1) - first_near(group), far = first_far(group + 1) - first_far(group);
    Sum d[kGroupTiles][kBlocks][4] = {};
    // One shared-memory tile after the other, each beside its share of the register tiles.
    constexpr int phases = far ? far : 1;
    uint4 now[kBlocks];
    unrolled<phases * kSteps>([&](auto index) {
      constexpr int phase = index / kSteps, k = index % kSteps;
      if constexpr (k % 2 == 0) next_operands(now, b, k);
      if constexpr (far > 0) {
        constexpr int tile = first_far(group) + phase, number = tile * kSteps + k;
        multiply(d[near + phase], ring[number % kRing], now, k);
        load_fragment<number + kRing>();
        if constexpr (streamed(tile) && k % kUnitSteps == kUnitSteps - 1) {
          __syncwarp();  // every lane has used the unit
          fill();
        }
      }
#pragma unroll
      for (int j = phase * near / phases; j < (phase + 1) * near / phases; j++) multiply(d[j], a[first_near(group) + j][k], now, k);
    });
    // int8: columns 2 r and 2 r + 1 of a block hold the planes hi and lo of its request r; bf16: both hold its sum. Lane t has them for
    // request t.
    constexpr int kApart = 4 / kItems;
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (kBlocks > 1 && i / kBlocks >= tiles(group)) break;
      const int place = tile_of(group, i);
      Sum mine[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if constexpr (kBlocks > 1) {
          mine[e] = d[i / kBlocks][i % kBlocks][e];
        } else {
          mine[e] = d[i * kApart][0][e];
#pragma unroll
          for (int j = i * kApart + 1; j < tiles(group) && j < (i + 1) * kApart; j++) mine[e] = place == j ? d[j][0][e] : mine[e];
        }
      }
      if constexpr (S.bf16) {
        sums[i][0] = mine[0], sums[i][1] = mine[2];
      } else {
        sums[i][0] = mine[0] * 256 + mine[1];
        sums[i][1] = mine[2] * 256 + mine[3];
      }
    }
  }

  // The operands of k-steps k and k + 1. With one block they were asked for two k-steps ago; more blocks have no registers for that.
  __device__ __forceinline__ static void next_operands(uint4 (&now)[kBlocks], Operands& b, int k) {
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      if constexpr (kBlocks > 1) {
        now[block] = b.chunks[block][k / 2 * 4];
      } else {
        now[block] = b.ahead;
        b.ahead = b.chunks[block][(k / 2 + 1) % (kSteps / 2) * 4];
      }
    }
  }

  // One k-step of a tile, for every block.
  __device__ __forceinline__ static void multiply(Sum (&d)[kBlocks][4], const uint4& a, const uint4 (&b)[kBlocks], int k) {
#pragma unroll
    for (int block = 0; block < kBlocks; block++) mma(d[block], a, k % 2 ? b[block].z : b[block].x, k % 2 ? b[block].w : b[block].y);
  }

  __device__ static void mma(Sum (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    if constexpr (S.bf16)
      mma_bf16(d, a, b0, b1);
    else
      mma_s8(d, a, b0, b1);
  }

  // The best of this lane's rows of a group, for its request of a block.
  __device__ __forceinline__ Candidate settle(const Scorer& s, int group, int block, const Sum (&sums)[kItems][2]) const {
    Candidate best{};
    bool any = false;
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (kBlocks > 1 ? i % kBlocks != block || i / kBlocks >= tiles(group) : i * (4 / kItems) >= tiles(group)) continue;
      const int row = (warp * kTiles + first_tile(group) + tile_of(group, i)) * 16 + g;
      const Candidate found = settle_rows(s, row, sums[i]);
      best = any ? Candidate::better(best, found) : found;
      any = true;
    }
    return best;
  }

  // The better of rows `row` and `row + 8` of a tile.
  __device__ __forceinline__ Candidate settle_rows(const Scorer& s, int row, const Sum (&sums)[2]) const {
    float low, high;
    if constexpr (S.bf16) {
      low = sums[0], high = sums[1];
      score_twice(low, high, widen(s.base[row]), widen(s.base[row + 8]));
    } else {
      const float2 scale = *reinterpret_cast<const float2*>(smem.row_scale.at + 2 * (row / 16 * 8 + g));
      low = score_int8(widen(s.base[row]), scale.x, s.latent_scale, sums[0]);
      high = score_int8(widen(s.base[row + 8]), scale.y, s.latent_scale, sums[1]);
    }
    round_bf16(low, high);
    if constexpr (S.sampling) {
      if (s.logits) keep(s, row, low), keep(s, row + 8, high);
      const bool greedy = s.temperature.greedy;
      low = row_score(low, s.temperature.inverse, greedy ? 0.0f : s.noise[row]);
      high = row_score(high, s.temperature.inverse, greedy ? 0.0f : s.noise[row + 8]);
    }
    return Candidate::better(Candidate::of(low, row), Candidate::of(high, row + 8));
  }

  __device__ void keep(const Scorer& s, int row, float logit) const {
    const int global = blockIdx.x * kRows + row;
    if (global < p.vocab) s.logits[global] = static_cast<uint16_t>(__float_as_uint(logit) >> 16);
  }
};

template <ResidentShape S, template <int, int> class Exchange>
__device__ void walk_resident(const Params& p) {
  run_walk<Resident<S>, S.clocks, Exchange<S.max_ctas, S.batch>>(p);
}

// The same walk with a part of every step done twice: what the part costs. A template of its own, so that plain walks keep their cubins.
template <ResidentShape S, Stage kTwice, template <int, int> class Exchange>
__device__ void walk_resident(const Params& p) {
  static_assert(S.batch == 1 && !S.sampling && !S.bf16 && S.tiles_streamed == 0);
  run_walk<Resident<S>, S.clocks, Exchange<S.max_ctas, kTwice == Stage::kExchange ? 2 : 1>, kTwice>(p);
}

}  // namespace wts
