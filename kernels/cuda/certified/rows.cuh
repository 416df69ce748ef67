// Rows of W2 in shared memory, as B of an mma_bf16.
#pragma once
#include "certified/params.cuh"

namespace wts {

constexpr int kRowChunks = kRank256 / 8;  // of 16 bytes
using Row = uint4[kRowChunks];

// Where chunk `c` of row `r` stands: odd rows change halves, so that eight lanes that read two rows meet eight groups of banks.
__device__ inline int row_place(int r, int c) { return c ^ (r % 2 * 4); }

}  // namespace wts
