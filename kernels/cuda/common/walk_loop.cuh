// The loop of the walks that use mma.sync. An engine scores the rows of its CTA; the loop finds the tokens, feeds them back and goes on.
//
// An engine offers: kThreads, kRows (of a CTA), kBatch (requests: 1, 2, 4, 8 or 16), Key, Latent, `latent(request)`, `shared` (its
// LoopState), `load(round)`, `score(step, best)` and `meanwhile(step, thread, threads)`. Lane (g, t) of a warp finds the best rows of
// requests t % kBatch, t + 4, t + 8 and t + 12, as far as there are. A step costs one exchange: warp r makes it for requests r and r + 8,
// while the others, or all after they have posted, do what does not depend on the token.
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

template <bool kClocks, class Exchange, class Engine>
__device__ void walk_loop(Engine& engine, const Params& p) {
  using Latent = typename Engine::Latent;
  using Key = typename Engine::Key;
  constexpr int kBatch = Engine::kBatch, kWarps = Engine::kThreads / 32;
  constexpr int kQuad = kBatch < 4 ? kBatch : 4, kBlocks = kBatch / kQuad;  // requests that a quad of lanes and that a lane serves
  constexpr int kTurns = (kBatch + kWarps - 1) / kWarps;                    // requests that a warp exchanges for
  constexpr int kExchanging = 32 * (kBatch < kWarps ? kBatch : kWarps);     // threads
  constexpr bool kSomeIdle = kExchanging < Engine::kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto request = [&](int turn) { return kBatch == 1 ? 0 : warp + turn * kWarps; };
  const auto exchanges = [&](int turn) { return kBatch == 1 ? warp == 0 : request(turn) < min(kBatch, p.batch); };
  const bool reports = blockIdx.x == 0 && lane == 0;
  const uint32_t round = *p.round;
  const Exchange exchange{p.mail, round, gridDim.x};
  if (warp == 0) exchange.begin();
  if (threadIdx.x < kBatch) engine.shared.latent_slot[threadIdx.x] = 0;
  // The anchor's latent is two dependent loads: ahead of 39 MB of weights.
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++)
    if (exchanges(turn))
      engine.latent(request(turn))
          .fetch(0, latent_record<Latent>(p, static_cast<uint32_t>(max(int64_t{0}, min(p.anchor[request(turn)], int64_t{0x7FFFFFFF})))));
  engine.load(round);
  stamp<kClocks>(p, 0);
  const auto record = [&](uint32_t cta, uint32_t row) { return latent_record<Latent>(p, cta * Engine::kRows + row); };
  int slot[kTurns] = {};
  for (int step = 0; step < p.steps; step++) {
    Candidate best[kBlocks];
    engine.score(step, best);
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      const auto warp_key = Key::template over_warp<kQuad>(Key::of(best[block]));
      if (lane < kQuad) engine.shared.best[block * kQuad + lane][warp] = warp_key;
    }
    __syncthreads();  // all keys are there
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      if (!exchanges(turn)) continue;
      const auto key = Key::template over<kWarps>(engine.shared.best[request(turn)][lane]);
      exchange.post(step, key, request(turn));
      // One of the CTAs' winners is the token: its W1 row starts on its way from HBM to L2 while they agree. (Every warp's winner: eight
      // times the rows for 0.1 us less head start, slower.)
      Latent::prefetch(record(blockIdx.x, key_row(static_cast<uint32_t>(key))));
    }
    if constexpr (!kSomeIdle) engine.meanwhile(step, threadIdx.x, Engine::kThreads);
    if (kSomeIdle && threadIdx.x >= kExchanging) engine.meanwhile(step, threadIdx.x - kExchanging, Engine::kThreads - kExchanging);
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      if (!exchanges(turn)) continue;
      int fetched = 0;
      const Winner winner = exchange.wait(
          step,
          [&](Winner leader) {
            if (++fetched > Latent::kSlots - 1) copy_async_wait();  // a slot is free again only when its copy has landed
            engine.latent(request(turn))
                .fetch((slot[turn] + fetched) % Latent::kSlots * Latent::kSlotBytes, record(leader.cta, leader.row));
          },
          request(turn));
      slot[turn] = (slot[turn] + fetched) % Latent::kSlots;
      if (lane == 0) engine.shared.latent_slot[request(turn)] = slot[turn] * Latent::kSlotBytes;
      if (reports) p.tokens[request(turn) * p.tokens_request_stride + step] = winner.cta * Engine::kRows + winner.row;
      if (turn + 1 == kTurns) stamp<kClocks>(p, step + 1);
    }
    if (!kSomeIdle || threadIdx.x < kExchanging) copy_async_wait();
    __syncthreads();  // the next latents are there
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.round = round + 1;
}

// The body of a kernel: an engine over the CTA's dynamic shared memory, and the loop.
template <class Engine, bool kClocks, class Exchange>
__device__ void run_walk(const Params& p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Engine::Smem*>(dynamic_smem);
  Engine engine{p, smem, smem.shared};
  walk_loop<kClocks, Exchange>(engine, p);
}

}  // namespace wts
