// The walk that breaks the serial chain: a few hundred rows of a step prove its token, and base logits of all steps are known before the
// walk begins. So nearly everything is done for all steps side by side; what is left of the chain is a look-up a step. Theorem and proof
// stand in kernels/certificate.py. bf16 weights, rule TWICE, rank 256, greedy or rule GUMBEL, up to 64 requests; nothing is resident.
//
// One cooperative launch. Phases of a CTA, each waiting only for what it reads:
//   1. offer   slices of base logits, each warp its share; the best rows of each are offered
//   2. weigh   parts of tables: for candidates of step k - 1 as previous tokens, what follows each in step k, and whether that is proved.
//              Some of what follows comes from a list and is no candidate of step k: about ten different tokens. Then what follows those
//              in step k + 1 is weighed too, while the chase may already be under way
//   3. chase   one CTA a request follows the table. A token that is not in it is weighed on the spot, a step that is not proved is searched
//              by the request's team
// All CTAs are resident. Offers wait for nobody, tables for offers, extra entries for tables of lower tasks, chases for all these, teams
// for chases: nobody waits for ever.
#pragma once
#include "certified/offer.cuh"
#include "certified/search.cuh"
#include "certified/weigh.cuh"

namespace wts {

// What a CTA does next.
struct Job {
  enum Kind { kTable, kFetch, kSettle, kSearch, kDone };
  Kind kind;
  int request, step, part;
};

template <CertifiedShape S>
struct Certified {
  using Set = typename Pick<S>::Set;
  using Weigher = Weigh<S>;
  static constexpr int kThreads = 32 * S.warps;
  static constexpr uint32_t kExtraSlots = 64, kEmpty = ~0u;
  static_assert(S.extras <= 32 && S.extras % S.block == 0 && S.previous % (S.parts * S.block) == 0 && S.previous <= S.candidates);

  struct Smem {
    typename Offer<S>::Slice slices[S.warps];
    Set sets[2];  // candidates of the job's step and of the one before
    typename Pick<S>::Scratch scratch[2];
    typename Weigher::Smem weigh;
    alignas(16) uint32_t table[kCertifiedSteps * S.previous];
    Job job;
    int task;                          // of the next table
    int request, member;               // whom this CTA serves once all tables are there, and its place in the team
    Mail* bank;                        // of this launch
    uint32_t round;                    // launches before this one
    uint32_t extra[kExtraSlots];       // winners that were not weighed as previous tokens: a hash set
    uint32_t named[S.extras], extras;  // the same in a row, and how many
    Order order;
    // Where the chase of a leader is: the next step, and where the token before it stands in the table; -1 where it does not.
    struct {
      int step, place;
      uint32_t previous;
    } at;
    uint64_t best;
    bool fetched, proved;
    uint32_t settled;  // steps that the table did not have
  };

  static_assert(sizeof(Smem) <= S.smem_bytes, "kernels/backends/certified_sm80.py adds it up");

  const CertifiedParams& p;
  Smem& smem;

  __device__ Mail& mail(int request) const { return smem.bank[request]; }
  __device__ int request() const { return smem.request; }
  __device__ int member() const { return smem.member; }
  __device__ bool leads() const { return member() == S.team - 1; }

  __device__ int pair(int request, int step) const { return request * p.walk.steps + step; }
  __device__ const uint16_t* base(int request, int step) const {
    return p.walk.base + request * p.walk.base_request_stride + step * p.walk.base_step_stride;
  }
  __device__ uint32_t anchor(int request) const {
    return static_cast<uint32_t>(max(int64_t{0}, min(p.walk.anchor[request], static_cast<int64_t>(p.walk.vocab - 1))));
  }
  __device__ uint32_t* table(int request, int step) const { return p.table + static_cast<int64_t>(pair(request, step)) * S.previous; }
  __device__ int tasks() const { return 1 + (p.walk.steps - 1) * S.parts; }  // of a request: step 0 has one previous token

  __device__ void clear_other_bank() const {
    uint64_t* other = reinterpret_cast<uint64_t*>(mail_bank(p, smem.round + 1));
    const int words = p.requests * static_cast<int>(sizeof(Mail) / 8);
    if (blockIdx.x == 0 && threadIdx.x == 0) *arrived(p, smem.round + 1) = 0;
#pragma unroll 1
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < words; i += gridDim.x * kThreads) other[i] = 0;
  }

  // Every warp its slices. The first one is asked for before the CTA knows the launch's round, which comes from memory too.
  template <class Begin>
  __device__ void offer(Begin&& begin) const {
    const Offer<S> offer{p, smem.slices[threadIdx.x / 32]};
    const int steps = p.walk.steps, all = p.walk.batch * steps * S.slices;
    int task = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    const auto load = [&] {
      if (task < all) offer.load(task / S.slices / steps, task / S.slices % steps, task % S.slices);
    };
    load();
    begin();
#pragma unroll 1
    while (task < all) {
      const int of = task / S.slices;
      offer.slice(of / steps, of % steps, of, task % S.slices, smem.round, mail(of / steps));
      task += S.warps * gridDim.x;
      load();
    }
  }

  __device__ Job table_job(int task) const {
    const int of = task % tasks();
    return {Job::kTable, task / tasks(), of == 0 ? 0 : 1 + (of - 1) / S.parts, of == 0 ? 0 : (of - 1) % S.parts};
  }

  // The first warp of a CTA that does not lead: wait for the next order.
  __device__ Job await_order() const {
    const uint32_t done = smem.order.number;
    __syncwarp();
    uint64_t word;
    [[maybe_unused]] int polls = 0;
    do {
      word = load_acquire(&mail(request()).order);
      WTS_COUNT_POLL(polls, request())
    } while (word >> 56 != kDismissed && word >> 56 != done + 1);
    const Order order = Order::of(word, load_relaxed(&mail(request()).best));
    if (threadIdx.x == 0) smem.order = order;
    return {order.number == kDismissed ? Job::kDone : Job::kSearch, request(), static_cast<int>(order.step), 0};
  }

  // The first warp of a leader: follow the table as far as it goes. Lane k keeps the entry of step k, so that no step waits for a store.
  __device__ Job follow() const {
    int step = smem.at.step, place = smem.at.place;
    uint32_t previous = smem.at.previous, mine = 0;
    __syncwarp();
    const int lane = threadIdx.x % 32, start = step;
#pragma unroll 1
    for (; step < p.walk.steps; step++) {
      uint32_t entry = place >= 0 && place < S.previous ? smem.table[step * S.previous + place] : kNobody;
      if (entry == kNobody) entry = extra_entry(step, previous);
      if (!(entry & kProved)) break;
      if (lane == step) mine = entry;
      previous = certified_row(entry);
      place = static_cast<int>(certified_place(entry)) - 1;
    }
    const bool done = step == p.walk.steps;
    if (lane == 0) {
      smem.at = {step, place, previous};
      smem.settled += !done;
      if (done) Order{kDismissed, 0, 0, 0}.post(mail(request()));
    }
    if (lane >= start && lane < step) p.walk.tokens[request() * p.walk.tokens_request_stride + lane] = certified_row(mine);
    return {done ? Job::kDone : Job::kSettle, request(), step, 0};
  }

  // One warp: what follows a winner of the step before that the table does not have; 0 where nobody weighed it.
  __device__ uint32_t extra_entry(int step, uint32_t previous) const {
    if (step == 0) return 0;
    await_at_least(&mail(request()).extras[step], 1);
    const int lane = threadIdx.x % 32;
    const uint64_t mine = lane < S.extras ? __ldcg(p.extra + static_cast<int64_t>(pair(request(), step)) * S.extras + lane) : kNoExtra;
    const uint32_t votes = __ballot_sync(~0u, static_cast<uint32_t>(mine >> 32) == previous);
    return votes ? __shfl_sync(~0u, static_cast<uint32_t>(mine), __ffs(votes) - 1) : 0;
  }

  // All threads of a leader: the whole table, once it is there.
  __device__ void fetch() const {
    for (int step = threadIdx.x; step < p.walk.steps; step += kThreads)
      await_at_least(&mail(request()).tables[step], step > 0 ? S.parts : 1);
    if (threadIdx.x == 0) {
      if (request() == 0) {  // once all CTAs know the round, it may be another one
        await_at_least(arrived(p, smem.round), gridDim.x);
        *p.walk.round = smem.round + 1;
      }
      smem.at = {0, 0, anchor(request())};
      smem.fetched = true;
    }
    __syncthreads();
    phase<S>(p, Phase::kFetched);
    const uint4* source = reinterpret_cast<const uint4*>(p.table + static_cast<int64_t>(pair(request(), 0)) * S.previous);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.walk.steps * S.previous / 4; i += kThreads)
      reinterpret_cast<uint4*>(smem.table)[i] = __ldcg(source + i);
  }

  // All threads: a part of a table, with its first part also the step's extra entries, or what a leader lacks.
  __device__ void weigh(const Job& job) const {
    const int thread = threadIdx.x, step = job.step;
    const bool settles = job.kind == Job::kSettle, alone = settles || step == 0;  // one previous token
    if (thread < 2 && step >= thread) await_at_least(&mail(job.request).offered[step - thread], S.slices);
    __syncthreads();
    phase<S>(p, Phase::kAwaited);
    Pick<S>::run(p, {pair(job.request, step), pair(job.request, max(0, step - 1))}, smem.sets, smem.scratch);
    Weigher weigh{p, RowRule<S.sampling>::of(p.walk, job.request, step, smem.round), base(job.request, step), smem.sets[0], smem.weigh, {}};
    phase<S>(p, Phase::kPicked);
    weigh.gather();
    constexpr int kOwn = S.previous / S.parts, kExtraTurns = S.extras / S.block;
    const int start = job.part * kOwn, turns = alone ? 1 : kOwn / S.block;
    const int all = turns + (alone || job.part > 0 ? 0 : kExtraTurns);
#pragma unroll 1
    for (int turn = 0; turn < all; turn++) {
      const bool extras = turn >= turns;
      const int first = (extras ? turn - turns : turn) * S.block;
      if (turn == turns) name_extra(job);
      const int there = extras ? smem.extras : alone ? 1 : smem.sets[1].previous - start;
      const int count = max(0, min(S.block, there - first));
      if (thread < count) {
        const uint32_t only = settles ? smem.at.previous : anchor(job.request);
        smem.weigh.previous[thread] = extras ? smem.named[first + thread] : alone ? only : smem.sets[1].row[start + first + thread];
      }
      __syncthreads();
      if (count > 0) weigh.block(count);
      if (thread < S.block) {
        const bool weighed = thread < count, proved = weighed && weigh.proved(thread);
        const uint64_t best = weighed ? smem.weigh.best[Weigher::kTiles][thread] : 0;
        const uint32_t entry = weighed ? table_entry(best, proved) : kNobody;
        if (settles) {
          if (thread == 0) smem.best = best, smem.proved = proved;
        } else if (extras) {
          const uint64_t token = weighed ? smem.weigh.previous[thread] : kEmpty;
          __stcg(p.extra + static_cast<int64_t>(pair(job.request, step)) * S.extras + first + thread, token << 32 | entry);
        } else {
          __stcg(table(job.request, step) + start + first + thread, entry);
        }
      }
      __syncthreads();
      if (thread == 0 && !settles && (turn == turns - 1 || turn == all - 1))
        red_add_release(extras ? &mail(job.request).extras[step] : &mail(job.request).tables[step], 1);
    }
    if (!settles) {
      phase<S>(p, Phase::kWeighed);
      return;
    }
    if (smem.proved) {
      conclude();
    } else if (thread == 0) {
      smem.order = {smem.order.number + 1, static_cast<uint32_t>(step), smem.at.previous, smem.best};
      smem.order.post(mail(request()));
    }
  }

  // All threads: winners of the step before that were not weighed as previous tokens are named, each once.
  __device__ void name_extra(const Job& job) const {
    const int thread = threadIdx.x, before = job.step - 1;
    if (thread < kExtraSlots) smem.extra[thread] = kEmpty;
    if (thread == 0) {
      smem.extras = 0;
      await_at_least(&mail(job.request).tables[before], before > 0 ? S.parts : 1);
    }
    __syncthreads();
    if (thread < (before > 0 ? S.previous : 1)) {
      const uint32_t entry = __ldcg(table(job.request, before) + thread), place = certified_place(entry);
      if (entry != kNobody && (place == 0 || place > smem.sets[1].previous)) remember(certified_row(entry));
    }
    __syncthreads();
  }

  // One thread: a token for name_extra, unless another thread has named it or there are too many.
  __device__ void remember(uint32_t token) const {
#pragma unroll 1
    for (uint32_t probe = 0; probe < 8; probe++) {
      const uint32_t found = atomicCAS(&smem.extra[(token + probe) % kExtraSlots], kEmpty, token);
      if (found == token) return;
      if (found == kEmpty) {
        const uint32_t place = atomicAdd(&smem.extras, 1);
        if (place < S.extras) smem.named[place] = token;
        return;
      }
    }
  }

  // All threads of a leader: the best key is the step's. Ends without a barrier.
  __device__ void conclude() const {
    const uint32_t token = certified_row(smem.best);
    if (threadIdx.x == 0) {
      p.walk.tokens[request() * p.walk.tokens_request_stride + smem.at.step] = token;
      smem.at = {smem.at.step + 1, -1, token};
    }
    __syncthreads();
    if (threadIdx.x < smem.sets[0].count && smem.sets[0].row[threadIdx.x] == token) smem.at.place = threadIdx.x;
    if (threadIdx.x == 0) smem.proved = true;
  }

  // All threads of a team.
  __device__ void search(const Job& job) const {
    const int thread = threadIdx.x;
    Search<S>{p}.run(job.request, smem.order, member(), largest(job), smem.round, mail(job.request));
    __syncthreads();
    if (thread == 0) red_add_release(&mail(job.request).searched, 1);
    if (!leads()) return;
    if (thread == 0) {
      await_at_least(&mail(job.request).searched, static_cast<uint64_t>(smem.order.number) * S.team);
      smem.best = max(smem.best, load_relaxed(&mail(job.request).found[smem.order.number - 1]));
    }
    __syncthreads();
    conclude();
  }

  // All threads; barriers inside. The largest |base logit| of a step.
  __device__ float largest(const Job& job) const {
    if constexpr (!S.sampling) return 0.0f;
    if (threadIdx.x == 0) smem.sets[0].largest = 0.0f;
    __syncthreads();
    float most = 0.0f;
    const float* of = p.largest + static_cast<int64_t>(pair(job.request, job.step)) * S.slices;
#pragma unroll 1
    for (int i = threadIdx.x; i < S.slices; i += kThreads) most = fmaxf(most, __ldcg(of + i));
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(most));
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<uint32_t*>(&smem.sets[0].largest), bits);
    __syncthreads();
    return smem.sets[0].largest;
  }

  // The first warp. Tables first, whosever they are; then what this CTA is to its request.
  __device__ Job next(int task) const {
    if (task < p.walk.batch * tasks()) return table_job(task);
    if (request() >= p.walk.batch) return {Job::kDone, 0, 0, 0};
    if (!leads()) return await_order();
    if (!smem.fetched) return {Job::kFetch, request(), 0, 0};
    if (smem.proved) return follow();
    return {Job::kSearch, request(), smem.at.step, 0};
  }

  __device__ void begin() const {
    if (threadIdx.x == 0) {
      smem.round = *static_cast<volatile const uint32_t*>(p.walk.round);
      smem.bank = mail_bank(p, smem.round);
      smem.task = blockIdx.x;
      smem.request = blockIdx.x / S.team, smem.member = blockIdx.x % S.team;
      red_add_release(arrived(p, smem.round), 1);
      smem.order.number = 0;
      smem.proved = true, smem.fetched = false;
      smem.settled = 0;
    }
    __syncthreads();
    clear_other_bank();
  }

  __device__ void run() const {
    phase<S>(p, Phase::kBegun);
    if constexpr (S.early) launch_dependents();
    offer([&] { begin(); });
    phase<S>(p, Phase::kOffered);
#pragma unroll 1
    while (true) {
      __syncthreads();
      if (threadIdx.x < 32) {
        const Job job = next(smem.task);
        __syncwarp();
        if (threadIdx.x == 0) smem.job = job, smem.task += gridDim.x;
      }
      __syncthreads();
      const Job& job = smem.job;
      if (job.kind == Job::kDone) break;
      if (job.kind == Job::kFetch) {
        phase<S>(p, Phase::kTabled);
        fetch();
      } else if (job.kind == Job::kSearch) {
        search(job);
      } else {
        weigh(job);
      }
    }
    if (threadIdx.x > 0 || !leads() || request() >= p.walk.batch) return;
    phase<S>(p, Phase::kWalked);
    p.tally[2 * request()] += smem.settled;
    p.tally[2 * request() + 1] += smem.order.number;
  }
};

template <CertifiedShape S>
__device__ void walk_certified(const CertifiedParams& p) {
  extern __shared__ __align__(128) uint8_t raw[];
  using Walk = Certified<S>;
  const Walk walk{p, *reinterpret_cast<typename Walk::Smem*>(raw)};
  walk.run();
}

}  // namespace wts
