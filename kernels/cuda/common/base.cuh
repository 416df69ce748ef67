// Base logits of a CTA's rows for every step, copied to shared memory once: a step then never waits for them. (Loaded step by step into
// registers they cost up to 9 us at 16 steps and looked like slope.)
#pragma once
#include "common/params.cuh"

namespace wts {

// slices: [steps, rows] bf16 in shared memory; rows is a multiple of 8. Rows past the vocabulary become -inf, so that they never win.
__device__ inline void fetch_base(uint16_t* slices, const Params& p, int rows, int thread, int threads) {
  constexpr uint16_t kMinusInf = 0xFF80;
  const int first = blockIdx.x * rows;
  const bool vectors = (reinterpret_cast<uint64_t>(p.base) | static_cast<uint64_t>(p.base_step_stride * 2)) % 16 == 0;
  const int chunks = rows / 8;
  for (int i = thread; i < p.steps * chunks; i += threads) {
    const int step = i / chunks, row = i % chunks * 8;
    const uint16_t* source = p.base + step * p.base_step_stride + first + row;
    uint16_t* target = slices + step * rows + row;
    if (vectors && first + row + 8 <= p.vocab) {
      copy_async_16(target, source);
    } else {
      for (int r = 0; r < 8; r++) target[r] = first + row + r < p.vocab ? source[r] : kMinusInf;
    }
  }
}

}  // namespace wts
