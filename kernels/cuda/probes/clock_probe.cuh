// At what frequency does the SM run right now? One thread spins for a while and reads both the cycle counter and the wall clock.
#pragma once
#include "common/ptx.cuh"

namespace wts {

// The timer ticks coarsely, so the window starts and ends on a tick.
__device__ inline uint64_t next_tick_ns(uint64_t after) {
  uint64_t now;
  do now = globaltimer_ns();
  while (now <= after);
  return now;
}

// out: cycles, nanoseconds.
__device__ inline void clock_probe(int64_t* out, int64_t spin_ns) {
  const uint64_t start = next_tick_ns(globaltimer_ns());
  const int64_t first = clock64();
  const uint64_t stop = next_tick_ns(start + spin_ns);
  out[0] = clock64() - first;
  out[1] = static_cast<int64_t>(stop - start);
}

}  // namespace wts
