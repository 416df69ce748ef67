// A step of the walk as two small kernels, chained by programmatic dependent launch: `score` finds every CTA's best row, `select` the best
// of all CTAs, which is the token. The rival of fusion: the arithmetic of walk_streaming.cuh, but launches where that has an exchange. int8
// weights (rule INT8) or bf16 weights (rule TWICE), greedy, up to four requests.
//
// A kernel may start while those before it still run. What makes that right:
//   1. Every thread waits for the kernel before (griddepcontrol.wait) before its CTA ends, so a grid ends only after the grid before it:
//      when a wait returns, all earlier kernels of the walk have ended, not only the last, and all they wrote can be seen.
//   2. Before the wait a kernel reads only what no kernel of the walk writes (weights, scales, base logits) and writes only its own shared
//      memory. So nothing is read before it is written, and nothing overwritten (the one row of entries a request, the tokens) that an
//      earlier kernel still reads.
//   3. The first kernel of a walk is launched without the attribute: it starts after all earlier work of the stream has ended. All others
//      start after it has, so base logits and anchors are there for them too, also before their wait.
// Words that kernels hand each other are read by ld.relaxed.gpu, past the L1 of an SM that may have held the line before. Who waits holds
// its SM, but starts only after all CTAs of the kernels before have: nobody waits for a CTA that finds no place.
#pragma once
#include <cuda/ptx>
#include <cuda/std/type_traits>

#include "common/base.cuh"
#include "common/latent.cuh"
#include "common/score.cuh"
#include "common/spin.cuh"
#include "common/unit.cuh"
#include "common/walk_loop.cuh"

namespace wts {

struct StepParams {
  Params walk;  // mail: [batch, kEntries], of every CTA its best row; zero before the first launch
  int32_t step;
  int32_t padding;
};
static_assert(sizeof(StepParams) == 168, "kernels/backends/pdl_chain.py mirrors this struct");

constexpr int kEntries = 256;  // of a request; those of CTAs that are not there stay 0 and lose

// Larger logit first (its 16 ordered bits are the key's), then the lower token.
__host__ __device__ constexpr uint64_t chain_entry(uint32_t key, uint32_t token) {
  return static_cast<uint64_t>(key_order(key)) << 32 | (0xFFFFFFFFu - token);
}

struct ChainShape {
  bool bf16;         // weights: bf16, else int8
  int batch;         // requests: 1, 2 or 4
  int warps;         // of a CTA
  int tiles;         // 16-row tiles of a CTA; warp w scores tiles w, w + warps, ...
  int stages;        // 4 KB units of a warp in shared memory at once: what is there before the token is
  int kept_percent;  // of W2 that L2 is asked to keep from step to step
  bool early;        // let the next kernel start at once, else when this one has asked for its last weights
};

template <ChainShape S>
struct ChainScore {
  static constexpr int kThreads = 32 * S.warps, kRows = S.tiles * 16;
  static constexpr int kUnitsPerTile = units_per_tile(S.bf16), kUnitBytes = 4096;
  static constexpr bool kBoth = S.batch == 4;  // a lane makes logits of both its rows of a tile; with fewer requests the quad's lanes share
  static_assert(S.batch == 1 || S.batch == 2 || S.batch == 4);
  static_assert(S.batch <= S.warps && S.warps <= 32);
  static_assert(kRows <= static_cast<int>(kLastRow), "a key has 16 bits for a row");
  using Latent = cuda::std::conditional_t<S.bf16, LatentBf16<1>, LatentInt8<1>>;
  using Sum = cuda::std::conditional_t<S.bf16, float, int32_t>;

  struct Smem {
    alignas(128) uint8_t stages[S.warps * S.stages * kUnitBytes];
    alignas(16) uint8_t latent[S.batch * Latent::kSmemBytes];
    alignas(16) float row_scale[S.bf16 ? 4 : kRows];
    alignas(16) uint16_t base[S.batch * kRows];
    uint32_t best[S.batch][32];  // of every warp
    alignas(8) uint64_t full[S.warps * S.stages];
  };

  const Params& p;
  const int step;
  Smem& smem;
  // The eight columns of an MMA are four requests in two planes (bf16: twice), or fewer requests again and again.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int request = t % S.batch;                   // whose logits this lane makes
  const int column = g / 2 % S.batch;                // whose latent this lane feeds to the MMA
  const int upper = kBoth ? 0 : t / 2;               // of a tile's rows g and g + 8, which is this lane's, or its first
  const bool serves = warp < min(S.batch, p.batch);  // this warp fetches a latent and posts an entry, for the request of its number
  const int units = (S.tiles + S.warps - 1 - warp) / S.warps * kUnitsPerTile;
  int asked = 0;  // units so far

  __device__ Latent latent(int of) const { return {smem.latent + of * Latent::kSmemBytes}; }

  // Ask for the warp's next unit. The stage it takes has been read by the whole warp.
  __device__ void fill() {
    if (asked == units) return;
    const int unit = asked++, stage = warp * S.stages + unit % S.stages;
    if (!S.early && warp == 0 && asked == units) launch_dependents();
    if (lane > 0) return;
    const int tile = blockIdx.x * S.tiles + unit / kUnitsPerTile * S.warps + warp;
    const uint4* source = p.weights + static_cast<int64_t>(tile * kUnitsPerTile + unit % kUnitsPerTile) * (kUnitBytes / 16);
    uint64_t* full = &smem.full[stage];
    cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, full, kUnitBytes);
    copy_bulk(smem.stages + stage * kUnitBytes, source, kUnitBytes, full, l2_policy(S.kept_percent / 100.0f));
  }

  // Before the wait: all that does not depend on the token, as far as shared memory reaches.
  __device__ void prefetch() {
    if (lane == 0) {
      for (int stage = 0; stage < S.stages; stage++) cuda::ptx::mbarrier_init(&smem.full[warp * S.stages + stage], 1);
      cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
    }
    __syncwarp();  // all lanes will wait on them
    for (int stage = 0; stage < S.stages; stage++) fill();
    for (int of = 0; of < min(S.batch, p.batch); of++) fetch_base(smem.base + of * kRows, p, of, step, kRows, threadIdx.x, kThreads);
    if constexpr (!S.bf16)
      for (int i = threadIdx.x; i < kRows / 4; i += kThreads)
        copy_async_16(smem.row_scale + 4 * i, p.row_scale + blockIdx.x * kRows + 4 * i);
  }

  // After the wait: the token before this step, and its latent.
  __device__ void fetch_latents() {
    if (serves) {
      const int64_t* previous = step == 0 ? p.anchor + warp : p.tokens + warp * p.tokens_request_stride + step - 1;
      const int64_t token = static_cast<int64_t>(load_relaxed(reinterpret_cast<const uint64_t*>(previous)));
      latent(warp).fetch(0, latent_record<Latent>(p, static_cast<uint32_t>(max(int64_t{0}, min(token, int64_t{0x7FFFFFFF})))));
    }
    copy_async_wait();
    __syncthreads();
  }

  // This lane's best row. Every row of the CTA is some lane's, for every request.
  __device__ Candidate score() {
    const uint4* chunks = latent(column).chunks(0);
    Candidate best{kMinusInfinity, static_cast<uint32_t>(warp * 16 + upper * 8 + g)};
    int unit = 0;
    for (int tile = warp; tile < S.tiles; tile += S.warps) {
      Sum d[4] = {}, odd[4] = {};
#pragma unroll
      for (int part = 0; part < kUnitsPerTile; part++, unit++) {
        uint4 a[8];
        take(a, unit);
        multiply_unit(d, odd, a, chunks + part * 16);
        __syncwarp();  // every lane has read the unit
        fill();
      }
#pragma unroll
      for (int e = 0; e < 4; e++) d[e] += odd[e];
      best = Candidate::better(best, offer(tile * 16 + upper * 8 + g, d));
    }
    return best;
  }

  // The fragments of a unit, when it is there.
  __device__ void take(uint4 (&a)[8], int unit) const {
    const int stage = warp * S.stages + unit % S.stages;
    wait_barrier(&smem.full[stage], unit / S.stages & 1);
    const uint4* from = reinterpret_cast<const uint4*>(smem.stages + stage * kUnitBytes) + lane;
#pragma unroll
    for (int k = 0; k < 8; k++) a[k] = from[k * 32];
  }

  // Columns 2 t and 2 t + 1 are the planes hi and lo of this lane's request (bf16: both its sum), of row g and of row g + 8.
  __device__ static Sum dot(const Sum (&d)[4], int upper) {
    if constexpr (S.bf16) return upper ? d[2] : d[0];
    return upper ? d[2] * 256 + d[3] : d[0] * 256 + d[1];
  }

  // This lane's row of a tile, or the better of its two.
  __device__ Candidate offer(int row, const Sum (&d)[4]) const {
    const int second = kBoth ? row + 8 : row;
    const uint16_t* base = smem.base + request * kRows;
    const Sum first_sum = dot(d, upper), second_sum = kBoth ? dot(d, 1) : first_sum;
    float first_logit, second_logit;
    if constexpr (S.bf16) {
      first_logit = first_sum, second_logit = second_sum;
      score_twice(first_logit, second_logit, widen(base[row]), widen(base[second]));
    } else {
      const float latent_scale = latent(request).scale(0);
      first_logit = score_int8(widen(base[row]), smem.row_scale[row], latent_scale, first_sum);
      second_logit = score_int8(widen(base[second]), smem.row_scale[second], latent_scale, second_sum);
    }
    round_bf16(first_logit, second_logit);
    return Candidate::better(Candidate::of(first_logit, row), Candidate::of(second_logit, second));
  }

  // The CTA's best row of every request.
  __device__ void post(Candidate best) {
    const uint32_t warp_key = NarrowKey::over_warp<S.batch>(NarrowKey::of(best));
    if (lane < S.batch) smem.best[lane][warp] = warp_key;
    __syncthreads();
    if (!serves) return;
    const uint32_t key = NarrowKey::over<S.warps>(smem.best[warp][lane]), token = blockIdx.x * kRows + key_row(key);
    if (lane == 0) store_relaxed(p.mail + warp * kEntries + blockIdx.x, chain_entry(key, token));
    Latent::prefetch(latent_record<Latent>(p, token));  // one of these is the next latent: from HBM to L2 while `select` runs
  }
};

template <ChainShape S>
__device__ void walk_chain_score(const StepParams& p) {
  if constexpr (S.early) launch_dependents();
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  ChainScore<S> cta{p.walk, p.step, *reinterpret_cast<typename ChainScore<S>::Smem*>(dynamic_smem)};
  cta.prefetch();
  wait_for_prerequisites();
  cta.fetch_latents();
  cta.post(cta.score());
}

// One CTA, a warp a request.
template <int kCtas>
__device__ void walk_chain_select(const StepParams& p) {
  static_assert(kCtas <= kEntries);
  constexpr int kPairs = (kCtas + 63) / 64;  // 16-byte loads a lane
  launch_dependents();
  wait_for_prerequisites();
  const int request = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (request >= p.walk.batch) return;
  uint64_t entry[2 * kPairs], best = 0;
#pragma unroll
  for (int i = 0; i < kPairs; i++) load_relaxed_x2(p.walk.mail + request * kEntries + 2 * (lane + 32 * i), entry[2 * i], entry[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 2 * kPairs; i++) best = max(best, entry[i]);
  const uint32_t order = static_cast<uint32_t>(best >> 32), most = __reduce_max_sync(~0u, order);
  const uint32_t inverse = __reduce_max_sync(~0u, order == most ? static_cast<uint32_t>(best) : 0);
  if (lane == 0) p.walk.tokens[request * p.walk.tokens_request_stride + p.step] = 0xFFFFFFFFu - inverse;
}

}  // namespace wts
