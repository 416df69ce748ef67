// A whole walk of up to 64 requests in one launch, int8 W2 in shared memory as far as it fits; the rest of a CTA's rows comes from L2 again
// at every step, through rings that stay full across steps: who scores a streamed tile asks for the one that takes its place. (A warp of
// its own for that leaves 96 registers a thread instead of 128, and everything spills.)
//
// wgmma m64n64k32: A is the requests' latents in registers (row 16 w + g is plane hi of request 8 w + g, row 16 w + 8 + g its plane lo), B
// a tile of 64 rows of W2. So a thread holds one request and, by the packing, twice eight consecutive rows of each tile: both planes of a
// logit meet in it, base logits and corrected logits are whole sectors, and one running candidate a thread is enough. The 64 rows of A are
// 32 requests; above that two halves of the warpgroups take 32 requests each.
//
// While a tile's MMAs are under way its warpgroup turns the logits of the tile before into candidates. Tensor cores, memory and the warps'
// own instructions take about the same time, and the exchange comes on top (CONTRIBUTING.md, "The batched walk"): hence compile-time
// tiles, one choice of vector or scalar loads a walk, addresses that only grow, halves that agree on their own.
#pragma once
#include <cuda/ptx>
#include <cuda/std/bit>

#include "common/exchange.cuh"
#include "common/latent.cuh"
#include "common/noise.cuh"
#include "common/params.cuh"
#include "common/score.cuh"
#include "common/unroll.cuh"

namespace wts {

struct BatchedShape {
  int tiles;      // 64-row tiles of a CTA
  int resident;   // of these, how many stay in shared memory
  int stages;     // for the others, of all rings together: one or two for each member, or 0 if there are none
  int halves;     // 1: up to 32 requests, 2: up to 64
  int copies;     // up to 8 requests 4, up to 16 2: how often the rows of A hold each of them
  bool sampling;  // rule GROUPS for rows with temperature > 0
  int max_ctas;
};

template <BatchedShape S>
struct Batched {
  static constexpr int kTeams = 4;  // warpgroups
  static constexpr int kThreads = kTeams * 128, kWarps = kThreads / 32;
  static constexpr int kMembers = kTeams / S.halves;  // warpgroups that share the tiles of one half
  static constexpr int kRecordBytes = LatentInt8<1>::kRecordBytes;
  // The four lanes of a request each hold two chunks of a tile's rows, 32 rows apart: so a load of all lanes reads whole sectors.
  static constexpr int kLanes = 4, kChunkRows = 8, kChunkDistance = kLanes * kChunkRows;
  static constexpr int kTileRows = 64, kTileBytes = kTileRows * kRank;
  static constexpr int kRows = S.tiles * kTileRows;  // of a CTA
  static_assert(kRows <= static_cast<int>(kLastRow), "a key has 16 bits for a row");
  // Few requests leave rows of A empty. They hold the requests again, so that another warp has the same sums: warps take turns with tiles.
  static constexpr int kCopies = S.copies, kWarpsPerCopy = 4 / kCopies;
  static_assert(kCopies == 1 || S.halves == 1);
  static constexpr int kRequests = 32 * S.halves / kCopies, kRequestsPerWarp = (kRequests + kWarps - 1) / kWarps;
  static constexpr int kCandidates = kMembers * kCopies;  // of a request
  // In shared memory: eight lanes read 16 bytes each of two records without a conflict.
  static constexpr int kLatentStride = 2 * kRank + 64;
  static constexpr uint32_t kNobody = 0xFF80FF80u;  // two -inf
  using Exchange = KeyCountPair<S.max_ctas, kRequests>;

  // How a request draws; in shared memory, since registers are short.
  struct alignas(16) Drawing {
    float inverse, scale;  // of its temperature
    PhiloxKey key;
  };

  struct Smem {
    alignas(128) uint8_t weights[S.resident + S.stages][kTileBytes];  // the rings last
    alignas(16) uint8_t latents[kRequests][kLatentStride];            // of the current step; the scale after the planes
    alignas(16) float row_scale[kRows];
    alignas(16) uint64_t best[kRequests][kCandidates];  // order of the score and inverted row of the best of each member and copy
    Drawing drawing[S.sampling ? kRequests : 1];
    alignas(16) uint32_t gumbels[S.sampling ? kThreads : 1][kLanes];  // a thread's: words of the four groups of one tile
    alignas(8) uint64_t full[S.resident + S.stages];
    uint64_t empty[S.stages ? S.stages : 1];
  };

  const Params& p;
  Smem& smem;
  const Exchange exchange{p.mail, *p.round, gridDim.x};

  // Tile i of a member is tile member + i kMembers of its CTA. Which of them are streamed is the same for every member. A member has a ring
  // of its own: one ring for all would let a fast warpgroup see the phase before last of a stage and read an old tile.
  static constexpr int kTiles = S.tiles / kMembers, kResident = S.resident / kMembers, kStages = S.stages / kMembers;
  static constexpr int kStreamed = kTiles - kResident;  // a step and member
  static_assert(S.tiles % kMembers == 0 && S.resident % kMembers == 0 && kTiles <= 32, "a member's tiles are the bits of a word");
  static_assert(kStreamed ? kStages == 1 || kStages == 2 : kStages == 0, "only streamed tiles have stages, one or two");

  // Up to this many tiles a step is unrolled, so that what a tile is need not be found out. (Sampling with two halves, whose code is the
  // longest: 1.3 us a step less, but the first step 4 us more, over nine tiles.)
  static constexpr int kUnrolled = 10;

  // Place of the n-th streamed tile. They stand evenly, so that their stages have time to fill while others are scored.
  static constexpr bool kAlternates = kStages == 1 && kStreamed == (kTiles + 1) / 2;  // the tiles of even numbers are streamed
  __host__ __device__ static constexpr int streamed_tile(int n) {
    return kAlternates ? 2 * n : kStreamed > 1 ? n * (kTiles - 1) / (kStreamed - 1) : 0;
  }
  __host__ __device__ static constexpr uint32_t streamed_bits() {
    uint32_t bits = 0;
    for (int n = 0; n < kStreamed; n++) bits |= 1u << streamed_tile(n);
    return bits;
  }
  __device__ static constexpr bool streams(int i) { return streamed_bits() >> i & 1; }
  __device__ static constexpr int streamed_before(int i) { return cuda::std::popcount(streamed_bits() & ((1u << i) - 1)); }

  // Where tile i of a member lies at a step, and the phase of `full` that says it is there.
  struct Place {
    int index;  // among the member's resident tiles, or its stages
    int slot, phase;
  };
  __device__ static Place place_of(int member, int i, int step, bool streamed) {
    const int before = streamed_before(i), sequence = step * kStreamed + before;
    if (!streamed) return {i - before, member * kResident + i - before, 0};
    const int stage = kStages == 2 ? sequence & 1 : 0;
    return {stage, S.resident + member * kStages + stage, sequence / (kStages ? kStages : 1) & 1};
  }

  // ---- filling shared memory: one thread of each member ----

  __device__ void fill(int slot, int tile, uint64_t policy) const {
    const uint8_t* source = reinterpret_cast<const uint8_t*>(p.weights) + (static_cast<int64_t>(blockIdx.x) * S.tiles + tile) * kTileBytes;
    cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, &smem.full[slot],
                                         kTileBytes);
    copy_bulk(smem.weights[slot], source, kTileBytes, &smem.full[slot], policy);
  }

  // In the order in which step 0 wants them.
  __device__ void fill_all(int member) const {
    for (int i = 0; i < kTiles; i++)
      if (!streams(i) || streamed_before(i) < kStages)
        fill(place_of(member, i, 0, streams(i)).slot, member + i * kMembers, l2_policy(streams(i) ? 1 : 0));
    if (kStreamed == 1 && kStages == 2 && p.steps > 1) fill(S.resident + member * kStages + 1, member, l2_policy(1));
  }

  // Streamed tile i has been scored: its stage takes the one after the newest, in this step or the next.
  __device__ void refill(int member, int i, int step) const {
    if constexpr (kStages > 0) {
      const int ahead = streamed_before(i) + kStages;
      if (step + ahead / kStreamed >= p.steps) return;
      const Place place = place_of(member, i, step, true);
      wait_barrier(&smem.empty[place.slot - S.resident], place.phase);
      fill(place.slot, member + streamed_tile(ahead % kStreamed) * kMembers, l2_policy(1));
    }
  }

  // ---- the warpgroups that score ----

  // What a thread knows of its request.
  struct Request {
    int id;
    bool live;  // part of the batch
    bool draws;
    bool warp_draws;  // it or another one of the warp
    bool keeps;       // its corrected logits
  };

  // A thread's best group of 16 rows so far.
  struct Best {
    float score;
    int tile;           // of its member
    uint32_t pairs[8];  // its bf16 logits, two a word
  };

  __device__ Request request_of(int id) const {
    const bool live = id < p.batch, draws = S.sampling && live && p.temperature[id] > 0;
    return {id, live, draws, S.sampling && __any_sync(~0u, draws), draws && p.logits};
  }

  // The first row of this thread in a tile, within the CTA.
  __device__ static int local_row(int tile) { return tile * kTileRows + threadIdx.x % kLanes * kChunkRows; }

  // This thread's base logits of a tile; `source` points to the first of them, `left` rows from the end of the vocabulary. What is past
  // that is -inf. `whole`: nothing is, and they are aligned.
  __device__ static void load_base(uint4 (&base)[2], const uint16_t* source, int left, bool whole) {
    constexpr uint32_t kMinusInf = 0xFF80;
    if (whole) {
#pragma unroll
      for (int i = 0; i < 2; i++) base[i] = load_once(reinterpret_cast<const uint4*>(source + i * kChunkDistance));
    } else {
      uint32_t rows[2 * kChunkRows];
#pragma unroll
      for (int i = 0; i < 2 * kChunkRows; i++) {
        const int row = i / kChunkRows * kChunkDistance + i % kChunkRows;
        rows[i] = row < left ? source[row] : kMinusInf;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t* r = rows + i * kChunkRows;
        base[i] = {r[0] | r[1] << 16, r[2] | r[3] << 16, r[4] | r[5] << 16, r[6] | r[7] << 16};
      }
    }
  }

  // The reverse: a tile's corrected logits to `target`.
  __device__ static void keep_logits(uint16_t* target, int left, bool whole, const uint32_t (&pairs)[8]) {
    if (whole) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        __stcs(reinterpret_cast<uint4*>(target + i * kChunkDistance),
               uint4{pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]});
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kChunkRows; i++) {
        const int row = i / kChunkRows * kChunkDistance + i % kChunkRows;
        if (row < left) target[row] = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
      }
    }
  }

  // The scales of this thread's rows of a tile and its request.
  __device__ static void load_scales(float (&scale)[16], const float* row_scale, float latent_scale) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const float4 rows = *reinterpret_cast<const float4*>(row_scale + i / kChunkRows * kChunkDistance + i % kChunkRows);
      scale[i] = __fmul_rn(rows.x, latent_scale), scale[i + 1] = __fmul_rn(rows.y, latent_scale);
      scale[i + 2] = __fmul_rn(rows.z, latent_scale), scale[i + 3] = __fmul_rn(rows.w, latent_scale);
    }
  }

  // Corrected logits of a tile, as bf16 pairs, from its sums: rule INT8.
  __device__ static void correct(uint32_t (&pairs)[8], const int32_t (&d)[32], const uint4 (&base)[2], const float (&scale)[16]) {
    const uint32_t bits[8] = {base[0].x, base[0].y, base[0].z, base[0].w, base[1].x, base[1].y, base[1].z, base[1].w};
#pragma unroll
    for (int i = 0; i < 8; i++)
      pairs[i] = pack_bf16(score_int8(__uint_as_float(bits[i] << 16), scale[2 * i], d[4 * i] * 256 + d[4 * i + 2]),
                           score_int8(__uint_as_float(bits[i] & 0xFFFF0000u), scale[2 * i + 1], d[4 * i + 1] * 256 + d[4 * i + 3]));
  }

  // The largest of 16 logits, NaN left out; -inf if there is nothing else.
  __device__ static float largest(const uint32_t (&pairs)[8]) {
    uint32_t top = kNobody;
#pragma unroll
    for (int i = 0; i < 8; i++) top = max_bf16x2(top, pairs[i]);
    return fmaxf(__uint_as_float(top << 16), __uint_as_float(top & 0xFFFF0000u));
  }

  __device__ static float logit(const uint32_t (&pairs)[8], int i) {
    return __uint_as_float(i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16);
  }

  // ---- rule GROUPS of kernels/sampling.py ----

  // The words of the four groups of a tile.
  __device__ Words words(const Request& r, const PhiloxKey& key, int step, int tile, NoiseStream stream) const {
    static_assert(kTileRows == kGroupRows * kGroupsPerWords);
    return philox(noise_counter(blockIdx.x * S.tiles + tile, step, r.id, exchange.round, stream), key);
  }

  // The Gumbels' words of four tiles of a request, `tile` and the next three of its own: each of its lanes computes one tile's, for all.
  __device__ void draw_gumbels(const Request& r, int step, int tile) const {
    const int lane = threadIdx.x % kLanes;
    const Words w = words(r, smem.drawing[r.id].key, step, tile + lane * kCopies * kMembers, kDraftGroups);
    __syncwarp();  // those before have been read
    *reinterpret_cast<uint4*>(smem.gumbels[threadIdx.x]) = {w.w[0], w.w[1], w.w[2], w.w[3]};
    __syncwarp();
  }

  // The word of this thread's group in the n-th of its tiles.
  __device__ uint32_t gumbel(int n) const {
    const int lane = threadIdx.x % kLanes;
    return smem.gumbels[threadIdx.x - lane + n % kLanes][lane];
  }

  struct Weights {
    float shift, sum;
    bool rare;
  };

  __device__ static Weights weights(uint32_t (&pairs)[8], float top, float scale) {
    const float shift = group_shift(top, scale);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kGroupRows; i++) sum = add_rn(sum, row_weight(logit(pairs, i), scale, shift));
    const bool rare = is_rare(shift, sum);
    if (rare) {
      sum = 0;
      for_rare_weights(pairs, top, scale, shift, [&](float weight) { sum = add_rn(sum, weight); });
    }
    return {shift, sum, rare};
  }

  // take(weight) for all rows of a group in order, in few instructions and no register more: the pairs turn once around.
  template <class Take>
  __device__ static void for_rare_weights(uint32_t (&pairs)[8], float top, float scale, float shift, Take take) {
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      take(rare_weight(logit(pairs, 0), top, scale, shift));
      take(rare_weight(logit(pairs, 1), top, scale, shift));
      const uint32_t first = pairs[0];
#pragma unroll
      for (int j = 0; j < 7; j++) pairs[j] = pairs[j + 1];
      pairs[7] = first;
    }
  }

  // The score of this thread's group of 16 rows in its member's tile i.
  __device__ float score(const Request& r, int i, uint32_t (&pairs)[8]) const {
    const float top = largest(pairs);
    if constexpr (S.sampling) {
      if (r.warp_draws) {
        const Drawing drawing = smem.drawing[r.id];
        const float drawn = group_score(top, weights(pairs, top, drawing.scale).sum, drawing.inverse, gumbel(i / kCopies));
        return r.draws && top > kMinusInfinity ? drawn : top;
      }
    }
    return top;
  }

  // Where the first of 16 logits stands that equals `top`; 0 if none does, since all are NaN.
  __device__ static int first_place(const uint32_t (&pairs)[8], float top) {
    uint32_t equal = 0;  // bit i: logit i, if i is even; bit 16 + i, if it is odd
#pragma unroll
    for (int i = 0; i < 8; i++) equal |= equal_bf16x2(pairs[i], pack_bf16(top, top)) & (1u << 2 * i | 1u << (17 + 2 * i));
    return max(__ffs((equal | equal >> 16) & 0xFFFF) - 1, 0);
  }

  // The place in the best group of the row that is this thread's candidate.
  __device__ int chosen(const Request& r, int step, int tile, Best& best) const {
    const float top = largest(best.pairs);
    int place = first_place(best.pairs, top);
    if constexpr (S.sampling) {
      if (r.warp_draws) {
        const Drawing drawing = smem.drawing[r.id];
        const Words w = words(r, drawing.key, step, tile, kDraftPlaces);
        const Weights found = weights(best.pairs, top, drawing.scale);
        const int lane = threadIdx.x % kLanes;
        const float threshold = row_threshold(found.sum, lane & 2 ? (lane & 1 ? w.w[3] : w.w[2]) : (lane & 1 ? w.w[1] : w.w[0]));
        float running = 0;
        int drawn = 0;
        const auto pass = [&](float weight) { drawn += (running = add_rn(running, weight)) <= threshold; };
        if (found.rare) {
          for_rare_weights(best.pairs, top, drawing.scale, found.shift, pass);
        } else {
#pragma unroll
          for (int i = 0; i < kGroupRows; i++) pass(row_weight(logit(best.pairs, i), drawing.scale, found.shift));
        }
        if (r.draws && top > kMinusInfinity) place = min(drawn, kGroupRows - 1);
      }
    }
    return place;
  }

  // This thread's group of 16 rows of its member's tile i, if it is its best so far.
  __device__ void offer(Best& best, const Request& r, int i, uint32_t (&pairs)[8]) const {
    const float found = score(r, i, pairs);
    const bool better = found > best.score;
    best.score = better ? found : best.score;
    best.tile = better ? i : best.tile;
#pragma unroll
    for (int i = 0; i < 8; i++) best.pairs[i] = better ? pairs[i] : best.pairs[i];
  }

  // The latents of a warpgroup's requests: lane (g, t) holds chunks t, t + 4, ... of both planes; each serves two k-steps.
  struct Latents {
    uint4 hi[4], lo[4];
    float scale;
  };

  __device__ void load_latents(Latents& u, const Request& r) const {
    const uint8_t* record = smem.latents[r.id];
    const uint4* planes = reinterpret_cast<const uint4*>(record) + threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < 4; i++) u.hi[i] = planes[4 * i], u.lo[i] = planes[kRank / 16 + 4 * i];
    u.scale = *reinterpret_cast<const float*>(record + 2 * kRank);
  }

  __device__ uint64_t weights_operand(int slot) const { return wgmma_operand(smem.weights[slot], 1024, 128); }

  // Start a tile's MMAs. Until wgmma_wait `d` belongs to the tensor cores.
  __device__ static void multiply(int32_t (&d)[32], const Latents& u, uint64_t weights) {
    wgmma_fence();
    wgmma_s8_n64<false>(d, u.hi[0].x, u.lo[0].x, u.hi[0].y, u.lo[0].y, weights);
    wgmma_s8_n64<true>(d, u.hi[0].z, u.lo[0].z, u.hi[0].w, u.lo[0].w, weights + 128);
#pragma unroll
    for (int k = 1; k < 4; k++) {
      wgmma_s8_n64<true>(d, u.hi[k].x, u.lo[k].x, u.hi[k].y, u.lo[k].y, weights + 256 * k);
      wgmma_s8_n64<true>(d, u.hi[k].z, u.lo[k].z, u.hi[k].w, u.lo[k].w, weights + 256 * k + 128);
    }
    wgmma_commit();
  }

  // Start bringing this CTA's base logits of step 0 to L2; those of later steps follow tile by tile. (All of the next step's at once, while
  // the CTAs agree: they agree later, 98 to 104 us at 64 requests.)
  __device__ void prefetch_base(const Request& r) const {
    const int rows = min(kRows, p.vocab - static_cast<int>(blockIdx.x) * kRows) / 8 * 8;
    const uint16_t* source = p.base + r.id * p.base_request_stride + blockIdx.x * kRows;
    if (reinterpret_cast<uint64_t>(source) % 16 == 0) prefetch_bulk_l2(source, 2 * rows);
  }

  // Where a warp stands.
  struct Seat {
    int half, member, copy, lane;
    int first_request;        // of the warp
    bool fills;               // this thread keeps its member's ring full: one of its last warp
    uint64_t resident, ring;  // operands: its member's first resident tile and first stage
    Request request;          // of the thread
  };

  __device__ __forceinline__ Seat seat() const {
    const int team = __shfl_sync(~0u, threadIdx.x / 128, 0), half = team / kMembers, member = team % kMembers;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, copy = warp / kWarpsPerCopy;
    const int first_request = half * 32 + warp % kWarpsPerCopy * 8;
    return {.half = half,
            .member = member,
            .copy = copy,
            .lane = lane,
            .first_request = first_request,
            .fills = half == S.halves - 1 && threadIdx.x % 128 == 96,  // (from `warp` and `lane`: a spill at V = 248,320)
            .resident = weights_operand(member * kResident),
            .ring = weights_operand(S.resident + member * kStages),
            .request = request_of(first_request + lane / kLanes)};
  }

  // Whether a warp scores its member's tile i.
  __device__ __forceinline__ bool owns(const Seat& seat, int i) const { return seat.first_request < p.batch && i % kCopies == seat.copy; }

  static constexpr int kStride = kMembers * kTileRows;  // rows from a member's tile to its next

  // The logits of a thread, in its member's first tile and the vocabulary.
  struct Logits {
    int first;                    // row within the CTA
    const uint16_t* source;       // base logits of the step
    uint16_t* kept;               // corrected logits of the step go here
    int whole, kept_whole, left;  // how many of its tiles are loaded and kept as vectors; rows to the end of the vocabulary
    uint4 base[2];                // of the tile that comes next
  };

  __device__ __forceinline__ Logits logits_of(const Seat& seat) const {
    const int first = local_row(seat.member), first_row = blockIdx.x * kRows + first;
    const uint16_t* source = p.base + seat.request.id * p.base_request_stride + first_row;
    const int inside = max(p.vocab - first_row - kChunkDistance - kChunkRows + kStride, 0) / kStride;
    const bool base_aligned = reinterpret_cast<uint64_t>(source) % 16 == 0 && p.base_step_stride % 8 == 0;
    const bool kept_aligned =
        (reinterpret_cast<uint64_t>(p.logits + first_row) / 2 | p.logits_request_stride | p.logits_step_stride) % 8 == 0;
    // Kept in registers, or they would be computed anew for every tile. And `left` needs p.vocab: who reads a parameter waits for base
    // logits under way as well, in whose scoreboard it is counted (6 of 162 us: 64 requests, T = 1, seven steps).
    int whole = base_aligned ? inside : 0, kept_whole = kept_aligned ? inside : 0, left = p.vocab - first_row;
    asm("" : "+r"(whole), "+r"(kept_whole), "+r"(left));
    Logits logits{first, source, nullptr, whole, kept_whole, left, {}};
    if (seat.request.live && seat.copy < kTiles)
      load_base(logits.base, source + seat.copy * kStride, left - seat.copy * kStride, seat.copy < whole);
    return logits;
  }

  // The base logits of this warp's tile after i, after its last one of the next step's first; those of the tile after that start towards
  // L2, a sector a lane.
  __device__ __forceinline__ void load_next_base(Logits& logits, const Seat& seat, int i, int step) const {
    const bool more = i + kCopies < kTiles;
    const int next = more ? i + kCopies : seat.copy;
    if (!more) logits.source += p.base_step_stride;
    if (seat.request.live && (more || step + 1 < p.steps)) {
      load_base(logits.base, logits.source + next * kStride, logits.left - next * kStride, next < logits.whole);
      if (next + kCopies < logits.whole && next + kCopies < kTiles)
        prefetch_l2(logits.source + (next + kCopies) * kStride + seat.lane % kLanes * kChunkRows);
    }
  }

  // What a thread has found in a step.
  struct Found {
    Best best;
    uint32_t pairs[8];  // corrected logits of the last tile, not yet considered
  };

  __device__ __forceinline__ void consider(Found& found, const Logits& logits, const Seat& seat, int i) const {
    if constexpr (S.sampling) {
      if (seat.request.keeps) keep_logits(logits.kept + i * kStride, logits.left - i * kStride, i < logits.kept_whole, found.pairs);
    }
    offer(found.best, seat.request, i, found.pairs);
  }

  // Tile i of a member; under its MMAs the tile before is considered. `streamed`: what it is, a constant as a rule.
  template <class Streamed>
  __device__ __forceinline__ void score_tile(Found& found, Logits& logits, const Seat& seat, const Latents& u, int step, int i,
                                             Streamed streamed) const {
    const Place place = place_of(seat.member, i, step, streamed);
    if (streamed || step == 0) wait_barrier(&smem.full[place.slot], place.phase);
    int32_t d[32];
    // In a loop only a new descriptor, less its index, is known to be the same for all lanes (`wgmma_operand`).
    multiply(d, u,
             kTiles <= kUnrolled ? (streamed ? seat.ring : seat.resident) + place.index * (kTileBytes / 16) : weights_operand(place.slot));
    if (i > 0 && owns(seat, i - 1)) consider(found, logits, seat, i - 1);
    wgmma_wait(d);
    if (streamed && seat.lane == 0) cuda::ptx::mbarrier_arrive(&smem.empty[place.slot - S.resident]);
    if (owns(seat, i)) {
      float scale[16];
      load_scales(scale, smem.row_scale + logits.first + i * kStride, u.scale);
      correct(found.pairs, d, logits.base, scale);
      if constexpr (S.sampling) {
        if (seat.request.warp_draws && i / kCopies % kLanes == 0) draw_gumbels(seat.request, step, seat.member + i * kMembers);
      }
      load_next_base(logits, seat, i, step);
    }
    // As a rule the other half has its sums by now.
    if (streamed && seat.fills) refill(seat.member, i, step);
  }

  // The best of the request's four lanes, for the exchange.
  __device__ __forceinline__ void hand_in(Best& best, const Logits& logits, const Seat& seat, int step) const {
    const int place = chosen(seat.request, step, seat.member + best.tile * kMembers, best);
    const int row = logits.first + best.tile * kStride + place / kChunkRows * kChunkDistance + place % kChunkRows;
    uint64_t entry = static_cast<uint64_t>(score_order(best.score)) << 16 | (kLastRow - row);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) entry = max(entry, __shfl_xor_sync(~0u, entry, distance));
    if (seat.lane % kLanes == 0) smem.best[seat.request.id][seat.member * kCopies + seat.copy] = entry;
  }

  __device__ __forceinline__ void score_step(Logits& logits, const Seat& seat, int step) const {
    Latents u;
    load_latents(u, seat.request);
    Found found{.best = {kMinusInfinity, 0, {kNobody, kNobody, kNobody, kNobody, kNobody, kNobody, kNobody, kNobody}}};
    if constexpr (S.sampling)
      if (seat.request.keeps)
        logits.kept =
            p.logits + seat.request.id * p.logits_request_stride + step * p.logits_step_stride + blockIdx.x * kRows + logits.first;
    if constexpr (kTiles <= kUnrolled) {
      unrolled<kTiles>([&](auto i) { score_tile(found, logits, seat, u, step, i, cuda::std::bool_constant<streams(i)>{}); });
    } else {
#pragma unroll 1
      for (int i = 0; i < kTiles; i++) score_tile(found, logits, seat, u, step, i, streams(i));
    }
    if (owns(seat, kTiles - 1)) consider(found, logits, seat, kTiles - 1);
    if (seat.first_request < p.batch) hand_in(found.best, logits, seat, step);
  }

  __device__ __forceinline__ void walk() {
    const Seat place = seat();
    if (place.fills) fill_all(place.member);
    if (place.request.live && place.member == 0 && place.copy == 0 && place.lane % kLanes == 0) prefetch_base(place.request);
    if (const int request = own_request(); request < p.batch)
      fetch_latent(request, static_cast<uint32_t>(max(int64_t{0}, min(p.anchor[request], static_cast<int64_t>(p.latent_vocab) - 1))));
    publish_latents(place.half);
    Logits logits = logits_of(place);
    for (int step = 0; step < p.steps; step++) {
      score_step(logits, place, step);
      sync_half(place.half);
      agree(step);
      publish_latents(place.half);
    }
  }

  // ---- the exchange ----

  // A request has lanes of its own in one warp, which agree with their peers on it and fetch its latent.
  static constexpr int kRequestLanes = 32 / kRequestsPerWarp;

  __device__ static int own_request() { return threadIdx.x / 32 * kRequestsPerWarp + threadIdx.x % 32 / kRequestLanes; }

  // The lanes of a request: start copying its latent.
  __device__ void fetch_latent(int request, uint32_t token) const {
    const int lane = threadIdx.x % kRequestLanes;
    const uint8_t* record = p.latents + static_cast<uint64_t>(token) * kRecordBytes;
#pragma unroll
    for (int i = 16 * lane; i < 2 * kRank; i += 16 * kRequestLanes) copy_async_16(smem.latents[request] + i, record + i);
    if (lane == 0) copy_async_4(smem.latents[request] + 2 * kRank, record + 2 * kRank);
  }

  // A step's barrier. The halves meet at their rings only.
  __device__ static void sync_half(int half) {
    if constexpr (S.halves == 1)
      __syncthreads();
    else
      barrier_sync(1 + half, kThreads / 2);
  }

  // The latents that this thread fetched are there for all of its half.
  __device__ static void publish_latents(int half) {
    copy_async_wait();
    sync_half(half);
  }

  // The best entry of this CTA, in all lanes of the request.
  __device__ uint64_t best_of(int request) const {
    if constexpr (kRequestsPerWarp == 1) {
      const uint64_t own = smem.best[request][threadIdx.x % kCandidates];
      const uint32_t order = static_cast<uint32_t>(own >> 16), top = __reduce_max_sync(~0u, order);
      return static_cast<uint64_t>(top) << 16 | __reduce_max_sync(~0u, order == top ? static_cast<uint32_t>(own) & kLastRow : 0);
    }
    uint64_t best = smem.best[request][0];
#pragma unroll
    for (int i = 1; i < kCandidates; i++) best = max(best, smem.best[request][i]);
    return best;
  }

  // Agree with the other CTAs on the token of each request, and fetch its latent: that of whoever leads, before it has won.
  __device__ void agree(int step) const {
    const int request = own_request();
    bool waiting = request < p.batch;
    if (waiting) {
      const uint64_t mine = best_of(request);
      if (threadIdx.x % kRequestLanes == 0)
        exchange.post_entry(step, request, static_cast<uint32_t>(mine >> 16), key_row(static_cast<uint32_t>(mine)));
    }
    uint64_t leader = 0, seen = 0;
    [[maybe_unused]] int polls = 0;
    while (__any_sync(~0u, waiting)) {
      uint32_t arrived = 0;
      do {  // nothing but looking: what else a turn did would come on top of the way to L2 and back
        WTS_COUNT_POLL(polls, step)
        if (waiting) arrived = exchange.arrived(step, request, leader);
      } while (!__any_sync(~0u, arrived >= exchange.ctas || leader != seen));
      const bool complete = arrived >= exchange.ctas;
      const Winner winner = Exchange::winner_of(leader);
      const uint32_t row = winner.cta * kRows + winner.row;
      if (leader != seen && step + 1 < p.steps) {
        copy_async_wait();  // a later copy to the same place must not be overtaken
        fetch_latent(request, min(row, static_cast<uint32_t>(p.latent_vocab - 1)));
      }
      seen = leader;
      waiting &= !complete;
      if (complete && blockIdx.x == 0 && threadIdx.x % kRequestLanes == 0) p.tokens[request * p.tokens_request_stride + step] = row;
    }
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : smem.full) cuda::ptx::mbarrier_init(&barrier, 1);
      for (uint64_t& barrier : smem.empty) cuda::ptx::mbarrier_init(&barrier, 4 * S.halves);
      cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
    }
    exchange.clear_other_bank(threadIdx.x, kThreads);
    for (int i = threadIdx.x; i < kRows; i += kThreads) smem.row_scale[i] = p.row_scale[blockIdx.x * kRows + i];
    if constexpr (S.sampling)
      if (threadIdx.x < p.batch) {
        const RowTemperature temperature = RowTemperature::of(p.temperature[threadIdx.x]);
        smem.drawing[threadIdx.x] = {temperature.inverse, temperature.scale, philox_key(p.seed[threadIdx.x])};
      }
    __syncthreads();
    walk();
    // The other half may still walk. But whoever has posted had read it before, and no half ends before all CTAs have posted.
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.round = exchange.round + 1;
  }
};

template <BatchedShape S>
__device__ void walk_batched(const Params& p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  Batched<S>{p, *reinterpret_cast<typename Batched<S>::Smem*>(dynamic_smem)}.run();
}

}  // namespace wts
