// One greedy request, four positions a pass. The eight columns of an int8 MMA are four latents in two planes and a walk of one request uses
// one, so the others score the next three positions as well, each after a guess of the token before it: at first the position's largest
// base logit, later what the last pass found. A pass settles the first position that was open, and each after it whose guess came true.
// Tokens are those of the serial walk, whatever the guesses: a position counts only when its token before it is known.
//
// The engine is that of four requests (walk_resident.cuh); column c has the positions p with p % 4 = c, and all their base logits are in
// shared memory. A pass costs one exchange, in which a warp finds the winner of each column.
#pragma once
#include "walk_resident.cuh"

namespace wts {

template <ResidentShape S, class Exchange>
struct Window {
  using Engine = Resident<S>;
  using Latent = typename Engine::Latent;
  using Key = typename Engine::Key;
  static constexpr int kColumns = 4, kWarps = Engine::kWarps, kMost = 16;  // columns; warps; positions
  static_assert(S.window && S.batch == kColumns && !S.sampling && S.tiles_streamed == 0 && kWarps >= kColumns);

  Engine& engine;
  const Params& p;
  const Exchange exchange;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // What the CTA knows stands behind the warps' words of `shared.best`, since registers are full of weights. Of a column: its winner's
  // token, where its next latent lies, the token before its position (known or guessed), where the current latent lies. Then guesses of all
  // positions.
  __device__ uint32_t& winner(int column) const { return engine.shared.best[column][kWarps]; }
  __device__ uint32_t& next_slot(int column) const { return engine.shared.best[column][kWarps + 1]; }
  __device__ uint32_t& before(int column) const { return engine.shared.best[column][kWarps + 2]; }
  __device__ uint32_t& slot(int column) const { return engine.shared.best[column][kWarps + 3]; }
  __device__ uint32_t& guess(int position) const { return engine.shared.best[position / 8][kWarps + 4 + position % 8]; }

  __device__ int position(int column, int front) const { return front + (column - front % kColumns + kColumns) % kColumns; }
  __device__ uint32_t token(Winner of) const { return of.cta * Engine::kRows + of.row; }

  // One warp per position: the largest base logits of all positions, by one exchange.
  __device__ void guess_all() const {
    for (int at = warp; at < p.steps; at += kWarps) {
      const uint16_t* base = engine.smem.base + at * Engine::kRows;  // slots hold positions in order
      Candidate best{kMinusInfinity, kLastRow};
      for (int row = lane; row < Engine::kRows; row += 32) best = Candidate::better(best, Candidate::of(widen(base[row]), row));
      exchange.post(at / kColumns, Key::template over_warp<1>(Key::of(best)), at % kColumns);
    }
    for (int at = warp; at < p.steps; at += kWarps) {
      const Winner won = exchange.wait(at / kColumns, [](Winner) {}, at % kColumns);
      if (lane == 0) guess(at) = token(won);
      Latent::prefetch(latent_record<Latent>(p, token(won)));
    }
  }

  // One warp: the latent of `token` into a slot of its column.
  __device__ void fetch(int column, int slot, uint32_t token) const {
    engine.latent(column).fetch(slot * Latent::kSlotBytes, latent_record<Latent>(p, token));
  }

  __device__ void walk() const {
    guess_all();
    __syncthreads();
    if (warp < kColumns) {
      const auto anchor = static_cast<uint32_t>(max(int64_t{0}, min(p.anchor[0], int64_t{0x7FFFFFFF})));
      const uint32_t first = warp == 0 ? anchor : guess(min(warp, p.steps) - 1);
      if (lane == 0) before(warp) = first, slot(warp) = 0;
      fetch(warp, 0, first);
      copy_async_wait();
    }
    int pass = (p.steps + kColumns - 1) / kColumns;  // exchanges before it were for guesses
    const int guesses = pass;
    for (int front = 0; front < p.steps; pass++) {
      __syncthreads();
      if (threadIdx.x < kColumns) {
        const int at = min(position(threadIdx.x, front), p.steps - 1);
        engine.shared.latent_slot[threadIdx.x] = static_cast<int>(slot(threadIdx.x)) * Latent::kSlotBytes | at / kColumns << 16;
      }
      __syncthreads();
      score(pass, front);
      __syncthreads();
      const int settled = settle(front), start = front;
      if (blockIdx.x == 0 && threadIdx.x < settled) p.tokens[start + threadIdx.x] = winner((start + threadIdx.x) % kColumns);
      front += settled;
      __syncthreads();
      if (warp < kColumns) prepare(warp, start, front);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.clocks) p.clocks[0] += pass - guesses;
  }

  // One warp: its column's next position. After one that was in the window it follows what was found there, and its latent has come; else a
  // guess.
  __device__ void prepare(int column, int start, int front) const {
    const int at = position(column, front), now = next_slot(column);
    const bool guessed = at > start + kColumns && at < p.steps;
    const uint32_t token = guessed ? guess(at - 1) : winner((column + kColumns - 1) % kColumns);
    if (guessed) fetch(column, now, token);
    if (lane == 0) before(column) = token, slot(column) = now;
    copy_async_wait();
  }

  // A pass: the winner of every column, and its latent for the next one.
  __device__ void score(int pass, int front) const {
    Candidate best[1];
    engine.score(pass, best);
    const auto key = Key::template over_warp<kColumns>(Key::of(best[0]));
    if (lane < kColumns) engine.shared.best[lane][warp] = key;
    __syncthreads();
    if (warp >= kColumns) return;
    const int next = (warp + 1) % kColumns, now = slot(next);
    int fetched = 0;
    if (position(warp, front) < p.steps) {
      exchange.post(pass, Key::template over<kWarps>(engine.shared.best[warp][lane]), warp);
      const Winner won = exchange.wait(
          pass,
          [&](Winner leader) {
            if (++fetched > Latent::kSlots - 1) copy_async_wait();  // a slot is free again only when its copy has landed
            fetch(next, (now + fetched) % Latent::kSlots, token(leader));
          },
          warp);
      if (lane == 0) winner(warp) = token(won);
    }
    copy_async_wait();
    if (lane == 0) next_slot(next) = (now + fetched) % Latent::kSlots;
  }

  // How many positions from `front` on are known now: the first, and each after it whose guess is the token before it.
  __device__ int settle(int front) const {
    int settled = 1;
    while (settled < kColumns && front + settled < p.steps &&
           before((front + settled) % kColumns) == winner((front + settled - 1) % kColumns))
      settled++;
    return settled;
  }
};

template <ResidentShape S, template <int, int> class Exchange>
__device__ void walk_window(const Params& p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  using Engine = Resident<S>;
  auto& smem = *reinterpret_cast<typename Engine::Smem*>(dynamic_smem);
  Engine engine{p, smem, smem.shared};
  const uint32_t round = *p.round;
  using Pairs = Exchange<S.max_ctas, S.batch>;
  const Window<S, Pairs> window{engine, p, Pairs{p.mail, round, gridDim.x}};
  if (threadIdx.x < 32) window.exchange.begin();
  engine.load(round);
  window.walk();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.round = round + 1;
}

}  // namespace wts
