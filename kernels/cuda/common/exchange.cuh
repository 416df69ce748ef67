// How the CTAs agree on one token a step. Two protocols with one interface, both called by the first warp of every CTA:
//   begin()             once a launch, before the first post; clears what a later launch will use, if anything
//   post(step, key)     this CTA's best row
//   wait(step, leads)   the winner; calls `leads(candidate)` whenever another CTA takes the lead, the last time with the winner, so
//                       that the caller can fetch a likely winner's latent while others still arrive
// State lives in `words` (zeroed once by the host) and `round`, the number of launches before this one. No launch needs a memset.
#pragma once
#include "common/key.cuh"
#include "common/spin.cuh"

namespace wts {

constexpr int kMaxSteps = 32;  // of a launch; kernels/persistent.py refuses more

struct Winner {
  uint32_t cta;
  uint32_t row;  // within the CTA
};

// The paper's protocol: an atomic max on a key and an atomic add on a count, side by side, polled together by one 16-byte load.
//
// It leans on three properties of sm_90 that PTX does not promise: that the 16-byte load sees both halves at one moment, that all lanes of
// a warp that loads it see the same, and that one thread's two reductions on one 32-byte sector are performed in order. `Mailboxes` needs
// none of them and costs about 0.25 us a step more (H200).
//
// Every step of a launch has its own pair, in the bank of the launch's parity; the launch clears the other bank, which nobody uses until
// the next launch. So no pair is ever reused while somebody may still read it, and nothing can wrap.
template <int kMaxCtas, int kRequests = 1>
struct KeyCountPair {
  static_assert(kMaxCtas <= 256, "eight bits of an entry hold the inverted CTA");
  static constexpr int kStride = 16;  // words: a 128-byte line a pair, since atomics to one line follow one another
  static constexpr int kPairs = kMaxSteps * kRequests;

  uint64_t* words;
  uint32_t round;
  uint32_t ctas;

  __device__ uint64_t* pair(int step, int request = 0) const {
    return words + ((round & 1) * kPairs + step * kRequests + request) * kStride;
  }

  // All threads of a group that covers the CTAs' pairs: thread `thread` of `threads`.
  __device__ void clear_other_bank(int thread, int threads) const {
    for (int i = blockIdx.x * threads + thread; i < kPairs; i += gridDim.x * threads) {
      uint64_t* other = words + ((~round & 1) * kPairs + i) * kStride;
      other[0] = other[1] = 0;
    }
  }

  // The first warp of every CTA.
  __device__ void begin() const {
    clear_other_bank(threadIdx.x % 32, 32);
    if (blockIdx.x == 0)
      for (int request = threadIdx.x % 32; request < kRequests; request += 32) prefetch_l2(pair(0, request));
  }

  // One thread: this CTA's best row of one request and the order of its score.
  __device__ void post_entry(int step, int request, uint32_t order, uint32_t row) const {
    const uint64_t entry = static_cast<uint64_t>(order) << 24 | static_cast<uint64_t>(255 - blockIdx.x) << 16 | (kLastRow - row);
    red_max_relaxed(pair(step, request), entry);
    red_add_relaxed(pair(step, request) + 1, 1);
    if (blockIdx.x == 0 && step + 1 < kMaxSteps) prefetch_l2(pair(step + 1, request));  // cold L2: the next pair must not come from HBM
  }

  // One look at a pair: the entry that leads, and how many CTAs have posted.
  __device__ uint32_t arrived(int step, int request, uint64_t& leader) const {
    uint64_t count;
    load_relaxed_x2(pair(step, request), leader, count);
    return static_cast<uint32_t>(count);
  }

  __device__ static Winner winner_of(uint64_t entry) {
    return {255 - static_cast<uint32_t>(entry >> 16 & 255), key_row(static_cast<uint32_t>(entry))};
  }

  __device__ void post(int step, uint32_t key, int request = 0) const {
    if (threadIdx.x % 32 == 0) post_entry(step, request, NarrowKey::order(key), key_row(key));
  }
  __device__ void post(int step, uint64_t key, int request = 0) const {
    if (threadIdx.x % 32 == 0) post_entry(step, request, WideKey::order(key), key_row(static_cast<uint32_t>(key)));
  }

  template <class Leads>
  __device__ Winner wait(int step, Leads leads, int request = 0) const {
    uint64_t key, leader = 0;
    Winner winner{};
    [[maybe_unused]] int polls = 0;
    bool complete_now;
    do {
      WTS_COUNT_POLL(polls, step)
      complete_now = arrived(step, request, key) >= ctas;
      if (key != leader) {
        leader = key;
        winner = winner_of(key);
        leads(winner);
      }
    } while (!complete_now);
    return winner;
  }
};

// Mailboxes: every CTA writes its key, tagged with round and step, into `kCopies` boxes and polls one of them. A word is one 8-byte relaxed
// store and says itself whether it has arrived: nothing beyond the PTX memory model is promised. Two boxes in turn are enough: a CTA posts
// step s + 2 only after it has every word of s + 1, and those are posted only by CTAs that have finished reading s.
template <int kMaxCtas, int kRequests = 1>
struct Mailboxes {
  static_assert(kRequests == 1, "mailboxes serve one request");
  static_assert(kMaxCtas <= 256, "eight bits of the reduction hold the inverted CTA");
  static constexpr int kCopies = 33;  // 1 copy: 3.9 us a step, 8: 3.4, 33: 3.3, 132: 3.4 (an early version of the walk)
  static constexpr int kSlots = (kMaxCtas + 15) / 16 * 16;  // whole 128-byte lines
  static constexpr int kPairs = (kMaxCtas + 63) / 64;       // 16-byte loads a lane polls

  uint64_t* words;
  uint32_t round;
  uint32_t ctas;

  __device__ uint64_t* box(int step, int copy) const { return words + ((step & 1) * kCopies + copy) * kSlots; }
  __device__ uint32_t tag(int step) const { return round * kMaxSteps + step + 1; }

  __device__ void begin() const {}

  __device__ void post(int step, uint32_t key, int = 0) const {
    for (int copy = threadIdx.x % 32; copy < kCopies; copy += 32)
      store_relaxed(box(step, copy) + blockIdx.x, static_cast<uint64_t>(tag(step)) << 32 | key);
  }

  template <class Leads>
  __device__ Winner wait(int step, Leads leads, int = 0) const {
    const int lane = threadIdx.x % 32;
    const uint64_t* mine = box(step, blockIdx.x % kCopies);
    uint32_t best = 0, slot = 0;
    bool pending = true;
    [[maybe_unused]] int polls = 0;
    while (__any_sync(~0u, pending)) {
      WTS_COUNT_POLL(polls, step)
      pending = false;
      best = slot = 0;
      uint64_t word[2 * kPairs] = {};
#pragma unroll
      for (int i = 0; i < kPairs; i++)
        if (const uint32_t first = 2 * (lane + 32 * i); first < ctas) load_relaxed_x2(mine + first, word[2 * i], word[2 * i + 1]);
#pragma unroll
      for (int i = 0; i < 2 * kPairs; i++) {  // rising slots, so a strict comparison keeps the lowest CTA of equal logits
        const uint32_t sender = 2 * (lane + 32 * (i / 2)) + i % 2, key = static_cast<uint32_t>(word[i]);
        pending |= sender < ctas && static_cast<uint32_t>(word[i] >> 32) != tag(step);
        if (sender < ctas && key_order(key) > key_order(best)) best = key, slot = sender;
      }
    }
    const uint32_t won = 255 - (__reduce_max_sync(~0u, key_order(best) << 8 | (255 - slot)) & 255);
    const Winner winner{won, key_row(__shfl_sync(~0u, best, won / 2 % 32))};
    leads(winner);
    return winner;
  }
};

}  // namespace wts
