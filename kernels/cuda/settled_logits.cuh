// Corrected logits of a walk whose tokens are settled: one pass over W2 for all steps at once, where a walk step by step reads W2 for each.
//
// Rule TWICE, of rows with temperature > 0, as a verifier that resamples needs them. Latents are rows of A, W2 rows columns of B, and both
// are read in the chunks of certified/weigh.cuh: sums, and so logits, are those that the table had, bit for bit. A warp loads its next rows
// of W2 and their base logits before it multiplies: one at a time they would each cost a trip to memory.
#pragma once
#include "certified/rule.cuh"

namespace wts {

struct LogitsShape {
  int tiles;   // of 16 (request, step) columns, of a CTA
  int groups;  // of CTAs: each passes over W2 with its own columns
};

template <LogitsShape S>
struct SettledLogits {
  static constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = 16;  // of W2, of a warp at once
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
#pragma unroll 1
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

  // Columns g and g + 8 of a tile, rows 2 t and 2 t + 1 of each half: word [upper][half].
  struct Words {
    uint32_t of[2][2];
  };

  template <class Body>
  __device__ void each_pair(int tile, int first, Body&& body) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      const int column = tile * 16 + 8 * upper + g;
      if (smem.logits[column] < 0) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first + half * 8 + 2 * t;
        if (row < p.vocab) body(upper, half, p.base + smem.base[column] + row, p.logits + smem.logits[column] + row, row + 1 < p.vocab);
      }
    }
  }

  __device__ Words load_base(int tile, int first) const {
    Words words{};
    each_pair(tile, first, [&](int upper, int half, const uint16_t* base, uint16_t*, bool both) {
      if (both && reinterpret_cast<uint64_t>(base) % 4 == 0) {
        words.of[upper][half] = __ldg(reinterpret_cast<const uint32_t*>(base));
      } else {
        words.of[upper][half] = base[0] | (both ? static_cast<uint32_t>(base[1]) << 16 : 0);
      }
    });
    return words;
  }

  __device__ void store(int tile, int first, const float (&sums)[2][4], const Words& base) const {
    each_pair(tile, first, [&](int upper, int half, const uint16_t*, uint16_t* logits, bool both) {
      float low = sums[half][2 * upper], high = sums[half][2 * upper + 1];
      const uint32_t pair = base.of[upper][half];
      score_twice(low, high, widen(static_cast<uint16_t>(pair)), widen(static_cast<uint16_t>(pair >> 16)));
      const uint32_t bits = pack_bf16(low, high);
      if (both && reinterpret_cast<uint64_t>(logits) % 4 == 0) {
        __stcs(reinterpret_cast<uint32_t*>(logits), bits);
      } else {
        logits[0] = static_cast<uint16_t>(bits);
        if (both) logits[1] = static_cast<uint16_t>(bits >> 16);
      }
    });
  }

  __device__ void run() const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int ctas = gridDim.x / S.groups, stride = ctas * kWarps * kRows;
    int first = (blockIdx.x % ctas * kWarps + threadIdx.x / 32) * kRows;
    Rows rows = load(first);
    fetch(blockIdx.x / ctas * kColumns);
#pragma unroll 1
    for (; first < p.vocab; first += stride) {
#pragma unroll 1
      for (int tile = 0; tile < S.tiles; tile++) {
        const Words base = load_base(tile, first);
        float sums[2][4] = {};
        const uint8_t* own = smem.latents + (tile * 16 + g) * kLatentBytes + t * 16;
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const uint4 a = *reinterpret_cast<const uint4*>(own + 64 * i),
                      b = *reinterpret_cast<const uint4*>(own + 64 * i + 8 * kLatentBytes);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            mma_bf16(sums[half], make_uint4(a.x, b.x, a.y, b.y), rows.chunk[half][i].x, rows.chunk[half][i].y);
            mma_bf16(sums[half], make_uint4(a.z, b.z, a.w, b.w), rows.chunk[half][i].z, rows.chunk[half][i].w);
          }
        }
        if (tile == S.tiles - 1) rows = load(first + stride);  // on their way while logits are stored
        store(tile, first, sums, base);
      }
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
