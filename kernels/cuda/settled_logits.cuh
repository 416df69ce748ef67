// Corrected logits of a walk whose tokens are settled: one pass over W2 for all steps at once, where a walk step by step reads W2 for each.
//
// Rule TWICE, of rows with temperature > 0, as a verifier that resamples needs them. Latents are rows of A, W2 rows columns of B, and both
// are read in the chunks of certified/weigh.cuh: sums, and so logits, are those that the table had, bit for bit.
//
// Rows come in blocks of eight, 4 KB in a row, to a warp's own places in shared memory, and no warp waits for another. Reading W2 and
// nothing else takes 21 us row by row, and 24 straight into fragments, 64 bytes of each of eight rows at a time.
#pragma once
#include "certified/rows.cuh"
#include "certified/rule.cuh"

namespace wts {

struct LogitsShape {
  int tiles;   // of 16 (request, step) columns, of a CTA
  int groups;  // of CTAs: each passes over W2 with its own columns
  int stages;  // blocks of a warp that are under way
};

template <LogitsShape S>
struct SettledLogits {
  static constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = 8;  // of W2, of a block
  static constexpr int kLatentBytes = 2 * kRank256 + 64;
  static constexpr int kColumns = 16 * S.tiles;

  struct Smem {
    alignas(16) Row rows[kWarps][S.stages][kRows];
    alignas(16) uint8_t latents[kColumns * kLatentBytes];
    int64_t base[kColumns], logits[kColumns];  // where a column begins; -1 where no logits are wanted
  };

  // Columns g and g + 8 of a tile, rows 2 t and 2 t + 1 of a block: a word each.
  struct Words {
    uint32_t of[2];
  };

  const Params& p;
  Smem& smem;

  // One warp: begin to bring the block of rows from `first` on.
  __device__ void bring(int stage, int first) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRows; r++)
      if (first + r < p.vocab)
        copy_async_16(&smem.rows[warp][stage][r][row_place(r, lane)], p.weights + static_cast<int64_t>(first + r) * kRowChunks + lane);
    copy_async_commit();
  }

  // All threads: latents of the CTA's columns, which tokens decide.
  __device__ void fetch(int first_column) const {
    const int columns = p.batch * p.steps;
#pragma unroll 4
    for (int i = threadIdx.x; i < kColumns * kRowChunks; i += kThreads) {
      const int own = i / kRowChunks, column = first_column + own, chunk = i % kRowChunks;
      const bool there = column < columns;
      const int request = there ? column / p.steps : 0, step = there ? column % p.steps : 0;
      const int64_t* tokens = p.tokens + request * p.tokens_request_stride;
      const int64_t token = step == 0 ? p.anchor[request] : __ldcg(tokens + step - 1);
      const int64_t previous = max(int64_t{0}, min(token, static_cast<int64_t>(p.vocab - 1)));
      // Not copied asynchronously: whoever waited for that would wait for all rows under way.
      *reinterpret_cast<uint4*>(smem.latents + own * kLatentBytes + chunk * 16) =
          __ldg(reinterpret_cast<const uint4*>(p.latents) + previous * kRowChunks + chunk);
      if (chunk == 0) {
        const bool wanted = there && p.temperature[request] > 0.0f;
        smem.base[own] = request * p.base_request_stride + step * p.base_step_stride;
        smem.logits[own] = wanted ? request * p.logits_request_stride + step * p.logits_step_stride : -1;
      }
    }
    __syncthreads();
  }

  template <class Body>
  __device__ void each_pair(int tile, int first, Body&& body) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = first + 2 * t;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      const int column = tile * 16 + 8 * upper + g;
      if (smem.logits[column] < 0 || row >= p.vocab) continue;
      body(upper, p.base + smem.base[column] + row, p.logits + smem.logits[column] + row, row + 1 < p.vocab);
    }
  }

  __device__ Words load_base(int tile, int first) const {
    Words words{};
    each_pair(tile, first, [&](int upper, const uint16_t* base, uint16_t*, bool both) {
      if (both && reinterpret_cast<uint64_t>(base) % 4 == 0) {
        words.of[upper] = __ldg(reinterpret_cast<const uint32_t*>(base));
      } else {
        words.of[upper] = base[0] | (both ? static_cast<uint32_t>(base[1]) << 16 : 0);
      }
    });
    return words;
  }

  __device__ void store(int tile, int first, const float (&sums)[4], const Words& base) const {
    each_pair(tile, first, [&](int upper, const uint16_t*, uint16_t* logits, bool both) {
      float low = sums[2 * upper], high = sums[2 * upper + 1];
      score_twice(low, high, widen(static_cast<uint16_t>(base.of[upper])), widen(static_cast<uint16_t>(base.of[upper] >> 16)));
      const uint32_t bits = pack_bf16(low, high);
      if (both && reinterpret_cast<uint64_t>(logits) % 4 == 0) {
        __stcs(reinterpret_cast<uint32_t*>(logits), bits);
      } else {
        logits[0] = static_cast<uint16_t>(bits);
        if (both) logits[1] = static_cast<uint16_t>(bits >> 16);
      }
    });
  }

  __device__ void multiply(int tile, const uint4 (&weights)[8], float (&sums)[4]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint8_t* own = smem.latents + (tile * 16 + g) * kLatentBytes + t * 16;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint4 a = *reinterpret_cast<const uint4*>(own + 64 * i), b = *reinterpret_cast<const uint4*>(own + 64 * i + 8 * kLatentBytes);
      mma_bf16(sums, make_uint4(a.x, b.x, a.y, b.y), weights[i].x, weights[i].y);
      mma_bf16(sums, make_uint4(a.z, b.z, a.w, b.w), weights[i].z, weights[i].w);
    }
  }

  // One warp: a block of rows for all tiles. `base` is the first tile's, and after that the block's after the next: a trip to memory takes
  // longer than a block.
  __device__ void block(int first, int stage, int stride, Words& base) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    copy_async_wait_older<S.stages - 1>();
    __syncwarp();
    uint4 weights[8];
#pragma unroll
    for (int i = 0; i < 8; i++) weights[i] = smem.rows[warp][stage][g][row_place(g, t + 4 * i)];
    __syncwarp();
    bring(stage, first + S.stages * stride);
    Words next = S.tiles > 1 ? load_base(1, first) : Words{};
    float sums[4] = {};
    multiply(0, weights, sums);
    store(0, first, sums, base);
    base = load_base(0, first + 2 * stride);
#pragma unroll 1
    for (int tile = 1; tile < S.tiles; tile++) {
      const Words own = next;
      if (tile + 1 < S.tiles) next = load_base(tile + 1, first);
      float more[4] = {};
      multiply(tile, weights, more);
      store(tile, first, more, own);
    }
  }

  __device__ void run() const {
    const int ctas = gridDim.x / S.groups, stride = ctas * kWarps * kRows;
    int first = (blockIdx.x % ctas * kWarps + threadIdx.x / 32) * kRows, stage = 0;
#pragma unroll
    for (int n = 0; n < S.stages; n++) bring(n, first + n * stride);
    fetch(blockIdx.x / ctas * kColumns);
    Words even = load_base(0, first), odd = load_base(0, first + stride);
    const auto advance = [&] { first += stride, stage = stage + 1 == S.stages ? 0 : stage + 1; };
#pragma unroll 1
    while (first < p.vocab) {
      block(first, stage, stride, even);
      advance();
      if (first >= p.vocab) break;
      block(first, stage, stride, odd);
      advance();
    }
  }
};

template <LogitsShape S>
__device__ void walk_settled_logits(const Params& p) {
  extern __shared__ __align__(128) uint8_t raw[];
  const SettledLogits<S> made{p, *reinterpret_cast<typename SettledLogits<S>::Smem*>(raw)};
  made.run();
}

}  // namespace wts
