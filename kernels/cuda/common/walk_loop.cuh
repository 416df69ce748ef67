// The loop of the walks that use mma.sync. An engine scores the rows of its CTA; the loop finds the tokens, feeds them back and goes on.
//
// An engine offers: kThreads, kRows (of a CTA), kBatch (requests: 1, 2, 4 or 8), Key, Latent, `latent(request)`, `shared` (its
// LoopState), `load(round)`, `score(step, best)` and `meanwhile(step, thread, threads)`; `rewind()` where it is to score twice. Lane (g, t)
// of a warp finds the best rows of request t % kBatch, and of t + 4 if there are eight. A step costs one exchange: warp r makes it for
// request r, while the others, or all after they have posted, do what does not depend on the token.
#pragma once
#include "common/exchange.cuh"
#include "common/params.cuh"

namespace wts {

// What the warps of a CTA tell each other, in shared memory.
template <int kBatch, class Key>
struct LoopState {
  typename Key::Bits best[kBatch][32];  // of every warp
  int latent_slot[kBatch];              // byte offset of the current latent
};

// A part of a step. A walk can be built to do one part twice with the same outcome; what its steps then take longer is what the part costs.
//   kScore     the barrier at which the latent is there, and every lane's best row
//   kReduce    the best key of a warp, the barrier at which all warps' are there, the best key of the CTA
//   kExchange  post and wait for the winner
//   kLatent    the winner's latent from L2 into shared memory
// A second pass starts when the first is over. In a plain step the parts overlap (latents are fetched while other CTAs still post), so one
// by one they may cost more than together.
enum class Stage { kNone, kScore, kReduce, kExchange, kLatent };

// The record of a token; ids past the vocabulary (padding rows) are clamped.
template <class Latent>
__device__ const uint8_t* latent_record(const Params& p, uint32_t token) {
  return p.latents + static_cast<uint64_t>(min(token, static_cast<uint32_t>(p.latent_vocab - 1))) * Latent::kRecordBytes;
}

// Stamp `index` of the clocks: SM cycles for resolution, nanoseconds because the SM clock inside a walk is not the one seen beside a
// sample.
template <bool kClocks>
__device__ void stamp(const Params& p, int index) {
  if constexpr (kClocks) {
    if (blockIdx.x > 0 || threadIdx.x > 0) return;
    p.clocks[2 * index] = clock64();
    p.clocks[2 * index + 1] = static_cast<int64_t>(globaltimer_ns());
  }
}

// A loop and not two copies, so that the second pass fetches no instructions that a plain step does not. The better of both, so that
// neither can be left out.
template <class Engine>
__device__ __forceinline__ void score_twice(Engine& engine, int step, Candidate& best) {
  best = {kMinusInfinity, kLastRow};
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
    if (pass > 0) {
      __syncthreads();
      engine.rewind();
    }
    Candidate found[1];
    engine.score(step, found);
    best = Candidate::better(found[0], best);
  }
}

// A pass of kReduce in words of its own. All warps start the next one from its result, so that it must come after this one, to the same
// end.
template <class Engine>
__device__ __forceinline__ auto reduce_first(Engine& engine, typename Engine::Key::Bits key) {
  using Key = typename Engine::Key;
  constexpr int kWarps = Engine::kThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  key = Key::template over_warp<1>(key);
  if (lane == 0) engine.shared.best[0][kWarps + warp] = key;
  __syncthreads();
  return Key::template over<kWarps>(engine.shared.best[0][(kWarps + lane) % 32]);
}

template <bool kClocks, class Exchange, Stage kTwice, class Engine>
__device__ void walk_loop(Engine& engine, const Params& p) {
  using Latent = typename Engine::Latent;
  using Key = typename Engine::Key;
  constexpr int kBatch = Engine::kBatch, kWarps = Engine::kThreads / 32;
  static_assert(kTwice == Stage::kNone || kBatch == 1);
  constexpr int kQuad = kBatch < 4 ? kBatch : 4, kBlocks = kBatch / kQuad;  // requests that a quad of lanes and that a lane serves
  constexpr int kExchanging = 32 * kBatch;                                  // threads
  static_assert(kBatch <= kWarps);
  constexpr bool kSomeIdle = kExchanging < Engine::kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int request = kBatch == 1 ? 0 : warp;
  const bool exchanges = kBatch == 1 ? warp == 0 : warp < min(kBatch, p.batch);
  const bool reports = blockIdx.x == 0 && lane == 0;
  const uint32_t round = *p.round;
  const Exchange exchange{p.mail, round, gridDim.x};
  if (warp == 0) exchange.begin();
  if (threadIdx.x < kBatch) engine.shared.latent_slot[threadIdx.x] = 0;
  // The anchor's latent is two dependent loads: ahead of 39 MB of weights.
  if (exchanges)
    engine.latent(request).fetch(
        0, latent_record<Latent>(p, static_cast<uint32_t>(max(int64_t{0}, min(p.anchor[request], int64_t{0x7FFFFFFF})))));
  engine.load(round);
  stamp<kClocks>(p, 0);
  const auto record = [&](uint32_t cta, uint32_t row) { return latent_record<Latent>(p, cta * Engine::kRows + row); };
  const auto report = [&](int step, Winner winner) {
    if (reports) p.tokens[request * p.tokens_request_stride + step] = winner.cta * Engine::kRows + winner.row;
  };
  int slot = 0;
  for (int step = 0; step < p.steps; step++) {
    Candidate best[kBlocks];
    if constexpr (kTwice == Stage::kScore)
      score_twice(engine, step, best[0]);
    else
      engine.score(step, best);
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      auto key = Key::of(best[block]);
      if constexpr (kTwice == Stage::kReduce) key = reduce_first(engine, key);
      const auto warp_key = Key::template over_warp<kQuad>(key);
      if (lane < kQuad) engine.shared.best[block * kQuad + lane][warp] = warp_key;
    }
    __syncthreads();  // all keys are there
    if (exchanges) {
      const auto key = Key::template over<kWarps>(engine.shared.best[request][lane]);
      if constexpr (kTwice == Stage::kExchange) {  // in pairs of its own; its winner is the token, so that it is needed
        exchange.post(step, key, kBatch);
        report(step, exchange.wait(step, [](Winner) {}, kBatch));
      }
      exchange.post(step, key, request);
      // One of the CTAs' winners is the token: its W1 row starts on its way from HBM to L2 while they agree. (Every warp's winner: eight
      // times the rows for 0.1 us less head start, slower.)
      Latent::prefetch(record(blockIdx.x, key_row(static_cast<uint32_t>(key))));
    }
    if constexpr (!kSomeIdle) engine.meanwhile(step, threadIdx.x, Engine::kThreads);
    if (kSomeIdle && threadIdx.x >= kExchanging) engine.meanwhile(step, threadIdx.x - kExchanging, Engine::kThreads - kExchanging);
    if (exchanges) {
      int fetched = 0;
      const Winner winner = exchange.wait(
          step,
          [&](Winner leader) {
            if (++fetched > Latent::kSlots - 1) copy_async_wait();  // a slot is free again only when its copy has landed
            engine.latent(request).fetch((slot + fetched) % Latent::kSlots * Latent::kSlotBytes, record(leader.cta, leader.row));
          },
          request);
      slot = (slot + fetched) % Latent::kSlots;
      if constexpr (kTwice == Stage::kLatent) {  // over the same bytes
        copy_async_wait();
        engine.latent(request).fetch(slot * Latent::kSlotBytes, record(winner.cta, winner.row));
      }
      if (lane == 0) engine.shared.latent_slot[request] = slot * Latent::kSlotBytes;
      if constexpr (kTwice != Stage::kExchange) report(step, winner);
      stamp<kClocks>(p, step + 1);
    }
    if (!kSomeIdle || threadIdx.x < kExchanging) copy_async_wait();
    __syncthreads();  // the next latents are there
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.round = round + 1;
}

// The body of a kernel: an engine over the CTA's dynamic shared memory, and the loop.
template <class Engine, bool kClocks, class Exchange, Stage kTwice = Stage::kNone>
__device__ void run_walk(const Params& p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Engine::Smem*>(dynamic_smem);
  Engine engine{p, smem, smem.shared};
  walk_loop<kClocks, Exchange, kTwice>(engine, p);
}

}  // namespace wts
