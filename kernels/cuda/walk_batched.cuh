// A whole walk of up to 64 requests in one launch, int8 W2 in shared memory as far as it fits; the rest of a CTA's rows comes from L2 again
// at every step, through rings that stay full across steps: who scores a streamed tile asks for the one that takes its place. (A warp of
// its own for that leaves 96 registers a thread instead of 128, and everything spills.)
//
// wgmma m64n64k32: A is the requests' latents in registers (row 16 w + g is plane hi of request 8 w + g, row 16 w + 8 + g its plane lo), B
// a tile of 64 rows of W2. So a thread holds one request and, by the packing, 16 consecutive rows of each tile: both planes of a logit
// meet in it, base logits and corrected logits are whole 32-byte sectors, and one running candidate a thread is enough. The 64 rows of A
// are 32 requests; above that two halves of the warpgroups take 32 requests each.
//
// Two pairs of warpgroups take turns at the tensor cores: while one pair multiplies, the other turns sums into candidates. Left alone they
// all multiply at once, then all wait for their arithmetic: 2,300 clocks a round instead of 2,000.
#pragma once
#include <cuda/ptx>

#include "common/exchange.cuh"
#include "common/latent.cuh"
#include "common/noise.cuh"
#include "common/params.cuh"
#include "common/score.cuh"

namespace wts {

struct BatchedShape {
  int tiles;      // 64-row tiles of a CTA
  int resident;   // of these, how many stay in shared memory
  int stages;     // for the others, of all rings together: a multiple of 4, or 0 if there are none
  int halves;     // 1: up to 32 requests, 2: up to 64
  bool sampling;  // rule GROUPS for rows with temperature > 0
  int max_ctas;
};

template <BatchedShape S>
struct Batched {
  static constexpr int kTeams = 4;  // warpgroups
  static constexpr int kThreads = kTeams * 128;
  static constexpr int kMembers = kTeams / S.halves;  // warpgroups that share the tiles of one half
  static constexpr int kRecordBytes = LatentInt8<1>::kRecordBytes;
  static constexpr int kTileRows = 64, kTileBytes = kTileRows * kRank;
  static constexpr int kRows = S.tiles * kTileRows;  // of a CTA
  static_assert(kRows <= static_cast<int>(kLastRow), "a key has 16 bits for a row");
  static constexpr int kStreamed = S.tiles - S.resident;
  static constexpr int kRequests = 32 * S.halves;
  static constexpr uint32_t kNobody = 0xFF80FF80u;  // two -inf
  using Exchange = KeyCountPair<S.max_ctas, kRequests>;

  // How a request draws; in shared memory, since registers are short.
  struct alignas(16) Drawing {
    float inverse, scale;  // of its temperature
    PhiloxKey key;
  };

  struct Smem {
    alignas(128) uint8_t weights[S.resident + S.stages][kTileBytes];  // the ring last
    alignas(16) float row_scale[kRows];
    uint64_t best[kMembers][kRequests];  // order of the score and inverted row of each member's best
    uint32_t tokens[kRequests];          // what the next step conditions on
    int newest[kMembers];                // the last streamed tile that each member asked for
    Drawing drawing[S.sampling ? kRequests : 1];
    alignas(8) uint64_t full[S.resident + S.stages];
    uint64_t empty[S.stages ? S.stages : 1];
  };

  const Params& p;
  Smem& smem;
  const Exchange exchange{p.mail, *p.round, gridDim.x};

  // The tiles member, member + kMembers, ... of a CTA are a member's. It has rings of its own: one ring for all would let a fast warpgroup
  // see the phase before last of a stage and read an old tile.
  struct Share {
    static constexpr int kStages = S.stages / kMembers;  // 0, 1 or 2
    static_assert((kStages & (kStages - 1)) == 0 && kMembers * 32 >= S.tiles, "a member's tiles are the bits of a word");

    int member, tiles, first_slot;
    uint32_t streamed;  // bit i: tile i of the member is streamed. They stand evenly, so that their stages have time to fill.

    __device__ static Share of(int member) {
      const int tiles = (S.tiles - member + kMembers - 1) / kMembers, resident = (S.resident - member + kMembers - 1) / kMembers;
      Share share{member, tiles, member * (S.resident / kMembers) + min(member, S.resident % kMembers), 0};
      for (int i = 0, sum = 0; i < tiles && kStages; i++) {
        sum += tiles - resident;
        if (sum >= tiles) sum -= tiles, share.streamed |= 1u << i;
      }
      return share;
    }
    __device__ bool streams(int i) const { return streamed >> i & 1; }
    __device__ int resident_slot(int i) const { return first_slot + i - __popc(streamed & ((1u << i) - 1)); }
    __device__ int stage(int sequence) const { return member * kStages + (sequence & (kStages - 1)); }
    __device__ int parity(int sequence) const { return sequence / (kStages ? kStages : 1) & 1; }
    // The streamed tile after tile i; after the last comes the first again.
    __device__ int next_streamed(int i) const {
      const uint32_t later = streamed & ~((2u << i) - 1);
      return __ffs(later ? later : streamed) - 1;
    }
  };

  // ---- filling shared memory: one thread of each member ----

  __device__ void fill(int slot, int tile, uint64_t policy) const {
    const uint8_t* source = reinterpret_cast<const uint8_t*>(p.weights) + (static_cast<int64_t>(blockIdx.x) * S.tiles + tile) * kTileBytes;
    cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, &smem.full[slot],
                                         kTileBytes);
    copy_bulk(smem.weights[slot], source, kTileBytes, &smem.full[slot], policy);
  }

  // In the order in which step 0 wants them.
  __device__ void fill_all(const Share& share) const {
    const uint64_t pass = l2_policy(0), keep = l2_policy(1);
    int streamed = 0, newest = 0;
    for (int i = 0; i < share.tiles; i++) {
      const int tile = share.member + i * kMembers;
      if (!share.streams(i))
        fill(share.resident_slot(i), tile, pass);
      else if (streamed < Share::kStages)
        fill(S.resident + share.stage(streamed++), tile, keep), newest = i;
    }
    // A step may stream fewer tiles than there are stages.
    for (; share.streamed && p.steps > 1 && streamed < Share::kStages; streamed++)
      newest = share.next_streamed(newest), fill(S.resident + share.stage(streamed), share.member + newest * kMembers, keep);
    smem.newest[share.member] = newest;
  }

  // The member's streamed tile number `sequence` of the walk has been scored: its stage takes the one after the newest, in this step or the
  // next.
  __device__ void refill(const Share& share, int sequence) const {
    if (sequence + Share::kStages >= p.steps * __popc(share.streamed)) return;
    wait_barrier(&smem.empty[share.stage(sequence)], share.parity(sequence));
    const int newest = share.next_streamed(smem.newest[share.member]);
    smem.newest[share.member] = newest;
    fill(S.resident + share.stage(sequence), share.member + newest * kMembers, l2_policy(1));
  }

  // ---- the warpgroups that score ----

  // What a thread knows of its request.
  struct Request {
    int id;
    bool live;  // part of the batch
    bool draws;
    bool keeps;  // its corrected logits
  };

  // A thread's best group of 16 rows so far.
  struct Best {
    float score;
    int tile;
    uint32_t pairs[8];  // its bf16 logits, two a word
  };

  __device__ Request request_of(int id) const {
    const bool live = id < p.batch, draws = S.sampling && live && p.temperature[id] > 0;
    return {id, live, draws, draws && p.logits};
  }

  // Row 0 of a step's base logits.
  __device__ const uint16_t* base_of(const Request& r, int step) const {
    return p.base + r.id * p.base_request_stride + step * p.base_step_stride;
  }

  // 16 bf16 of rows `row` to `row` + 15; what is past the vocabulary is -inf. `step_base`: row 0 of the step.
  __device__ void load_base(uint4 (&chunk)[2], const uint16_t* step_base, int row, bool aligned, uint64_t policy) const {
    const uint16_t* source = step_base + row;
    if (aligned && row + 16 <= p.vocab) {
      chunk[0] = load_with_policy(reinterpret_cast<const uint4*>(source), policy);
      chunk[1] = load_with_policy(reinterpret_cast<const uint4*>(source) + 1, policy);
      return;
    }
    constexpr uint32_t kMinusInf = 0xFF80;
    const int left = p.vocab - row;
    uint32_t pairs[8];
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      const uint32_t low = 2 * i < left ? source[2 * i] : kMinusInf, high = 2 * i + 1 < left ? source[2 * i + 1] : kMinusInf;
      const uint32_t both = low | high << 16;
#pragma unroll
      for (int j = 0; j < 8; j++) pairs[j] = i == j ? both : pairs[j];  // rare, so small
    }
    chunk[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    chunk[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  }

  __device__ void keep_logits(const Request& r, int step, int row, const uint32_t (&pairs)[8]) const {
    const int left = p.vocab - row;
    uint16_t* target = p.logits + r.id * p.logits_request_stride + step * p.logits_step_stride + row;
    if (left >= 16 && reinterpret_cast<uint64_t>(target) % 16 == 0) {
      reinterpret_cast<uint4*>(target)[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      reinterpret_cast<uint4*>(target)[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
      return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (i < left) target[i] = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
  }

  // Corrected logits of a tile, as bf16 pairs, from its accumulators: rule INT8.
  __device__ static void correct(uint32_t (&pairs)[8], const int32_t (&d)[32], const uint4 (&base)[2], const float* row_scale,
                                 float latent_scale) {
    const uint32_t bits[8] = {base[0].x, base[0].y, base[0].z, base[0].w, base[1].x, base[1].y, base[1].z, base[1].w};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float4 scale = *reinterpret_cast<const float4*>(row_scale + 2 * j);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = j + h;
        const float low = score_int8(__uint_as_float(bits[i] << 16), h ? scale.z : scale.x, latent_scale, d[4 * i] * 256 + d[4 * i + 2]);
        const float high =
            score_int8(__uint_as_float(bits[i] & 0xFFFF0000u), h ? scale.w : scale.y, latent_scale, d[4 * i + 1] * 256 + d[4 * i + 3]);
        pairs[i] = pack_bf16(low, high);
      }
    }
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

  // Random word `which` of a group: 0 for its Gumbel, 1 for its row.
  __device__ uint32_t word(const Request& r, const PhiloxKey& key, int step, int group, int which) const {
    const Words words = philox(noise_counter(group / kGroupsPerWords, step, r.id, exchange.round, kDraftGroups), key);
    return group % 2 ? words.w[2 + which] : words.w[which];
  }

  // Rule GROUPS of kernels/sampling.py.
  __device__ float score(const Request& r, int step, int row, const uint32_t (&pairs)[8]) const {
    const float top = largest(pairs);
    if constexpr (S.sampling) {
      if (__any_sync(~0u, r.draws)) {
        const Drawing drawing = smem.drawing[r.id];
        const float finite = group_top(top);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) sum = add_rn(sum, row_weight(logit(pairs, i), finite, drawing.scale));
        const float drawn = group_score(finite, sum, drawing.inverse, word(r, drawing.key, step, row / kGroupRows, 0));
        return r.draws && top > kMinusInfinity ? drawn : top;
      }
    }
    return top;
  }

  // The row of the best group that is this thread's candidate.
  __device__ int chosen(const Request& r, int step, const Best& best, int first) const {
    const float top = largest(best.pairs);
    int place = 0;
#pragma unroll
    for (int i = 15; i >= 0; i--) place = logit(best.pairs, i) == top ? i : place;
    if constexpr (S.sampling) {
      if (__any_sync(~0u, r.draws)) {
        const Drawing drawing = smem.drawing[r.id];
        const float finite = group_top(top);
        float weight[16], sum = 0, running = 0;
        int drawn = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) sum = add_rn(sum, weight[i] = row_weight(logit(best.pairs, i), finite, drawing.scale));
        const float threshold = row_threshold(sum, word(r, drawing.key, step, first / kGroupRows, 1));
#pragma unroll
        for (int i = 0; i < 16; i++) drawn += (running = add_rn(running, weight[i])) <= threshold;
        if (r.draws && top > kMinusInfinity) place = min(drawn, 15);
      }
    }
    return place;
  }

  // A tile's logits, and whether this thread's group of 16 is its best so far.
  __device__ void offer(Best& best, const Request& r, int step, int tile, const int32_t (&d)[32], const uint4 (&base)[2],
                        float latent_scale) const {
    const int local = tile * kTileRows + threadIdx.x % 4 * 16, row = blockIdx.x * kRows + local;
    uint32_t pairs[8];
    correct(pairs, d, base, smem.row_scale + local, latent_scale);
    if constexpr (S.sampling) {
      if (r.keeps) keep_logits(r, step, row, pairs);
    }
    const float found = score(r, step, row, pairs);
    const bool better = found > best.score;
    best.score = better ? found : best.score;
    best.tile = better ? tile : best.tile;
#pragma unroll
    for (int i = 0; i < 8; i++) best.pairs[i] = better ? pairs[i] : best.pairs[i];
  }

  // The pair's turn at the tensor cores, and the other pair's.
  __device__ static void take_turn(int pair) { named_barrier_sync(1 + pair, kThreads); }
  __device__ static void give_turn(int pair) { named_barrier_arrive(2 - pair, kThreads); }

  // Bring this CTA's base logits of a step to L2.
  __device__ void prefetch_base(const Request& r, int step) const {
    if (step >= p.steps) return;
    const int rows = min(kRows, p.vocab - static_cast<int>(blockIdx.x) * kRows) / 8 * 8;
    const uint16_t* source = base_of(r, step) + blockIdx.x * kRows;
    if (reinterpret_cast<uint64_t>(source) % 16 == 0) prefetch_bulk_l2(source, 2 * rows);
  }

  __device__ void score_steps() {
    const int team = threadIdx.x / 128, half = team / kMembers, pair = team / 2;
    const Share share = Share::of(team % kMembers);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Request r = request_of(half * 32 + warp * 8 + g);
    const int first = blockIdx.x * kRows + 16 * t;  // row of this thread in tile 0
    const bool any_live = half * 32 + warp * 8 < p.batch;
    const bool prefetches = r.live && share.member == 0 && t == 0, fills = half == S.halves - 1 && warp == 0 && lane == 0;
    const uint64_t pass = l2_policy(0);
    constexpr int kRounds = (S.tiles + kMembers - 1) / kMembers;
    if (fills) fill_all(share);
    if (prefetches) prefetch_base(r, 0);
    int sequence = 0;  // streamed tiles this member has met
    for (int step = 0; step < p.steps; step++) {
      // The latent of the thread's request: lane (g, t) holds chunks t, t + 4, ... of both planes; each serves two k-steps.
      uint4 hi[4] = {}, lo[4] = {};
      float latent_scale = 0;
      if (r.live) {
        const uint8_t* record = p.latents + static_cast<uint64_t>(smem.tokens[r.id]) * kRecordBytes;
        const uint4* planes = reinterpret_cast<const uint4*>(record) + t;
#pragma unroll
        for (int i = 0; i < 4; i++) hi[i] = planes[4 * i], lo[i] = planes[kRank / 16 + 4 * i];
        latent_scale = *reinterpret_cast<const float*>(record + 2 * kRank);
      }
      if (prefetches) prefetch_base(r, step + 1);
      const uint16_t* step_base = base_of(r, step);
      const bool aligned = reinterpret_cast<uint64_t>(step_base) % 16 == 0;
      Best best{kMinusInfinity, share.member, {kNobody, kNobody, kNobody, kNobody, kNobody, kNobody, kNobody, kNobody}};
      if (pair == 1) give_turn(pair);
#pragma unroll 1
      for (int i = 0; i < kRounds; i++) {
        const int tile = share.member + i * kMembers;
        const bool works = i < share.tiles;
        const bool streams = works && share.streams(i);
        const int slot = streams ? S.resident + share.stage(sequence) : share.resident_slot(i);
        uint4 base[2];  // from L2 while this pair waits for its turn
        if (works && r.live) load_base(base, step_base, first + tile * kTileRows, aligned, pass);
        if (works) wait_barrier(&smem.full[slot], streams ? share.parity(sequence) : 0);
        take_turn(pair);
        int32_t d[32];
        if (works) {
          const uint64_t b = wgmma_operand(smem.weights[slot], 1024, 128);
          wgmma_fence();
          wgmma_s8_n64<false>(d, hi[0].x, lo[0].x, hi[0].y, lo[0].y, b);
          wgmma_s8_n64<true>(d, hi[0].z, lo[0].z, hi[0].w, lo[0].w, b + 128);
#pragma unroll
          for (int k = 1; k < 4; k++) {
            wgmma_s8_n64<true>(d, hi[k].x, lo[k].x, hi[k].y, lo[k].y, b + 256 * k);
            wgmma_s8_n64<true>(d, hi[k].z, lo[k].z, hi[k].w, lo[k].w, b + 256 * k + 128);
          }
          wgmma_commit();
          wgmma_wait();
        }
        if (pair == 0 || i + 1 < kRounds) give_turn(pair);
        if (!works) continue;
        if (streams && lane == 0) cuda::ptx::mbarrier_arrive(&smem.empty[slot - S.resident]);
        // With one half, the stage is free now; with two, the other half may still need it, as a rule not after the epilogue.
        if (S.halves == 1 && streams && fills) refill(share, sequence);
        if (any_live) offer(best, r, step, tile, d, base, latent_scale);
        if (S.halves == 2 && streams && fills) refill(share, sequence);
        sequence += streams;
      }
      if (any_live) {
        const int row = best.tile * kTileRows + 16 * t + chosen(r, step, best, first + best.tile * kTileRows);
        uint64_t entry = static_cast<uint64_t>(score_order(best.score)) << 16 | (kLastRow - row);
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) entry = max(entry, __shfl_xor_sync(~0u, entry, distance));
        if (t == 0) smem.best[share.member][r.id] = entry;
      }
      __syncthreads();
      agree(step);
      __syncthreads();
    }
  }

  // Thread `request` of the first warps: this CTA's best of all members, then everybody's.
  __device__ void agree(int step) {
    const int request = threadIdx.x;
    if (request >= p.batch) return;
    uint64_t mine = smem.best[0][request];
#pragma unroll
    for (int i = 1; i < kMembers; i++) mine = max(mine, smem.best[i][request]);
    const uint32_t row = key_row(static_cast<uint32_t>(mine));
    exchange.post_entry(step, request, static_cast<uint32_t>(mine >> 16), row);
    uint64_t leader, seen = 0;
    [[maybe_unused]] int polls = 0;
    bool complete;
    do {
      WTS_COUNT_POLL(polls, step)
      complete = exchange.complete(step, request, leader);
      // The CTA whose row takes the lead starts bringing that row of W1 from HBM to L2, while others still arrive.
      if (leader != seen && Exchange::winner_of(leader).cta == blockIdx.x)
        prefetch_bulk_l2(p.latents + static_cast<uint64_t>(token_of(Exchange::winner_of(leader))) * kRecordBytes, kRecordBytes);
      seen = leader;
    } while (!complete);
    const Winner winner = Exchange::winner_of(leader);
    smem.tokens[request] = token_of(winner);
    if (blockIdx.x == 0) p.tokens[request * p.tokens_request_stride + step] = winner.cta * kRows + winner.row;
  }

  __device__ uint32_t token_of(Winner winner) const {
    return min(winner.cta * kRows + winner.row, static_cast<uint32_t>(p.latent_vocab - 1));
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : smem.full) cuda::ptx::mbarrier_init(&barrier, 1);
      for (uint64_t& barrier : smem.empty) cuda::ptx::mbarrier_init(&barrier, 4 * S.halves);
      cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
    }
    exchange.clear_other_bank(threadIdx.x, kThreads);
    for (int i = threadIdx.x; i < kRows; i += kThreads) smem.row_scale[i] = p.row_scale[blockIdx.x * kRows + i];
    if (threadIdx.x < p.batch)
      smem.tokens[threadIdx.x] =
          static_cast<uint32_t>(max(int64_t{0}, min(p.anchor[threadIdx.x], static_cast<int64_t>(p.latent_vocab) - 1)));
    if constexpr (S.sampling)
      if (threadIdx.x < p.batch) {
        const RowTemperature temperature = RowTemperature::of(p.temperature[threadIdx.x]);
        smem.drawing[threadIdx.x] = {temperature.inverse, temperature.scale, philox_key(p.seed[threadIdx.x])};
      }
    __syncthreads();
    score_steps();
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.round = exchange.round + 1;
  }
};

template <BatchedShape S>
__device__ void walk_batched(const Params& p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  Batched<S>{p, *reinterpret_cast<typename Batched<S>::Smem*>(dynamic_smem)}.run();
}

}  // namespace wts
