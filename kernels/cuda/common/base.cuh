// Base logits of a CTA's rows in shared memory, ahead of the step that needs them. (Loaded step by step into registers they cost up to 9 us
// at 16 steps and looked like slope.)
#pragma once
#include "common/params.cuh"

namespace wts {

// slice: [rows] bf16 in shared memory, of one step of one request; rows is a multiple of 8. Rows past the vocabulary become -inf, so that
// they never win.
__device__ inline void fetch_base(uint16_t* slice, const Params& p, int request, int step, int rows, int thread, int threads) {
  constexpr uint16_t kMinusInf = 0xFF80;
  const int first = blockIdx.x * rows;
  const uint16_t* source = p.base + request * p.base_request_stride + step * p.base_step_stride + first;
  const bool vectors = reinterpret_cast<uint64_t>(source) % 16 == 0;
  for (int row = thread * 8; row < rows; row += threads * 8) {
    if (vectors && first + row + 8 <= p.vocab) {
      copy_async_16(slice + row, source + row);
    } else {
      for (int r = row; r < row + 8; r++) slice[r] = first + r < p.vocab ? source[r] : kMinusInf;
    }
  }
}

}  // namespace wts
