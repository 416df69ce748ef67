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
//   4. settle  where this kernel computes logits too: every CTA's share of rows of W2, for all steps, once all requests have their tokens.
//              The first rows are on their way since the CTA's tables are done
// Of many requests no tables are made, for every SM has chains of its own to follow: half the warps of a CTA a request weigh what follows
// its token, step after step, while all other warps go through slices of later steps, and some of them help to search in between.
// All CTAs are resident. Offers wait for nobody, tables for offers, extra entries for tables of lower tasks, chases for all these, teams,
// helpers and logits for chases: nobody waits for ever.
#pragma once
#include "certified/offer.cuh"
#include "certified/search.cuh"
#include "certified/weigh.cuh"
#include "settled_logits.cuh"

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
  static constexpr int kWeighing = weighing_warps(S), kOffering = S.warps - kWeighing;  // warps; of a CTA that leads
  static constexpr int kHelping = 4;  // warps of one that leads none: with all 16 a thousand would ask one word for orders
  static constexpr uint32_t kExtraSlots = 64, kEmpty = ~0u;
  static constexpr bool kSettles = S.logits > 0;
  using Logits = SettledLogits<LogitsShape{.tiles = kSettles ? S.logits : 1, .groups = 1, .stages = 2}>;
  static_assert(S.extras <= 32 && S.extras % S.block == 0 && S.previous % (S.parts * S.block) == 0 && S.previous <= S.candidates);

  struct Smem {
    typename Offer<S>::Smem offers[S.warps];
    Set sets[2];  // candidates of the job's step and of the one before
    typename Weigher::Smem weigh;
    typename Search<S>::Smem search[S.warps];
    RowRule<S.sampling> rule;  // of the step that is weighed
    const uint16_t* base;
    alignas(16) uint32_t table[S.tables ? kCertifiedSteps * S.previous : 1];
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
    uint32_t settled;                                                                      // steps that the table did not have
    alignas(16) uint8_t blocks[kSettles ? S.warps * sizeof(typename Logits::Block) : 16];  // of W2 rows
  };
  static_assert(!kSettles || (sizeof(Smem::offers[0].slices) >= sizeof(typename Logits::Block) &&
                              sizeof(typename Logits::Columns) <= sizeof(Smem::weigh)));

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
  __device__ uint64_t* table(int request, int step) const { return p.table + static_cast<int64_t>(pair(request, step)) * S.previous; }
  // Tables of a request, in parts: step 0 has one previous token.
  __device__ int tasks() const { return S.tables ? 1 + (p.walk.steps - 1) * S.parts : 0; }

  __device__ void clear_other_bank() const {
    uint64_t* other = reinterpret_cast<uint64_t*>(mail_bank(p, smem.round + 1));
    const int words = p.requests * static_cast<int>(sizeof(Mail) / 8);
    if (blockIdx.x == 0 && threadIdx.x == 0)
      *arrived(p, smem.round + 1) = 0, *orders(p, smem.round + 1) = 0, *finished(p, smem.round + 1) = 0;
#pragma unroll 1
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < words; i += gridDim.x * kThreads) other[i] = 0;
  }

  // Every warp that does not weigh its slices, step after step; the next ones are under way while it looks through one.
  struct Offers {
    static constexpr int kAhead = S.buffers - 1;

    struct Slice {
      int request, step, slice;
    };

    const Certified& walk;
    int number;  // of the next slice
    int at = 0;  // where it is

    __device__ explicit Offers(const Certified& walk) : walk(walk) {
      const int warp = threadIdx.x / 32, own = blockIdx.x, leaders = walk.p.walk.batch;
      if (S.tables)
        number = warp * gridDim.x + own;
      else
        number = own < leaders ? own * kOffering + warp - kWeighing : leaders * kOffering + (own - leaders) * S.warps + warp;
#pragma unroll
      for (int n = 0; n < max(1, kAhead); n++) begin(n);
    }

    __device__ int stride() const {
      const int leaders = S.tables ? 0 : walk.p.walk.batch;
      return leaders * kOffering + (gridDim.x - leaders) * S.warps;
    }

    // By step, then request: what is needed first comes first.
    __device__ Slice located(int number) const {
      const int step = number / (walk.p.walk.batch * S.slices), rest = number - step * walk.p.walk.batch * S.slices;
      return {rest / S.slices, step, rest % S.slices};
    }
    __device__ Offer<S> offer() const { return {walk.p, walk.smem.offers[threadIdx.x / 32]}; }

    // Begin to bring the slice that comes `ahead` slices after the next.
    __device__ void begin(int ahead) const {
      const Slice task = located(number + ahead * stride());
      auto& rows = walk.smem.offers[threadIdx.x / 32].slices[(at + ahead) % S.buffers];
      if (task.step < walk.p.walk.steps) offer().load(walk.base(task.request, task.step), task.slice, rows);
      copy_async_commit();  // also of nothing: groups are counted
    }

    // Whether there was one to look through.
    __device__ bool next() {
      const Slice task = located(number);
      if (task.step >= walk.p.walk.steps) return false;
      if constexpr (kAhead > 0) begin(kAhead);
      copy_async_wait_older<kAhead>();  // a lane reads only what it brought itself
      const RowRule<S.sampling> rule = RowRule<S.sampling>::of(walk.p.walk, task.request, task.step, walk.smem.round);
      offer().slice(rule, walk.pair(task.request, task.step), task.slice, walk.smem.round, walk.smem.offers[threadIdx.x / 32].slices[at]);
      number += stride();
      at = (at + 1) % S.buffers;
      if constexpr (kAhead == 0) begin(0);
      return true;
    }
  };

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
    if (threadIdx.x == 0) smem.order = order;
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
    for (; S.tables && step < p.walk.steps; step++) {
      entry = place >= 0 && place < S.previous ? smem.table[step * S.previous + place] : kNobody;
      if (entry == kNobody) entry = extra_entry(step, previous);
      if (!(entry & kProved)) break;
      if (lane == step) mine = entry;
      previous = certified_row(entry);
      place = static_cast<int>(certified_place(entry)) - 1;
    }
    const bool done = step == p.walk.steps, weighed = S.tables && !done && entry != 0;
    if (lane >= start && lane < step) p.walk.tokens[request() * p.walk.tokens_request_stride + lane] = certified_row(mine);
    __syncwarp();
    if (lane == 0) {
      smem.at = {step, place, previous};
      smem.settled += S.tables && !done;
      if (done && S.tables) Order::dismiss(mail(request()), kSettles);
      if (done && !S.tables) red_add_relaxed(finished(p, smem.round), 1);
      if (weighed) {
        smem.order = {smem.order.number + 1, static_cast<uint32_t>(step), previous, entry};
        post();
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

  // All that weigh, here and below: a leader's whole table, once it is there.
  __device__ void fetch() const {
    if (threadIdx.x == 0) smem.at = {0, 0, anchor(request())}, smem.fetched = true;
    if (threadIdx.x == 32 * kWeighing - 1 && request() == 0) {  // once all CTAs know the round, it may be another one
      await_at_least(arrived(p, smem.round), gridDim.x);
      *p.walk.round = smem.round + 1;
    }
    __syncwarp();
    constexpr int kAtOnce = 4;
    const int all = S.tables ? p.walk.steps * S.previous : 0;  // whole warps
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
    const int thread = threadIdx.x, step = job.step;
    const bool settles = job.kind == Job::kSettle, alone = settles || step == 0;  // one previous token
    constexpr int kOwn = S.previous / S.parts;
    const int start = job.part * kOwn;
    if (thread < 2) smem.sets[thread].reset();
    sync_weighing<S>();
    Pick<S>::run(p, {pair(job.request, step), pair(job.request, max(0, step - 1))}, start, alone ? start : start + kOwn, smem.sets,
                 smem.round);
    phase<S>(p, Phase::kPicked);
    const Set& set = smem.sets[0];
    if (thread == 0) {  // seen after the next barrier
      smem.rule = RowRule<S.sampling>::of(p.walk, job.request, step, smem.round);
      smem.base = base(job.request, step);
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
        const uint32_t only = settles ? smem.at.previous : anchor(job.request);
        const uint32_t named = extras  ? (first + thread < smem.extras ? smem.named[first + thread] : kNoRow)
                               : alone ? (thread == 0 ? only : kNoRow)
                                       : smem.sets[1].row[start + first + thread];
        smem.weigh.previous[thread] = named;
      }
      sync_weighing<S>();
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
      sync_weighing<S>();
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
      smem.settled += !S.tables;  // counted already, where a table did not settle it
      smem.order = {smem.order.number + 1, static_cast<uint32_t>(step), smem.at.previous, smem.best};
      post();
    }
  }

  // One thread of a leader.
  __device__ void post() const {
    smem.order.post(mail(request()));
    if constexpr (!S.tables) store_release(posted(static_cast<int>(atomicAdd(orders(p, smem.round), 1))), request() + 1);
  }

  // All threads: winners of the step before that were not weighed as previous tokens are named, each once.
  __device__ void name_extra(const Job& job) const {
    const int thread = threadIdx.x, before = job.step - 1, written = before > 0 ? S.previous : 1;
    if (thread < kExtraSlots) smem.extra[thread] = kEmpty;
    if (thread == 0) smem.extras = 0;
    sync_weighing<S>();
    const uint64_t* source = table(job.request, before);
    uint32_t entry[1];
    await_tagged(smem.round, [&](int) { return thread < written ? source + thread : nullptr; }, entry);
    if (thread < written) {
      const uint32_t place = certified_place(entry[0]);
      if (entry[0] != kNobody && (place == 0 || place > S.previous)) remember(certified_row(entry[0]));
    }
    sync_weighing<S>();
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

  // Of two keys of which the first may have a place: a row that was found again keeps it.
  __device__ static uint64_t better(uint64_t known, uint64_t found) {
    return certified_row(found) == certified_row(known) ? known : max(known, found);
  }

  // All threads of a team.
  __device__ void search(const Job& job) const {
    const int warp = threadIdx.x / 32, helpers = S.tables ? 0 : helping_warps();
    const typename Search<S>::Share share{S.tables ? member() * kWeighing + warp : helpers + warp, S.team * kWeighing + helpers};
    const uint64_t known = Search<S>{p, smem.search[warp]}.run(job.request, smem.order, share, smem.round, mail(job.request));
    sync_weighing<S>();
    if (threadIdx.x > 0) return;
    red_add_release(&mail(job.request).searched, 1);
    if (!leads()) return;
    await_at_least(&mail(job.request).searched, static_cast<uint64_t>(smem.order.number) * (S.team + helpers));
    smem.best = better(known, load_relaxed(&mail(job.request).found[smem.order.number - 1]));
    conclude();
  }

  // Without tables: of CTAs that lead none.
  __device__ int helping_warps() const { return (gridDim.x - p.walk.batch) * kHelping; }
  __device__ uint64_t* posted(int number) const { return &mail(number / kCertifiedSteps).posted[number % kCertifiedSteps]; }

  // One warp that helps: slices, and orders in between.
  __device__ void help(Offers& offers) const {
    const int warp = threadIdx.x / 32;
    const typename Search<S>::Share share{static_cast<int>(blockIdx.x - p.walk.batch) * kHelping + warp, kWeighing + helping_warps()};
    int done = 0;
#pragma unroll 1
    for (bool more = true;;) {
      const bool over = load_relaxed(finished(p, smem.round)) == p.walk.batch;  // then every order was carried out, by this warp too
      uint64_t request = load_relaxed(posted(done));
      if (more) more = offers.next();
      if (__any_sync(~0u, request == 0)) {
        if (__all_sync(~0u, over && !more)) return;
        continue;
      }
      request = load_acquire(posted(done)) - 1;
      Mail& own = mail(static_cast<int>(request));
      const Order order = Order::of(load_relaxed(&own.order), load_relaxed(&own.best));
      Search<S>{p, smem.search[warp]}.run(static_cast<int>(request), order, share, smem.round, own);
      __syncwarp();
      if (threadIdx.x % 32 == 0) red_add_release(&own.searched, 1);
      done++;
    }
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

  // A warp's first block of W2 rows takes the place of its base logits, which it has looked through by then; columns take that of what
  // was weighed.
  __device__ Logits logits() const {
    const int warp = threadIdx.x / 32;
    uint8_t *first = reinterpret_cast<uint8_t*>(smem.offers[warp].slices), *second = smem.blocks + warp * sizeof(typename Logits::Block);
    return {p.walk, reinterpret_cast<typename Logits::Columns&>(smem.weigh), {first, static_cast<int>(second - first)}};
  }

  // All threads: logits of all requests, once their tokens can be seen.
  __device__ void settle() const {
    if (threadIdx.x < 32) {
      bool done;
      [[maybe_unused]] int polls = 0;
      do {
        done = threadIdx.x >= p.walk.batch || load_acquire(&mail(threadIdx.x).order) >> 56 == kDismissed;
        WTS_COUNT_POLL(polls, -1)
      } while (!__all_sync(~0u, done));
    }
    __syncthreads();
    logits().finish();
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
    clear_other_bank();
  }

  __device__ void run() const {
    phase<S>(p, Phase::kBegun);
    uint32_t round = 0;  // asked for before base logits, which it would wait behind: 1 us of 16 steps
    if (threadIdx.x == 0) round = *static_cast<volatile const uint32_t*>(p.walk.round);
    const bool weighs = S.tables || (blockIdx.x < p.walk.batch && threadIdx.x / 32 < kWeighing);
    if (S.tables || !weighs) {
      Offers offers(*this);
      begin(round);
      phase<S>(p, Phase::kKnown);
      if (!S.tables && blockIdx.x >= p.walk.batch && threadIdx.x / 32 < kHelping) {
        help(offers);
      } else {
        while (offers.next()) {
        }
      }
    } else {
      begin(round);
    }
    if (!weighs) return;
    phase<S>(p, Phase::kOffered);
    bool brings = kSettles && p.walk.logits;
#pragma unroll 1
    while (true) {
      sync_weighing<S>();
      if (threadIdx.x < 32) {
        const Job job = next(smem.task);
        __syncwarp();
        if (threadIdx.x == 0) smem.job = job, smem.task += gridDim.x;
      }
      sync_weighing<S>();
      const Job& job = smem.job;
      if (brings && job.kind != Job::kTable) {  // what comes now waits, mostly
        logits().begin();
        brings = false;
      }
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
    if (threadIdx.x == 0 && leads() && request() < p.walk.batch) {
      phase<S>(p, Phase::kWalked);
      uint64_t* tally = reinterpret_cast<uint64_t*>(p.tally + 2 * request());  // nobody waits for it
      if (smem.settled) red_add_relaxed(tally, smem.settled);
      if (smem.order.number) red_add_relaxed(tally + 1, smem.order.number);
    }
    if (kSettles && p.walk.logits) settle();
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
