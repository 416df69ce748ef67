// Corrected logits of a walk whose tokens are settled: one pass over W2 for all steps at once, where a walk step by step reads W2 for each.
//
// Rule TWICE, of rows with temperature > 0, as a verifier that resamples needs them. Latents are rows of A, W2 rows columns of B, and both
// are read in the chunks of certified/weigh.cuh: sums, and so logits, are those that the table had, bit for bit.
#pragma once
#include "certified/rule.cuh"
#include "common/unroll.cuh"

namespace wts {

struct LogitsShape {
  int tiles;   // of 16 (request, step) columns that a CTA keeps: 1 in registers, more in shared memory
  bool early;  // starts before the walk has ended, and has its first rows of W2 by then
};

template <LogitsShape S>
struct SettledLogits {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16;  // of W2, of a warp at once
  static constexpr int kLatentBytes = 2 * kRank256 + 64;
  static constexpr int kColumns = 16 * S.tiles;

  struct Smem {
    alignas(16) uint8_t latents[kColumns * kLatentBytes];
    int64_t base[kColumns], logits[kColumns];  // where a column begins; -1 where no logits are wanted
  };

  struct Rows {
    uint4 chunk[2][8];
  };

  const Params& p;
  Smem& smem;

  __device__ Rows load(int first) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = min(first + half * 8 + g, p.vocab - 1);
      const uint4* source = p.weights + static_cast<int64_t>(row) * (kRank256 / 8) + t;
#pragma unroll
      for (int i = 0; i < 8; i++) rows.chunk[half][i] = load_once(source + 4 * i);
    }
    return rows;
  }

  // All threads: latents of the CTA's columns, which tokens decide.
  __device__ void fetch(int first_column) const {
    const int columns = p.batch * p.steps;
    for (int i = threadIdx.x; i < kColumns * 32; i += kThreads) {
      const int own = i / 32, column = first_column + own, chunk = i % 32;
      const bool there = column < columns;
      const int request = there ? column / p.steps : 0, step = there ? column % p.steps : 0;
      const int64_t* tokens = p.tokens + request * p.tokens_request_stride;
      const int64_t token = step == 0 ? p.anchor[request] : __ldcg(tokens + step - 1);
      const int64_t previous = max(int64_t{0}, min(token, static_cast<int64_t>(p.vocab - 1)));
      copy_async_16(smem.latents + own * kLatentBytes + chunk * 16, p.latents + (previous * 32 + chunk) * 16);
      if (chunk == 0) {
        const bool wanted = there && p.temperature[request] > 0.0f;
        smem.base[own] = request * p.base_request_stride + step * p.base_step_stride;
        smem.logits[own] = wanted ? request * p.logits_request_stride + step * p.logits_step_stride : -1;
      }
    }
    copy_async_wait();
    __syncthreads();
  }

  __device__ void latents(int tile, int i, uint4& low, uint4& high) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint8_t* own = smem.latents + (tile * 16 + g) * kLatentBytes + (t + 4 * i) * 16;
    low = *reinterpret_cast<const uint4*>(own);
    high = *reinterpret_cast<const uint4*>(own + 8 * kLatentBytes);
  }

  // Columns g and g + 8 of a tile, rows 2 t and 2 t + 1 of each half.
  __device__ void store(int tile, int first, const float (&sums)[2][4]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      const int column = tile * 16 + 8 * upper + g;
      if (smem.logits[column] < 0) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first + half * 8 + 2 * t;
        const uint16_t* base = p.base + smem.base[column] + row;
        uint16_t* logits = p.logits + smem.logits[column] + row;
        const bool low_there = row < p.vocab, high_there = row + 1 < p.vocab;
        const bool whole = high_there && (reinterpret_cast<uint64_t>(base) | reinterpret_cast<uint64_t>(logits)) % 4 == 0;
        uint32_t both = 0;
        if (whole) {
          both = __ldg(reinterpret_cast<const uint32_t*>(base));
        } else {
          both = (low_there ? base[0] : 0) | (high_there ? static_cast<uint32_t>(base[1]) << 16 : 0);
        }
        float low = sums[half][2 * upper], high = sums[half][2 * upper + 1];
        score_twice(low, high, widen(static_cast<uint16_t>(both)), widen(static_cast<uint16_t>(both >> 16)));
        const uint32_t bits = pack_bf16(low, high);
        if (whole) {
          __stcs(reinterpret_cast<uint32_t*>(logits), bits);
        } else {
          if (low_there) logits[0] = static_cast<uint16_t>(bits);
          if (high_there) logits[1] = static_cast<uint16_t>(bits >> 16);
        }
      }
    }
  }

  __device__ void run() const {
    const int stride = gridDim.x * kWarps * kRows;
    int first = (blockIdx.x * kWarps + threadIdx.x / 32) * kRows;
    Rows rows = load(first);
    if constexpr (S.early) wait_for_prerequisites();
    fetch(blockIdx.y * kColumns);
    uint4 low[8], high[8];
    if constexpr (S.tiles == 1) {
#pragma unroll
      for (int i = 0; i < 8; i++) latents(0, i, low[i], high[i]);
    }
#pragma unroll 1
    for (; first < p.vocab; first += stride) {
      const Rows ahead = load(first + stride);
#pragma unroll 1
      for (int tile = 0; tile < S.tiles; tile++) {
        float sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {
          uint4 a, b;
          if constexpr (S.tiles == 1) {
            a = low[i], b = high[i];
          } else {
            latents(tile, i, a, b);
          }
#pragma unroll
          for (int half = 0; half < 2; half++) {
            mma_bf16(sums[half], make_uint4(a.x, b.x, a.y, b.y), rows.chunk[half][i].x, rows.chunk[half][i].y);
            mma_bf16(sums[half], make_uint4(a.z, b.z, a.w, b.w), rows.chunk[half][i].z, rows.chunk[half][i].w);
          }
        }
        store(tile, first, sums);
      }
      rows = ahead;
    }
  }
};

template <LogitsShape S>
__device__ void settled_logits(const Params& p) {
  extern __shared__ __align__(128) uint8_t raw[];
  const SettledLogits<S> made{p, *reinterpret_cast<typename SettledLogits<S>::Smem*>(raw)};
  made.run();
}

}  // namespace wts
