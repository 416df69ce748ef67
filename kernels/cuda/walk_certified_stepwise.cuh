// The certified walk of many requests: a CTA a request follows its token, step by step. No tables are made, for with a chain of its own on
// every other SM what follows other tokens need not be known.
//
// Little of a step hangs on the token before it, and what does is one warp's. A leading CTA has four kinds of warps, each as far ahead as
// it can be:
//   pick      candidates of a step, as soon as its slices are offered
//   multiply  gather their rows of W2, each warp those of 16; multiply them with the latent of the token before, once it is there
//   decide    one warp: the best product and the token's list, the proof; it brings what the next step needs of its token
//   offer     slices of base logits, as all warps of CTAs that lead none do
// A step that is not proved is searched by the warps that multiply, in what was offered: seldom is there more to look at. Where every row
// can win they read all of W2, one CTA alone: right, and milliseconds long. All CTAs are resident. Offers wait for nobody, picks for offers
// and for earlier steps, others for picks: nobody waits for ever.
//
// 32 warps of 64 registers, where the walk with tables has 16 of 128: a warp that offers waits for its own instructions, one after the
// other, so twice as many go through base logits faster. There are no registers for W2 rows then: they stand in shared memory.
#pragma once
#include "certified/lists.cuh"
#include "certified/offers.cuh"
#include "certified/reach.cuh"
#include "certified/rows.cuh"

namespace wts {

template <CertifiedShape S>
struct Stepwise {
  using Rule = RowRule<S.sampling>;
  using List = BiasList<S>;
  static constexpr int kThreads = 32 * S.warps;
  // Warps of a leader, in this order: the one that decides, those that multiply, pick, and offer.
  static constexpr int kMultiplying = S.candidates / 16, kPicking = Pick<S>::kWarps, kLeading = 1 + kMultiplying + kPicking;
  static constexpr int kOffering = S.warps - kLeading;
  static constexpr int kKept = 3;  // steps: one that is decided, one that is gathered, one that is picked
  static_assert(kOffering > 0 && S.previous == S.candidates);

  // Barriers of a leader, between those that pick and multiply, or multiply and decide. Ready: a step is picked, and the one before it is
  // multiplied. Told: its rows are there, and the latent of the token before, or another task. Done: that is done. Picked: of those that
  // pick. Nobody arrives without waiting (barrier.arrive): whoever would go on early has little to do then, and racecheck takes it for a
  // race.
  enum Meeting { kReady = 1, kTold, kDone, kPicked };
  static constexpr int kWithPicks = 32 * (kMultiplying + kPicking), kWithDecision = 32 * (kMultiplying + 1);

  // What those that multiply do next.
  enum class Task { kMultiply, kSearch, kEnd };

  // What picks leave of a step.
  struct Step {
    typename Pick<S>::Set set;
    Rule rule;
    float base[S.candidates], noise[S.candidates];
  };
  using Slices = typename Offer<S>::Smem;  // of a warp that offers
  // Rows of W2 take the place of slices: those who would look through them lead.
  static constexpr int kRowBytes = S.candidates * sizeof(Row), kSliceBytes = kLeading * sizeof(Slices);

  struct Smem {
    alignas(16) uint8_t rows[kRowBytes > kSliceBytes ? kRowBytes : kSliceBytes];
    Slices offers[kOffering];
    Step steps[kKept];
    alignas(16) Row latent;  // of the token before
    alignas(16) int32_t listed[S.list];
    alignas(16) uint16_t biases[S.list];
    float bound;
    uint64_t best[kMultiplying];
    typename Reach<S>::Smem reach[kMultiplying];
    Task task;
    int step;         // to search
    uint32_t needed;  // there
    uint32_t round;   // launches before this one
  };
  static_assert(sizeof(Smem) <= S.smem_bytes, "kernels/backends/certified_sm80.py adds it up");

  const CertifiedParams& p;
  Smem& smem;

  __device__ static int warp() { return fresh_thread() / 32; }
  __device__ static int lane() { return fresh_thread() % 32; }
  __device__ static int request() { return blockIdx.x; }
  __device__ int pair(int step) const { return request() * p.walk.steps + step; }
  __device__ Row* rows() const { return reinterpret_cast<Row*>(smem.rows); }

  // Warps that pick: step after step.
  __device__ void pick() const {
#pragma unroll 1
    for (int step = 0; step < p.walk.steps; step++) {
      const int own = warp() - 1 - kMultiplying;
      Step& made = smem.steps[step % kKept];
      if (own == 0 && lane() == 0) made.set.reset(), made.rule = Rule::of(p.walk, request(), step, smem.round);
      __syncwarp();
      barrier_sync(kPicked, 32 * kPicking);
      Pick<S>::one(p, pair(step), own, made.set, smem.round);
      barrier_sync(kPicked, 32 * kPicking);
      weigh_alone(made, base_row(p, request(), step));
      barrier_sync(kReady, kWithPicks);
    }
  }

  // Base logits of the candidates, and their noise.
  __device__ void weigh_alone(Step& made, const uint16_t* base) const {
#pragma unroll 1
    for (int n = fresh_thread() - 32 * (1 + kMultiplying); n < S.candidates; n += 32 * kPicking) {
      const uint32_t row = made.set.row[n];
      if constexpr (S.sampling) {
        made.base[n] = row != kNoRow ? widen(base[row]) : kMinusInfinity;
        made.noise[n] = row != kNoRow ? made.rule.noise(row) : 0.0f;
      } else {
        made.base[n] = row != kNoRow ? widen(bf16_of_upper(made.set.upper[n])) : kMinusInfinity;
      }
    }
  }

  // Warps that multiply. The first step with nothing to gather is the end.
  __device__ void multiply() const {
#pragma unroll 1
    for (int step = 0;; step++) {
      const int own = warp() - 1;
      const Step& made = smem.steps[step % kKept];
      if (step < p.walk.steps) {
        barrier_sync(kReady, kWithPicks);
        gather(made.set, own);
      }
      Task task;
#pragma unroll 1
      while (true) {
        barrier_sync(kTold, kWithDecision);
        task = smem.task;
        if (task == Task::kEnd) return;
        const uint64_t best = task == Task::kMultiply ? products(made, own) : search(own);
        if (lane() == 0) smem.best[own] = best;
        barrier_sync(kDone, kWithDecision);
        if (task == Task::kMultiply) break;
      }
    }
  }

  // One warp: rows of W2 of its 16 candidates.
  __device__ void gather(const typename Pick<S>::Set& set, int own) const {
#pragma unroll 4
    for (int n = 16 * own; n < 16 * own + 16; n++) {
      const uint32_t row = set.row[n] == kNoRow ? 0 : set.row[n];
      copy_async_16(&rows()[n][row_place(n, lane())], p.walk.weights + static_cast<int64_t>(row) * kRowChunks + lane());
    }
    copy_async_wait();
    __syncwarp();
  }

  // One warp: the best key of its 16 candidates, in lane 0. Sums have their terms in the order of certified/weigh.cuh; of A only row 0 is
  // used. A loop of few instructions: what is read once a step is not in the instruction cache.
  __device__ uint64_t products(const Step& step, int own) const {
    const int g = lane() / 4, t = lane() % 4, first = 16 * own;
    float sums[2][4] = {};
    const uint4 *latent = smem.latent + t, *row = rows()[first + g] + row_place(g, t);
#pragma unroll 2
    for (int i = 0; i < 8; i++) {
      const uint4 a = g == 0 ? latent[4 * i] : uint4{};
      const int at = row_place(g, t + 4 * i) - row_place(g, t);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 b = row[half * 8 * kRowChunks + at];
        mma_bf16(sums[half], make_uint4(a.x, 0, a.y, 0), b.x, b.y);
        mma_bf16(sums[half], make_uint4(a.z, 0, a.w, 0), b.z, b.w);
      }
    }
    uint64_t best = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int n = first + half * 8 + 2 * t;
      Rule::corrected(sums[half][0], sums[half][1], step.base[n], step.base[n + 1]);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const uint32_t row = step.set.row[n + c];
        if (row == kNoRow || g > 0) continue;
        const float noise = S.sampling ? step.noise[n + c] : 0.0f;
        best = max(best, certified_key(step.rule.order(sums[half][c], noise), row, n + c + 1));
      }
    }
    best = max(best, __shfl_xor_sync(~0u, best, 1));
    return max(best, __shfl_xor_sync(~0u, best, 2));
  }

  // The warp that decides.
  __device__ void decide() const {
    uint32_t previous = first_token(p, request()), searched = 0;
#pragma unroll 1
    for (int step = 0; step < p.walk.steps; step++) {
      const Step& made = smem.steps[step % kKept];
      const List list{made.rule, base_row(p, request(), step), made.set, smem.listed, smem.biases, smem.bound};
      bring(previous);
      const typename List::Some some = list.ask();  // on their way while rows are gathered and products made
      tell(Task::kMultiply);
      uint64_t best = list.better(some, told());
      if (!list.proves(best)) {
        if (lane() == 0) smem.step = step, smem.needed = certified_order(best);
        tell(Task::kSearch);
        best = better_key(best, told());
        searched++;
      }
      previous = certified_row(best);
      if (lane() == 0) p.walk.tokens[request() * p.walk.tokens_request_stride + step] = previous;
    }
    tell(Task::kEnd);
    phase<S>(p, Phase::kWalked);
    if (lane() > 0 || searched == 0) return;
    uint64_t* tally = reinterpret_cast<uint64_t*>(p.tally + 2 * request());  // nobody waits for it
    red_add_relaxed(tally, searched);
    red_add_relaxed(tally + 1, searched);
  }

  // The warp that decides: whoever multiplies does this next; the best key that comes of it.
  __device__ void tell(Task task) const {
    if (lane() == 0) smem.task = task;
    __syncwarp();
    barrier_sync(kTold, kWithDecision);
  }
  __device__ uint64_t told() const {
    barrier_sync(kDone, kWithDecision);
    return over_warp(lane() < kMultiplying ? smem.best[lane()] : 0);
  }

  // The warp that decides: what a step needs of the token before it.
  __device__ void bring(uint32_t token) const {
    const int64_t row = token;
    copy_async_16(&smem.latent[lane()], p.walk.latents + (row * kRowChunks + lane()) * 16);
    bring<S.list / 4>(smem.listed, p.list_rows + row * S.list);
    bring<S.list / 8>(smem.biases, p.list_biases + row * S.list);
    if (lane() == 0) copy_async_4(&smem.bound, p.list_bound + row);
    __syncwarp();
    copy_async_wait();
    __syncwarp();
  }
  // Chunks of 16 bytes; all lanes take equally many turns (see pick.cuh).
  template <int kCount, class T>
  __device__ static void bring(T* shared, const T* global) {
    constexpr int kOfChunk = 16 / sizeof(T);
#pragma unroll
    for (int first = 0; first < kCount; first += 32) {
      const int n = (first + lane()) * kOfChunk;
      if (first + lane() < kCount) copy_async_16(shared + n, global + n);
    }
  }

  // One warp that multiplies: the best key of its share of the rows that can reach what is needed and are no candidates.
  __device__ uint64_t search(int own) const {
    const Step& made = smem.steps[smem.step % kKept];
    const uint16_t* base = base_row(p, request(), smem.step);
    const float largest = S.sampling ? __uint_as_float(made.set.largest) : 0.0f;
    Reach<S> reach{p.walk, made.rule, base, smem.latent[lane()], smem.bound, largest, smem.needed, smem.reach[own]};
    const uint32_t below = reach.below();
    const uint64_t* offered = p.offered + static_cast<int64_t>(pair(smem.step)) * S.slices * kSliceWords;
    look_at_offers(reach, made.set, offered, own, below);
    look_at_others(reach, base, offered, own, below);
    return reach.finish();
  }

  // One warp: rows that slices offered.
  __device__ void look_at_offers(Reach<S>& reach, const typename Pick<S>::Set& set, const uint64_t* offered, int own,
                                 uint32_t below) const {
    constexpr int kSlices = 2 * kMultiplying, kAtOnce = 96 / kSlices;  // that all warps look at in one load; loads that are under way
#pragma unroll 1
    for (int first = 2 * own; first < S.slices; first += kAtOnce * kSlices) {
      uint32_t words[kAtOnce];
      const auto slice = [&](int j) { return first + lane() / kSliceWords + j * kSlices; };
      await_tagged(
          smem.round, [&](int j) { return slice(j) < S.slices ? offered + slice(j) * kSliceWords + lane() % kSliceWords : nullptr; },
          words);
#pragma unroll 1
      for (int j = 0; j < kAtOnce; j++) {
        const uint32_t upper = words[0] >> 16;
        const bool can = lane() % kSliceWords != kOffers && upper > below && upper <= set.cut[slice(j) % kPicking];
        reach.add(can, Offer<S>::row_of(slice(j), words[0]));
#pragma unroll
        for (int i = 1; i < kAtOnce; i++) words[i - 1] = words[i];
      }
    }
  }

  // One warp: all rows of slices that kept some back which can reach. There is one where many rows tie, else seldom any.
  __device__ void look_at_others(Reach<S>& reach, const uint16_t* base, const uint64_t* offered, int own, uint32_t below) const {
    constexpr int kAtOnce = 3;  // loads of a lane
#pragma unroll 1
    for (int first = 0; first < S.slices; first += 32 * kAtOnce) {
      uint32_t bounds[kAtOnce];
      const auto mine = [&](int j) { return first + 32 * j + lane(); };
      await_tagged(smem.round, [&](int j) { return mine(j) < S.slices ? offered + mine(j) * kSliceWords + kOffers : nullptr; }, bounds);
#pragma unroll 1
      for (int j = 0; j < kAtOnce; j++) {
        uint32_t slices = __ballot_sync(~0u, (bounds[0] & 0xFFFFu) > below);
#pragma unroll 1
        for (; slices; slices &= slices - 1)
#pragma unroll 1
          for (int i = own; i < S.vectors; i += kMultiplying)
            look_at_vector(reach, base, Offer<S>::first_row(first + 32 * j + __ffs(slices) - 1, lane(), i), below);
#pragma unroll
        for (int i = 1; i < kAtOnce; i++) bounds[i - 1] = bounds[i];
      }
    }
  }

  // One warp: eight neighbouring rows of each lane.
  __device__ void look_at_vector(Reach<S>& reach, const uint16_t* base, int first, uint32_t below) const {
    const bool whole = reinterpret_cast<uint64_t>(base) % 16 == 0 && first + 8 <= p.walk.vocab;
    uint4 pairs{};
    if (whole) pairs = __ldg(reinterpret_cast<const uint4*>(base + first));
#pragma unroll 1
    for (int e = 0; e < 8; e++) {
      const int row = first + e;
      uint16_t logit = static_cast<uint16_t>(pairs.x >> (16 * (e % 2)));
      if (!whole && row < p.walk.vocab) logit = __ldg(base + row);
      reach.add(row < p.walk.vocab && reach.can(row, logit, below), row);
      if (e % 2) pairs = make_uint4(pairs.y, pairs.z, pairs.w, 0);
    }
  }

  // Slices are dealt in rounds. Warps of leaders take three where others take two, for fewer offer on their SM. Nothing is kept from one
  // slice to the next: registers are short.
  struct Deal {
    const CertifiedParams& p;

    __device__ int number(int n) const {
      const int leaders = p.walk.batch, own = blockIdx.x;
      const int of_leaders = leaders * kOffering, of_others = static_cast<int>(gridDim.x - leaders) * S.warps;
      const int of_round = own < leaders ? 3 : 2, round = own < leaders ? n / 3 : n / 2;  // constants divide faster
      const int first = own < leaders ? own * kOffering + warp() - kLeading : of_leaders + (own - leaders) * S.warps + warp();
      return round * (3 * of_leaders + 2 * of_others) + (n - round * of_round) * (of_leaders + of_others) + first;
    }
  };

  // Of a warp that offers.
  __device__ Offers<S, Deal> offers() const {
    Slices& place = warp() < kLeading ? reinterpret_cast<Slices*>(smem.rows)[warp()] : smem.offers[warp() - kLeading];
    return {p, place, {p}};
  }

  // `round`: of thread 0.
  __device__ void begin(uint32_t round) const {
    if (threadIdx.x == 0) {
      smem.round = round;
      red_add_relaxed(arrived(p, round), 1);
    }
    __syncthreads();
    clear_other_bank(p, smem.round, kThreads);
  }

  __device__ void run() const {
    phase<S>(p, Phase::kBegun);
    uint32_t round = 0;  // asked for before base logits, which it would wait behind
    if (threadIdx.x == 0) round = *static_cast<volatile const uint32_t*>(p.walk.round);
    const bool leads = blockIdx.x < p.walk.batch && warp() < kLeading;
    Offers<S, Deal> own = offers();
    if (!leads) own.begin();
    begin(round);
    if (!leads) {
      while (own.look(smem.round)) {
      }
      phase<S>(p, Phase::kOffered);
    } else if (warp() == 0) {
      decide();
    } else if (warp() <= kMultiplying) {
      multiply();
    } else {
      pick();
      if (blockIdx.x == 0 && threadIdx.x == 32 * kLeading - 1) end_round(p, smem.round);
    }
  }
};

template <CertifiedShape S>
__device__ void walk_certified_stepwise(const CertifiedParams& p) {
  extern __shared__ __align__(128) uint8_t raw[];
  const Stepwise<S> walk{p, *reinterpret_cast<typename Stepwise<S>::Smem*>(raw)};
  walk.run();
}

}  // namespace wts
