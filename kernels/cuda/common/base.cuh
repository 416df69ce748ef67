// Base logits of a CTA's rows for every step, copied to shared memory once by the bulk engine: a step then never waits for them. (Loops of
// loads or of cp.async, issued behind the register tiles' loads, wait for those at every turn: 0.4 us a step that looked like slope.)
#pragma once
#include "common/bulk.cuh"
#include "common/params.cuh"

namespace wts {

// [steps, kRows + 8] bf16. A step's rows need not start on 16 bytes in global memory, so what is copied is the aligned window around them:
// the rows of a step start `shift(step)` elements into its slice.
template <int kRows>
struct BaseSlices {
  static constexpr int kPitch = kRows + 8;
  static constexpr uint16_t kMinusInf = 0xFF80;

  uint16_t* slices;
  const Params& p;

  __device__ const uint16_t* source(int step) const { return p.base + step * p.base_step_stride + blockIdx.x * kRows; }
  // The low bits of the address decide, and a CTA's rows are a multiple of 8.
  __device__ int shift(int step) const {
    static_assert(kRows % 8 == 0);
    return (static_cast<uint32_t>(reinterpret_cast<uint64_t>(p.base)) + 2 * step * static_cast<uint32_t>(p.base_step_stride)) % 16 / 2;
  }
  __device__ const uint16_t* rows(int step) const { return slices + step * kPitch + shift(step); }
  __device__ int valid() const { return min(kRows, p.vocab - static_cast<int>(blockIdx.x) * kRows); }

  __device__ uint32_t bytes(int step) const { return (shift(step) + valid() + 7) / 8 * 16; }

  __device__ uint32_t bytes() const {
    uint32_t sum = 0;
    for (int step = 0; step < p.steps; step++) sum += bytes(step);
    return sum;
  }

  // One thread.
  __device__ void fetch(const BulkCopies& copies) const {
    for (int step = 0; step < p.steps; step++) copies.copy(slices + step * kPitch, source(step) - shift(step), bytes(step));
  }

  // All threads, once the copies are there: rows past the vocabulary become -inf, so that they never win.
  __device__ void mask(int threads) const {
    const int padding = kRows - valid();
    for (int i = threadIdx.x; i < padding * p.steps; i += threads) {
      const int step = i / padding;
      slices[step * kPitch + shift(step) + valid() + i % padding] = kMinusInf;
    }
  }
};

}  // namespace wts
