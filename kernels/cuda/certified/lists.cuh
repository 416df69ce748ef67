// What the list of a previous token adds to a step: rows that its biases lift above the candidates, and a bound of all others, which
// proves.
#pragma once
#include "certified/pick.cuh"

namespace wts {

template <CertifiedShape S>
struct BiasList {
  static constexpr int kAtOnce = S.list < 64 ? 1 : 2;  // entries that a lane looks at together
  static_assert(S.list % (32 * kAtOnce) == 0);

  const RowRule<S.sampling>& rule;  // of the step
  const uint16_t* base;             // logits of the step
  const typename Pick<S>::Set& set;
  const int32_t* rows;     // in shared memory, as what follows
  const uint16_t* biases;  // of those rows; they fall
  const float& bound;      // of what the list leaves out

  // Entries, and their base logits.
  struct Some {
    uint32_t row[kAtOnce];
    uint16_t logit[kAtOnce];
  };

  // One warp: the first entries, whether they will count or not.
  __device__ Some ask() const { return some(fresh_thread() % 32); }

  // One warp: the better of `best` and what the list lifts, of which `some` are the first entries. A listed row that is no candidate has a
  // base logit of at most `outside`: where that and its bias do not reach the best candidate, which are 96 of 100 entries of a list, the
  // row need not be looked at.
  __device__ uint64_t better(Some some, uint64_t best) const {
    const float outside = rule.most_of_upper(set.outside);
    uint64_t found = best;
#pragma unroll 1
    for (int entry = fresh_thread() % 32;;) {
      bool reaches[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        const float bias = widen(biases[entry + 32 * j]);
        reaches[j] = rule.bound(outside, bias, largest()) >= certified_order(best);
        if (!reaches[j]) continue;
        float low = __fadd_rn(widen(some.logit[j]), bias), high = 0.0f;  // the bias is rounded already
        round_bf16(low, high);
        found = max(found, certified_key(rule.order(low, rule.noise(some.row[j])), some.row[j], 0));
      }
      entry += 32 * kAtOnce;
      if (entry >= S.list || !__any_sync(~0u, reaches[kAtOnce - 1])) break;
      some = this->some(entry);
    }
    return over_warp(found);
  }

  // Whether this key is proved to be the step's.
  __device__ bool proves(uint64_t best) const {
    return best != 0 && certified_order(best) > rule.bound(rule.most_of_upper(set.outside), bound, largest());
  }

 private:
  __device__ float largest() const { return S.sampling ? __uint_as_float(set.largest) : 0.0f; }

  __device__ Some some(int entry) const {
    Some some;
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      some.row[j] = rows[entry + 32 * j];
      some.logit[j] = __ldg(base + some.row[j]);
    }
    return some;
  }
};

}  // namespace wts
