// A warp's slices, one after the other; the next one is under way while it looks through one.
#pragma once
#include "certified/offer.cuh"

namespace wts {

// `Deal` says which slices are the warp's: number(n) is its slice number n, counted over all steps and requests.
template <CertifiedShape S, class Deal>
struct Offers {
  static constexpr bool kAhead = S.buffers == 2;
  static_assert(S.buffers <= 2);

  struct Slice {
    int request, step, slice;
  };

  const CertifiedParams& p;
  typename Offer<S>::Smem& smem;
  Deal deal;
  int done = 0;
  Slice next{};  // to look through; it is under way

  // By step, then request: what is needed first comes first.
  __device__ Slice located(int number) const {
    const int of_step = p.walk.batch * S.slices, step = number / of_step, rest = number - step * of_step;
    return {rest / S.slices, step, rest % S.slices};
  }
  __device__ Offer<S> offer() const { return {p, smem}; }

  // Begin to bring the warp's slice number `n`.
  __device__ Slice bring(int n) const {
    const Slice slice = located(deal.number(n));
    if (slice.step < p.walk.steps) offer().load(base_row(p, slice.request, slice.step), slice.slice, smem.slices[n % S.buffers]);
    copy_async_commit();  // also of nothing: groups are counted
    return slice;
  }

  __device__ void begin() { next = bring(0); }

  // Whether there was one to look through.
  __device__ bool look(uint32_t round) {
    const Slice own = next;
    if (own.step >= p.walk.steps) return false;
    if constexpr (kAhead) next = bring(done + 1);
    copy_async_wait_older<kAhead>();  // a lane reads only what it brought itself
    const RowRule<S.sampling> rule = RowRule<S.sampling>::of(p.walk, own.request, own.step, round);
    offer().slice(rule, own.request * p.walk.steps + own.step, own.slice, round, smem.slices[done % S.buffers]);
    done++;
    if constexpr (!kAhead) next = bring(done);
    return true;
  }
};

}  // namespace wts
