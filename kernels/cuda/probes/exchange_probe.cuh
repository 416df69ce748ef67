// What does agreeing on one token cost, with nothing else in the loop? Every CTA posts a key a step and all threads of all CTAs learn the
// winner. The next keys depend on it, as a walk's do, so that no two steps overlap. CTAs are as large as a walk's; as in a walk, the first
// warp makes the exchange and hands the winner to the others through shared memory and one barrier.
//
// Protocols are `KeyCountPair` and `Mailboxes` of common/exchange.cuh, as the walks use them, and those below, with the same interface. Two
// parts are optional, and all threads of a CTA make them: `enter()` once, before begin(), and `barrier()` between post() and wait().
#pragma once
#include <cooperative_groups.h>

#include "common/exchange.cuh"

namespace wts {

struct ExchangeProbeParams {
  const int64_t* anchor;  // [1] the token before step 0
  int64_t* tokens;        // [steps] what CTA 0 heard
  int64_t* digests;       // [CTAs] of all that a CTA heard, see probe_digest
  uint64_t* words;        // the protocol's state, zero before the first launch
  uint32_t* round;        // launches since then; survives graph replays
  int64_t* clocks;        // [2, 2] SM cycles and nanoseconds of CTA 0 after the first and after the last step
  int32_t steps;
  int32_t padding;
};
static_assert(sizeof(ExchangeProbeParams) == 56, "kernels/exchange_probe.py mirrors this struct");

constexpr uint32_t kProbeRows = 1024;  // of a CTA; a token is cta * kProbeRows + row
constexpr int kProbeThreads = 256;

// The key of a CTA after token `previous`: a multiplicative hash in the form of candidate_key. Only 8 bits order it, so that ties between
// CTAs are common and a protocol that breaks them wrongly is seen.
__host__ __device__ constexpr uint32_t probe_key(uint32_t previous, uint32_t step, uint32_t cta) {
  const uint32_t hash = (previous * 0x9E3779B1u ^ (step * 0x85EBCA77u + cta * 0xC2B2AE3Du)) * 0x27D4EB2Fu;
  return ((hash >> 24) + 1) << 16 | (kLastRow - (hash >> 8 & (kProbeRows - 1)));
}

// FNV-1a over whole tokens. A CTA that once heard another winner than CTA 0 ends with another digest.
constexpr uint32_t kProbeDigest = 0x811C9DC5u;
__host__ __device__ constexpr uint32_t probe_digest(uint32_t digest, uint32_t token) { return (digest ^ token) * 0x01000193u; }

// What CTAs compare: the order of the key, then the lower CTA, then the lower row. 40 bits.
__host__ __device__ constexpr uint64_t entry_of(uint32_t key, uint32_t cta) {
  return static_cast<uint64_t>(key_order(key)) << 24 | static_cast<uint64_t>(255 - cta) << 16 | (key & 0xFFFF);
}
__host__ __device__ constexpr Winner entry_winner(uint64_t entry) {
  return {255 - static_cast<uint32_t>(entry >> 16 & 255), key_row(static_cast<uint32_t>(entry))};
}

// `kLines` 128-byte lines for every step of a launch, in the bank of the launch's parity; the launch clears the other bank. In cold L2 a
// step's lines must not come from HBM while all wait, so they are prefetched one step ahead.
template <int kMaxCtas, int kLines>
struct StepLines {
  static_assert(kMaxCtas <= 256, "eight bits of an entry hold the inverted CTA");
  static constexpr int kStride = 16;  // words
  static constexpr int kBank = kMaxSteps * kLines;

  uint64_t* words;
  uint32_t round;
  uint32_t ctas;

  __device__ uint64_t* line(int step, int which = 0) const { return words + ((round & 1) * kBank + step * kLines + which) * kStride; }

  __device__ void begin() const {
    for (int i = blockIdx.x * 32 + threadIdx.x; i < kBank; i += gridDim.x * 32) {
      uint64_t* other = words + ((~round & 1) * kBank + i) * kStride;
      other[0] = other[1] = 0;
    }
    prefetch(0);
  }

  __device__ void prefetch(int step) const {
    if (blockIdx.x == 0 && threadIdx.x < kLines && step < kMaxSteps) prefetch_l2(line(step, threadIdx.x));
  }
};

// The textbook way: an atomic max, a grid-wide barrier (cooperative_groups' own, which nothing bounds), a load. PTX promises it.
template <int kMaxCtas>
struct GridSync : StepLines<kMaxCtas, 1> {
  __device__ void post(int step, uint32_t key) const {
    if (threadIdx.x == 0) red_max_relaxed(this->line(step), entry_of(key, blockIdx.x));
    this->prefetch(step + 1);
  }

  __device__ void barrier() const { cooperative_groups::this_grid().sync(); }

  template <class Leads>
  __device__ Winner wait(int step, Leads leads) const {
    const Winner winner = entry_winner(load_relaxed(this->line(step)));
    leads(winner);
    return winner;
  }
};

// The pair without what PTX does not promise: the count is released and acquired, and the key is read once the count is full. That is a
// fence before every add, and a second round trip to L2 after the last one.
template <int kMaxCtas>
struct AcquirePair : StepLines<kMaxCtas, 1> {
  __device__ void post(int step, uint32_t key) const {
    if (threadIdx.x == 0) {
      red_max_relaxed(this->line(step), entry_of(key, blockIdx.x));
      red_add_release(this->line(step) + 1, 1);
    }
    this->prefetch(step + 1);
  }

  template <class Leads>
  __device__ Winner wait(int step, Leads leads) const {
    [[maybe_unused]] int polls = 0;
    do {
      WTS_COUNT_POLL(polls, step)
    } while (static_cast<uint32_t>(load_acquire(this->line(step) + 1)) < this->ctas);
    const Winner winner = entry_winner(load_relaxed(this->line(step)));
    leads(winner);
    return winner;
  }
};

// The pair, split: CTA b posts to line b mod kStripes, so that fewer atomics follow one another on a line, and lane l of every CTA polls
// line l mod kStripes. It leans on what KeyCountPair leans on.
template <int kMaxCtas, int kStripes>
struct StripedPair : StepLines<kMaxCtas, kStripes> {
  static_assert(32 % kStripes == 0, "every stripe has as many lanes");

  __device__ void post(int step, uint32_t key) const {
    if (threadIdx.x == 0) {
      uint64_t* mine = this->line(step, blockIdx.x % kStripes);
      red_max_relaxed(mine, entry_of(key, blockIdx.x));
      red_add_relaxed(mine + 1, 1);
    }
    this->prefetch(step + 1);
  }

  template <class Leads>
  __device__ Winner wait(int step, Leads leads) const {
    const uint32_t stripe = threadIdx.x % kStripes, members = this->ctas / kStripes + (stripe < this->ctas % kStripes);
    uint64_t entry, arrived;
    [[maybe_unused]] int polls = 0;
    do {
      WTS_COUNT_POLL(polls, step)
      load_relaxed_x2(this->line(step, stripe), entry, arrived);
    } while (__any_sync(~0u, static_cast<uint32_t>(arrived) < members));
#pragma unroll
    for (int distance = kStripes / 2; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, entry, distance);
      entry = entry > other ? entry : other;
    }
    const Winner winner = entry_winner(entry);
    leads(winner);
    return winner;
  }
};

// First within a cluster, through distributed shared memory, then the pair among the clusters' first CTAs; all poll it. Within a cluster a
// word says itself whether it has arrived (volatile is relaxed, 9.7.9.8), which PTX promises; the pair among leaders leans on what
// KeyCountPair leans on. One word a CTA is enough: it sends step s + 1 only when the pair of s is full, so when its leader has read s.
template <int kMaxCtas, int kCluster>
struct ClusterPair : StepLines<kMaxCtas, 1> {
  static constexpr int kEntryBits = 40;
  static constexpr uint64_t kEntry = (uint64_t{1} << kEntryBits) - 1;

  // A CTA's shared memory may be written from outside only once it runs. It may leave first: it has read all that was sent to it.
  __device__ void enter() const {
    if (threadIdx.x < kCluster) inbox()[threadIdx.x] = 0;
    cooperative_groups::this_cluster().sync();
  }

  __device__ void post(int step, uint32_t key) const {
    const auto cluster = cooperative_groups::this_cluster();
    const uint32_t rank = cluster.block_rank(), lane = threadIdx.x;
    const uint64_t tag = static_cast<uint64_t>(step + 1) << kEntryBits;
    if (rank > 0) {
      if (lane == 0) *static_cast<volatile uint64_t*>(cluster.map_shared_rank(inbox() + rank, 0)) = tag | entry_of(key, blockIdx.x);
      return;
    }
    uint64_t word = tag | entry_of(key, blockIdx.x);
    [[maybe_unused]] int polls = 0;
    if (lane > 0 && lane < kCluster) {
      do {
        WTS_COUNT_POLL(polls, step)
        word = *static_cast<volatile uint64_t*>(inbox() + lane);
      } while (word >> kEntryBits != tag >> kEntryBits);
    }
    __syncwarp();
#pragma unroll
    for (int distance = kCluster / 2; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, word, distance);
      word = word > other ? word : other;
    }
    if (lane == 0) {
      red_max_relaxed(this->line(step), word & kEntry);
      red_add_relaxed(this->line(step) + 1, 1);
    }
    this->prefetch(step + 1);
  }

  template <class Leads>
  __device__ Winner wait(int step, Leads leads) const {
    uint64_t entry, arrived;
    [[maybe_unused]] int polls = 0;
    do {
      WTS_COUNT_POLL(polls, step)
      load_relaxed_x2(this->line(step), entry, arrived);
    } while (static_cast<uint32_t>(arrived) < this->ctas / kCluster);
    const Winner winner = entry_winner(entry);
    leads(winner);
    return winner;
  }

 private:
  __device__ static uint64_t* inbox() {
    __shared__ uint64_t words[kCluster];
    return words;
  }
};

__device__ inline void probe_stamp(const ExchangeProbeParams& p, int index) {
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  p.clocks[2 * index] = clock64();
  p.clocks[2 * index + 1] = static_cast<int64_t>(globaltimer_ns());
}

template <class Protocol>
__device__ void exchange_probe(const ExchangeProbeParams& p) {
  __shared__ Winner heard[2];  // in turn: a winner may be written while slow warps still read the one before
  const bool first_warp = threadIdx.x < 32, reports = blockIdx.x == 0 && threadIdx.x == 0;
  const Protocol protocol{p.words, *p.round, gridDim.x};
  if constexpr (requires { protocol.enter(); }) protocol.enter();
  if (first_warp) protocol.begin();
  uint32_t token = static_cast<uint32_t>(*p.anchor), digest = kProbeDigest;
#pragma unroll 1
  for (int step = 0; step < p.steps; step++) {
    if (first_warp) protocol.post(step, probe_key(token, step, blockIdx.x));
    if constexpr (requires { protocol.barrier(); }) protocol.barrier();
    if (first_warp) {
      const Winner winner = protocol.wait(step, [](Winner) {});
      if (threadIdx.x == 0) heard[step % 2] = winner;
    }
    __syncthreads();
    token = heard[step % 2].cta * kProbeRows + heard[step % 2].row;
    digest = probe_digest(digest, token);
    if (reports) p.tokens[step] = token;
    if (step == 0) probe_stamp(p, 0);
  }
  probe_stamp(p, 1);
  if (threadIdx.x == 0) p.digests[blockIdx.x] = digest;
  if (reports) *p.round += 1;
}

}  // namespace wts
