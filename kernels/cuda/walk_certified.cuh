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
// for chases: nobody waits for ever. Of many requests no tables are made: walk_certified_stepwise.cuh.
#pragma once
#include "certified/offers.cuh"
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
    typename Offer<S>::Smem offers[S.warps];
    Set sets[2];  // candidates of the job's step and of the one before
    typename Weigher::Smem weigh;
    typename Reach<S>::Smem search[S.warps];
    RowRule<S.sampling> rule;  // of the step that is weighed
    const uint16_t* base;
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

  // Slices are dealt to all warps in turn.
  struct Deal {
    int first;

    __device__ int number(int n) const { return first + n * static_cast<int>(S.warps * gridDim.x); }
  };

  const CertifiedParams& p;
  Smem& smem;

  __device__ Mail& mail(int request) const { return smem.bank[request]; }
  __device__ int request() const { return smem.request; }
  __device__ int member() const { return smem.member; }
  __device__ bool leads() const { return member() == S.team - 1; }

  __device__ int pair(int request, int step) const { return request * p.walk.steps + step; }
  __device__ uint64_t* table(int request, int step) const { return p.table + static_cast<int64_t>(pair(request, step)) * S.previous; }
  // Tables of a request, in parts: step 0 has one previous token.
  __device__ int tasks() const { return 1 + (p.walk.steps - 1) * S.parts; }

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
      word = load_relaxed(&mail(request()).order);
      WTS_COUNT_POLL(polls, request())
    } while (word >> 56 != kDismissed && word >> 56 != done + 1);
    if (word >> 56 != kDismissed) word = load_acquire(&mail(request()).order);
    const Order order = Order::of(word, load_relaxed(&mail(request()).best));
    if (fresh_thread() == 0) smem.order = order;
    return {order.number == kDismissed ? Job::kDone : Job::kSearch, request(), static_cast<int>(order.step), 0};
  }

  // The first warp of a leader: follow the table as far as it goes. Lane k keeps the entry of step k, so that no step waits for a store.
  // What was weighed but not proved is searched at once; the team works out the score of its entry, which the table does not hold.
  __device__ Job follow() const {
    int step = smem.at.step, place = smem.at.place;
    uint32_t previous = smem.at.previous, mine = 0, entry = 0;
    __syncwarp();
    const int lane = threadIdx.x % 32, start = step;
#pragma unroll 1
    for (; step < p.walk.steps; step++) {
      entry = place >= 0 && place < S.previous ? smem.table[step * S.previous + place] : kNobody;
      if (entry == kNobody) entry = extra_entry(step, previous);
      if (!(entry & kProved)) break;
      if (lane == step) mine = entry;
      previous = certified_row(entry);
      place = static_cast<int>(certified_place(entry)) - 1;
    }
    const bool done = step == p.walk.steps, weighed = !done && entry != 0;
    if (lane >= start && lane < step) p.walk.tokens[request() * p.walk.tokens_request_stride + lane] = certified_row(mine);
    __syncwarp();
    if (lane == 0) {
      smem.at = {step, place, previous};
      smem.settled += !done;
      if (done) Order::dismiss(mail(request()));
      if (weighed) {
        smem.order = {smem.order.number + 1, static_cast<uint32_t>(step), previous, entry};
        smem.order.post(mail(request()));
      }
    }
    return {done ? Job::kDone : weighed ? Job::kSearch : Job::kSettle, request(), step, 0};
  }

  __device__ bool dismissed(int request) const { return load_relaxed(&mail(request).order) >> 56 == kDismissed; }

  // One warp: what follows a winner of the step before that the table does not have; 0 where nobody weighed it.
  __device__ uint32_t extra_entry(int step, uint32_t previous) const {
    if (step == 0) return 0;
    const int lane = threadIdx.x % 32, count = static_cast<int>(await_at_least(&mail(request()).extras[step], 1)) - 1;
    const uint64_t mine = lane < count ? __ldcg(p.extra + static_cast<int64_t>(pair(request(), step)) * S.extras + lane) : 0;
    const uint32_t votes = __ballot_sync(~0u, lane < count && static_cast<uint32_t>(mine >> 32) == previous);
    return votes ? __shfl_sync(~0u, static_cast<uint32_t>(mine), __ffs(votes) - 1) : 0;
  }

  // All threads: a leader's whole table, once it is there.
  __device__ void fetch() const {
    if (fresh_thread() == 0) smem.at = {0, 0, first_token(p, request())}, smem.fetched = true;
    if (threadIdx.x == kThreads - 1 && request() == 0) end_round(p, smem.round);
    __syncwarp();
    constexpr int kAtOnce = 4;
    const int all = p.walk.steps * S.previous;  // whole warps
    const uint64_t* source = table(request(), 0);
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 32; first < all; first += kAtOnce * kThreads) {
      uint32_t entries[kAtOnce];
      const auto place = [&](int j) { return first + static_cast<int>(threadIdx.x % 32) + j * kThreads; };
      const auto written = [&](int j) { return place(j) == 0 || (place(j) >= S.previous && place(j) < all); };  // of step 0 one entry
      await_tagged(smem.round, [&](int j) { return written(j) ? source + place(j) : nullptr; }, entries);
#pragma unroll
      for (int j = 0; j < kAtOnce; j++)
        if (written(j)) smem.table[place(j)] = entries[j];
    }
    phase<S>(p, Phase::kFetched);
  }

  // All threads: a part of a table, with its first part also the step's extra entries, or what a leader lacks.
  __device__ void weigh(const Job& job) const {
    const int thread = fresh_thread(), step = job.step;
    const bool settles = job.kind == Job::kSettle, alone = settles || step == 0;  // one previous token
    constexpr int kOwn = S.previous / S.parts;
    const int start = job.part * kOwn;
    if (thread < 2) smem.sets[thread].reset();
    __syncthreads();
    Pick<S>::run(p, {pair(job.request, step), pair(job.request, max(0, step - 1))}, start, alone ? start : start + kOwn, smem.sets,
                 smem.round);
    phase<S>(p, Phase::kPicked);
    const Set& set = smem.sets[0];
    if (thread == 0) {  // seen after the next barrier
      smem.rule = RowRule<S.sampling>::of(p.walk, job.request, step, smem.round);
      smem.base = base_row(p, job.request, step);
    }
    Weigher weigh{p, smem.rule, smem.base, set, smem.weigh, {}};
    const int turns = alone ? 1 : kOwn / S.block;
    const int all = turns + (alone || job.part > 0 ? 0 : S.extras / S.block);
#pragma unroll 1
    for (int turn = 0; turn < all; turn++) {
      const bool extras = turn >= turns;
      const int first = (extras ? turn - turns : turn) * S.block;
      if (turn == turns) name_extra(job);
      if (extras && first >= smem.extras) break;
      if (thread < S.block) {
        const uint32_t only = settles ? smem.at.previous : first_token(p, job.request);
        const uint32_t named = extras  ? (first + thread < smem.extras ? smem.named[first + thread] : kNoRow)
                               : alone ? (thread == 0 ? only : kNoRow)
                                       : smem.sets[1].row[start + first + thread];
        smem.weigh.previous[thread] = named;
      }
      __syncthreads();
      const auto stop = [&] { return extras && dismissed(job.request); };  // nobody asks for what they would be
      const bool whole = weigh.block(alone ? 1 : S.block, turn == 0, stop, [&](int i, uint64_t best, bool proved) {
        const uint32_t previous = smem.weigh.previous[i];
        const uint32_t entry = previous == kNoRow ? kNobody : table_entry(best, proved);
        if (settles) {
          if (i == 0) smem.best = best, smem.proved = proved;
        } else if (extras) {
          const uint64_t token = previous;
          __stcg(p.extra + static_cast<int64_t>(pair(job.request, step)) * S.extras + first + i, token << 32 | entry);
        } else {
          store_relaxed(table(job.request, step) + start + first + i, tagged(smem.round, entry));
        }
      });
      if (!whole) break;
      __syncthreads();
    }
    if (all > turns && thread == 0) red_add_release(&mail(job.request).extras[step], 1 + min(static_cast<int>(smem.extras), S.extras));
    if (!settles) {
      phase<S>(p, Phase::kWeighed);
      return;
    }
    if (thread > 0) return;
    if (smem.proved) {
      conclude();
    } else {
      smem.order = {smem.order.number + 1, static_cast<uint32_t>(step), smem.at.previous, smem.best};
      smem.order.post(mail(request()));
    }
  }

  // All threads: winners of the step before that were not weighed as previous tokens are named, each once.
  __device__ void name_extra(const Job& job) const {
    const int thread = fresh_thread(), before = job.step - 1, written = before > 0 ? S.previous : 1;
    if (thread < kExtraSlots) smem.extra[thread] = kEmpty;
    if (thread == 0) smem.extras = 0;
    __syncthreads();
    const uint64_t* source = table(job.request, before);
    uint32_t entry[1];
    await_tagged(smem.round, [&](int) { return thread < written ? source + thread : nullptr; }, entry);
    if (thread < written) {
      const uint32_t place = certified_place(entry[0]);
      if (entry[0] != kNobody && (place == 0 || place > S.previous)) remember(certified_row(entry[0]));
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

  // One thread of a leader: the best key is the step's. The place of a token that a search found and the table did not name is not known.
  __device__ void conclude() const {
    const uint32_t token = certified_row(smem.best);
    p.walk.tokens[request() * p.walk.tokens_request_stride + smem.at.step] = token;
    smem.at = {smem.at.step + 1, static_cast<int>(certified_place(smem.best)) - 1, token};
    smem.proved = true;
  }

  // All threads of a team.
  __device__ void search(const Job& job) const {
    const int warp = threadIdx.x / 32;
    const typename Search<S>::Share share{member() * S.warps + warp, S.team * S.warps};
    const uint64_t known = Search<S>{p, smem.search[warp]}.run(job.request, smem.order, share, smem.round, mail(job.request));
    __syncthreads();
    if (threadIdx.x > 0) return;
    red_add_release(&mail(job.request).searched, 1);
    if (!leads()) return;
    await_at_least(&mail(job.request).searched, static_cast<uint64_t>(smem.order.number) * S.team);
    smem.best = better_key(known, load_relaxed(&mail(job.request).found[smem.order.number - 1]));
    conclude();
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

  // `round`: of thread 0.
  __device__ void begin(uint32_t round) const {
    if (threadIdx.x == 0) {
      smem.round = round;
      smem.bank = mail_bank(p, smem.round);
      smem.task = blockIdx.x;
      smem.request = blockIdx.x / S.team, smem.member = blockIdx.x % S.team;
      red_add_relaxed(arrived(p, smem.round), 1);  // its address hangs on the round, which has been read
      smem.order.number = 0;
      smem.proved = true, smem.fetched = false;
      smem.settled = 0;
    }
    __syncthreads();
    clear_other_bank(p, smem.round, kThreads);
  }

  __device__ void run() const {
    phase<S>(p, Phase::kBegun);
    uint32_t round = 0;  // asked for before base logits, which it would wait behind: 1 us of 16 steps
    if (threadIdx.x == 0) round = *static_cast<volatile const uint32_t*>(p.walk.round);
    Offers<S, Deal> offers{p, smem.offers[threadIdx.x / 32], {static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x)}};
    offers.begin();
    begin(round);
    phase<S>(p, Phase::kKnown);
    while (offers.look(smem.round)) {
    }
    phase<S>(p, Phase::kOffered);
#pragma unroll 1
    while (true) {
      __syncthreads();
      if (threadIdx.x < 32) {
        const Job job = next(smem.task);
        __syncwarp();
        if (fresh_thread() == 0) smem.job = job, smem.task += gridDim.x;
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
    if (fresh_thread() == 0 && leads() && request() < p.walk.batch) {
      phase<S>(p, Phase::kWalked);
      uint64_t* tally = reinterpret_cast<uint64_t*>(p.tally + 2 * request());  // nobody waits for it
      if (smem.settled) red_add_relaxed(tally, smem.settled);
      if (smem.order.number) red_add_relaxed(tally + 1, smem.order.number);
    }
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
