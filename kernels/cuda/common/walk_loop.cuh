// The loop every persistent walk shares. An engine scores the rows of its CTA; the loop finds the token, feeds it back and goes on.
//
// An engine offers: kThreads, kRows (of a CTA), Latent, `latent`, `shared` (its LoopState), `load()`, `score(step)`.
// A step costs one exchange, which the first warp makes while the others wait.
#pragma once
#include "common/exchange.cuh"
#include "common/params.cuh"

namespace wts {

// What the warps of a CTA tell each other, in shared memory.
struct LoopState {
  uint32_t warp_key[32];
  int latent_slot;  // byte offset of the current latent
};

// The record of a token; ids past the vocabulary (padding rows) are clamped.
template <class Latent>
__device__ const uint8_t* latent_record(const Params& p, uint32_t token) {
  return p.latents + static_cast<uint64_t>(min(token, static_cast<uint32_t>(p.latent_vocab - 1))) * Latent::kRecordBytes;
}

// Stamp `index` of the clocks: SM cycles for resolution, nanoseconds because the SM clock under load need not be the one seen beside a
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
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool reports = blockIdx.x == 0 && threadIdx.x == 0;
  const Exchange exchange{p.mail, warp == 0 ? *p.round : 0, gridDim.x};
  if (warp == 0) exchange.begin();
  if (threadIdx.x == 0) engine.shared.latent_slot = 0;
  // The anchor's latent is two dependent loads: ahead of 39 MB of weights.
  if (warp == 0)
    engine.latent.fetch(0, latent_record<Latent>(p, static_cast<uint32_t>(max(int64_t{0}, min(*p.anchor, int64_t{0x7FFFFFFF})))));
  engine.load();
  stamp<kClocks>(p, 0);
  int slot = 0;
  for (int step = 0; step < p.steps; step++) {
    const uint32_t warp_key = __reduce_max_sync(~0u, engine.score(step).key());
    if (lane == 0) engine.shared.warp_key[warp] = warp_key;
    __syncthreads();  // all keys are there
    if (warp == 0) {
      const uint32_t key = __reduce_max_sync(~0u, lane < Engine::kThreads / 32 ? engine.shared.warp_key[lane] : 0);
      exchange.post(step, key);
      const auto record = [&](uint32_t cta, uint32_t row) { return latent_record<Latent>(p, cta * Engine::kRows + row); };
      // One of the CTAs' winners is the token: its W1 row starts on its way from HBM to L2 while they agree. (Every warp's winner: eight
      // times the rows for 0.1 us less head start, slower.)
      Latent::prefetch(record(blockIdx.x, key_row(key)));
      int fetched = 0;
      const Winner winner = exchange.wait(step, [&](Winner leader) {
        if (++fetched > Latent::kSlots - 1) copy_async_wait();  // a slot is free again only when its copy has landed
        engine.latent.fetch((slot + fetched) % Latent::kSlots * Latent::kSlotBytes, record(leader.cta, leader.row));
      });
      slot = (slot + fetched) % Latent::kSlots;
      if (lane == 0) engine.shared.latent_slot = slot * Latent::kSlotBytes;
      if (reports) p.tokens[step] = winner.cta * Engine::kRows + winner.row;
      stamp<kClocks>(p, step + 1);
      copy_async_wait();
    }
    __syncthreads();  // the next latent is there
  }
  if (reports) *p.round += 1;
}

// The body of a kernel: an engine over the CTA's dynamic shared memory, and the loop.
template <class Engine, bool kClocks, class Exchange>
__device__ void run_walk(const Params& p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Engine::Smem*>(dynamic_smem);
  Engine engine{p, smem, smem.shared, {smem.latent}};
  walk_loop<kClocks, Exchange>(engine, p);
}

}  // namespace wts
