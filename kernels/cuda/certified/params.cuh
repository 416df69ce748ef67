// What the certified walk is given, and where its CTAs leave words for one another.
#pragma once
#include "common/params.cuh"
#include "common/spin.cuh"

namespace wts {

constexpr int kCertifiedSteps = 32;  // of a launch; kernels/backends/certified_sm80.py refuses more
constexpr int kRank256 = 256;

// How a walk is laid out. A slice is what one warp looks through: 256 * vectors rows of a step's base logits, in sectors of 16.
struct CertifiedShape {
  int warps;       // of a CTA
  bool sampling;   // rows with temperature > 0 are drawn, rule GUMBEL; else all are greedy
  int slices;      // of a step
  int vectors;     // 16-byte loads of a lane
  int buffers;     // slices that a warp has room for: several where it looks through many
  int wanted;      // best rows that a slice offers, if it has as many, and not many more
  int candidates;  // of a step, at most: 128 or 256
  int previous;    // the best of them, which are weighed as previous tokens of the next step
  int block;       // previous tokens that are weighed together: 16 or 32
  int parts;       // CTAs that share the table of a step
  int extras;      // winners that are not among those, but are weighed nevertheless
  int team;        // CTAs of a request; without tables one
  int list;        // rows that each token's list names
  int smem_bytes;  // dynamic
  bool clocks;     // stamp the phases
};

struct CertifiedParams {
  Params walk;                  // weights, latents: W2 and W1 as they are; mail: two banks of words, see Mail
  const int32_t* list_rows;     // [vocab, list] rows with the largest biases after a token
  const uint16_t* list_biases;  // [vocab, list] those biases in bf16
  const float* list_bound;      // [vocab] which no other row's bias exceeds, in any order of fp32 sums
  uint64_t* offered;            // [pairs, slices, kSliceWords] what slices offer, see offer.cuh; tagged
  uint64_t* table;              // [pairs, previous] what follows one of the step before's candidates: an entry; tagged
  uint64_t* extra;              // [pairs, extras] what follows its winners that are not among those: token << 32 | entry
  int64_t* tally;               // [requests, 2] steps that were weighed again, steps that were searched; of all launches
  int32_t requests;             // that a bank of mail has room for
  int32_t padding;
};
static_assert(sizeof(CertifiedParams) == 160 + 64, "kernels/backends/certified_sm80.py mirrors this struct");

// A word that tells which launch wrote it. Whoever waits for it loads the word itself: no flag behind the data, so neither a fence before
// the flag nor a second load after it, 1.4 us of an exchange. 0 is no launch's tag but one in 2^32's.
__device__ inline uint64_t tagged(uint32_t round, uint32_t word) { return static_cast<uint64_t>(round + 1) << 32 | word; }

// One warp, up to `kAtOnce` loads of each lane under way: the words at `address(j)` from j = `first` on, once this launch has written them,
// 0 where that is null. The warp polls as one (see pick.cuh on divergence).
template <int kAtOnce, int kCount, class Address>
__device__ inline void await_tagged(uint32_t round, int first, Address&& address, uint32_t (&words)[kCount]) {
  [[maybe_unused]] int polls = 0;
  bool there;
  do {
    uint64_t found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const uint64_t* at = first + j < kCount ? address(first + j) : nullptr;
      found[j] = at ? load_relaxed(at) : tagged(round, 0);
    }
    there = true;
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      there &= static_cast<uint32_t>(found[j] >> 32) == round + 1;
      if (first + j < kCount) words[first + j] = static_cast<uint32_t>(found[j]);
    }
    WTS_COUNT_POLL(polls, kCount)
  } while (!__all_sync(~0u, there));
}
template <int kCount, class Address>
__device__ inline void await_tagged(uint32_t round, Address&& address, uint32_t (&words)[kCount]) {
  await_tagged<kCount>(round, 0, address, words);
}

// Words of a request, in one of two banks. A launch uses the bank of its parity and clears the other one, which nobody uses until the next
// launch: no launch needs a memset, and no word is cleared while somebody may still read it.
struct Mail {
  uint64_t extras[kCertifiedSteps];  // when a step's extra entries are there, how many, and 1
  uint64_t order, best;              // an order to the team: see search.cuh
  uint64_t searched;                 // CTAs of the team that have carried out orders
  uint64_t found[kCertifiedSteps];   // by order: the best key
  uint64_t padding[13];
};
static_assert(sizeof(Mail) == 640, "kernels/backends/certified_sm80.py sizes the banks");

constexpr int kArrivedWords = 8;

__device__ inline Mail* mail_bank(const CertifiedParams& p, uint32_t round) {
  return reinterpret_cast<Mail*>(p.walk.mail + kArrivedWords) + (round & 1) * static_cast<uint64_t>(p.requests);
}

// A word before the banks, one for each: CTAs that have begun this launch, so know its round.
__device__ inline uint64_t* arrived(const CertifiedParams& p, uint32_t round) { return p.walk.mail + (round & 1); }

__device__ inline uint64_t await_at_least(const uint64_t* word, uint64_t count) {
  uint64_t seen;
  [[maybe_unused]] int polls = 0;
  do {
    seen = load_acquire(word);
    WTS_COUNT_POLL(polls, static_cast<int>(count))
  } while (seen < count);
  return seen;
}

// One thread: once all CTAs know the round, it may be another one.
__device__ inline void end_round(const CertifiedParams& p, uint32_t round) {
  await_at_least(arrived(p, round), gridDim.x);
  *p.walk.round = round + 1;
}

// All threads.
__device__ inline void clear_other_bank(const CertifiedParams& p, uint32_t round, int threads) {
  uint64_t* other = reinterpret_cast<uint64_t*>(mail_bank(p, round + 1));
  const int words = p.requests * static_cast<int>(sizeof(Mail) / 8);
  if (blockIdx.x == 0 && threadIdx.x == 0) *arrived(p, round + 1) = 0;
#pragma unroll 1
  for (int i = blockIdx.x * threads + threadIdx.x; i < words; i += gridDim.x * threads) other[i] = 0;
}

// Base logits of a step.
__device__ inline const uint16_t* base_row(const CertifiedParams& p, int request, int step) {
  return p.walk.base + request * p.walk.base_request_stride + step * p.walk.base_step_stride;
}
__device__ inline uint32_t first_token(const CertifiedParams& p, int request) {
  return static_cast<uint32_t>(max(int64_t{0}, min(p.walk.anchor[request], static_cast<int64_t>(p.walk.vocab - 1))));
}

// When the second CTA (of the second step's table) and the last one (the last request's leader) came to the end of a phase.
enum class Phase { kBegun, kKnown, kOffered, kAwaited, kPicked, kGathered, kMultiplied, kWeighed, kTabled, kFetched, kWalked, kCount };
template <CertifiedShape S>
__device__ void phase(const CertifiedParams& p, Phase phase) {
  if constexpr (S.clocks) {
    const bool last = blockIdx.x == gridDim.x - 1;
    if (threadIdx.x > 0 || !(blockIdx.x == 1 || last)) return;
    int64_t* own = p.walk.clocks + last * static_cast<int>(Phase::kCount);
    if (phase == Phase::kBegun)
      for (int i = 0; i < static_cast<int>(Phase::kCount); i++) own[i] = 0;
    if (own[static_cast<int>(phase)] == 0) own[static_cast<int>(phase)] = clock64();  // the first time
  }
}

// A key: larger score first, then the lower row. `place` is the row's among the step's candidates plus one, 0 for none: of two scores of
// the same row that are equal, the candidate's counts.
constexpr int kPlaceBits = 10, kRowBits = 18;
constexpr uint32_t kMostRows = 1u << kRowBits;  // 262,144
__host__ __device__ constexpr uint64_t certified_key(uint32_t order, uint32_t row, uint32_t place) {
  return static_cast<uint64_t>(order) << 32 | static_cast<uint64_t>(kMostRows - 1 - row) << kPlaceBits | place;
}
__host__ __device__ constexpr uint32_t certified_row(uint64_t key) {
  return kMostRows - 1 - (static_cast<uint32_t>(key) >> kPlaceBits & (kMostRows - 1));
}
__host__ __device__ constexpr uint32_t certified_place(uint64_t key) { return static_cast<uint32_t>(key) & ((1u << kPlaceBits) - 1); }
__host__ __device__ constexpr uint32_t certified_order(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

// Of two keys of which the first may have a place: a row that was found again keeps it.
__device__ inline uint64_t better_key(uint64_t known, uint64_t found) {
  return certified_row(found) == certified_row(known) ? known : max(known, found);
}

// The largest key of a warp.
__device__ inline uint64_t over_warp(uint64_t own) {
  const uint32_t upper = own >> 32, most = __reduce_max_sync(~0u, upper);
  return static_cast<uint64_t>(most) << 32 | __reduce_max_sync(~0u, upper == most ? static_cast<uint32_t>(own) : 0u);
}

// An entry of a table: the key's lower 28 bits, and above them whether the step is proved. Candidates that are not there have kNobody.
constexpr uint32_t kProved = 1u << 31, kNobody = 1;
__device__ inline uint32_t table_entry(uint64_t key, bool proved) {
  return (static_cast<uint32_t>(key) & ((1u << (kRowBits + kPlaceBits)) - 1)) | (proved ? kProved : 0);
}

}  // namespace wts
