// Waiting. Test builds bound every spin: a walk that cannot make progress ends with a message instead of hanging the GPU.
#pragma once
#include <cuda/ptx>

#include "common/ptx.cuh"

namespace wts {

#ifdef WTS_SPIN_LIMIT
#define WTS_COUNT_POLL(polls, where)                                                                                                \
  if (++(polls) > WTS_SPIN_LIMIT) {                                                                                                 \
    printf("walk: CTA %d thread %d gave up after %d polls at %d\n", (int)blockIdx.x, (int)threadIdx.x, (int)WTS_SPIN_LIMIT, where); \
    __trap();                                                                                                                       \
  }
#else
#define WTS_COUNT_POLL(polls, where)
#endif

// Until phase `parity` of a shared-memory barrier is over.
__device__ inline void wait_barrier(uint64_t* barrier, int parity) {
  [[maybe_unused]] int polls = 0;
  while (!cuda::ptx::mbarrier_try_wait_parity(barrier, parity)) {
    WTS_COUNT_POLL(polls, -1 - parity)
  }
}

}  // namespace wts
