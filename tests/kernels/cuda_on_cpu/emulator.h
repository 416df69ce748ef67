// CUDA threads as fibers of one host thread, so that a kernel can be run, not fast but whole, where there is no GPU.
//
// A fiber runs until it has to wait: for its warp, its CTA or a word of memory. Warps are never split: collectives want all 32 lanes.
// Memory is sequentially consistent here, so a missing fence is not seen; a missing barrier, a wrong index, a deadlock and wrong arithmetic
// are.
#pragma once
#include <cuda_bf16.h>
#include <ucontext.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

namespace emulator {

struct Index {
  int x, y, z;
};

struct Rendezvous {
  int arrived = 0;
  unsigned generation = 0;
};

struct Warp : Rendezvous {
  uint64_t slot[8][32], result[8][32];
};

struct Cta : Rendezvous {
  int threads;
  Rendezvous numbered[16];  // barriers of some of its warps
  std::vector<Warp> warps;
  std::vector<uint8_t> smem;
};

struct Fiber {
  ucontext_t context;
  Index thread, block;
  Cta* cta;
  const Rendezvous* place = nullptr;  // where it waits, until that has another generation
  unsigned generation = 0;
  bool done = false;
};

inline Fiber* current;
inline ucontext_t scheduler;
inline Index grid;
inline std::function<void()> body;
constexpr uint8_t kStale = 0x5A;  // what shared memory holds at first: no zeros
constexpr int kSmemAlignment = 128;
constexpr int kStackBytes = 1 << 16;
constexpr long kMostTurns = 2'000'000;  // of the scheduler: then nobody gets on any more

inline void yield() { swapcontext(&current->context, &scheduler); }
inline int lane() { return current->thread.x % 32; }
inline Warp& warp() { return current->cta->warps[current->thread.x / 32]; }

inline void meet(Rendezvous& place, int everybody, const std::function<void()>& last) {
  const unsigned generation = place.generation;
  if (++place.arrived == everybody) {
    place.arrived = 0;
    last();
    place.generation++;
    return;
  }
  current->place = &place, current->generation = generation;
  yield();
  current->place = nullptr;
}

inline uint8_t* shared() {
  const auto start = reinterpret_cast<uintptr_t>(current->cta->smem.data());
  return reinterpret_cast<uint8_t*>((start + kSmemAlignment - 1) / kSmemAlignment * kSmemAlignment);
}

// All lanes give `count` words and see everybody's, in warp().result.
inline void exchange(const uint64_t* words, int count) {
  Warp& own = warp();
  for (int i = 0; i < count; i++) own.slot[i][lane()] = words[i];
  meet(own, 32, [&] { std::memcpy(own.result, own.slot, sizeof(own.slot)); });
}

inline void start() {
  body();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

// Runs `kernel` once for every thread of `ctas` CTAs, all of them resident. False where they wait for one another for ever.
inline bool run(int ctas, int threads, int smem_bytes, const std::function<void()>& kernel) {
  body = kernel, grid = {ctas, 1, 1};
  std::vector<Cta> places(ctas);
  std::vector<Fiber> fibers(static_cast<size_t>(ctas) * threads);
  static std::vector<char> stacks;  // fresh pages for every launch took a third of the time
  stacks.resize(std::max(stacks.size(), fibers.size() * kStackBytes));
  for (auto& cta : places) {
    cta.threads = threads;
    cta.warps.resize(threads / 32);
    cta.smem.assign(smem_bytes + kSmemAlignment, kStale);
  }
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& fiber = fibers[i];
    fiber.thread = {static_cast<int>(i % threads), 0, 0}, fiber.block = {static_cast<int>(i / threads), 0, 0};
    fiber.cta = &places[i / threads];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + i * kStackBytes, fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, start, 0);
  }
  size_t alive = fibers.size();
  for (long turn = 0; alive > 0; turn++) {
    if (turn == kMostTurns) return false;
    alive = 0;
    for (auto& fiber : fibers) {
      if (fiber.done) continue;
      alive++;
      if (fiber.place && fiber.place->generation == fiber.generation) continue;
      current = &fiber;
      swapcontext(&scheduler, &fiber.context);
      alive -= fiber.done;
    }
  }
  return true;
}

template <class Params>
bool launch(void (*kernel)(Params), const void* params, int ctas, int threads, int smem_bytes) {
  return run(ctas, threads, smem_bytes, [&] { kernel(*static_cast<const Params*>(params)); });
}

inline float rounded_up(const std::function<float()>& operation) {
  std::fesetround(FE_UPWARD);
  const float result = operation();
  std::fesetround(FE_TONEAREST);
  return result;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define gridDim (emulator::grid)
#undef __shared__
#define __shared__
#undef __noinline__
#define __noinline__
#undef __global__
#define __global__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}

inline void __syncthreads() {
  emulator::meet(*emulator::current->cta, emulator::current->cta->threads, [] {});
}
inline void __syncwarp() { emulator::exchange(nullptr, 0); }

template <class T>
T shuffled(T value, int source) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  emulator::exchange(&word, 1);
  std::memcpy(&value, &emulator::warp().result[0][source & 31], sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(uint32_t, T value, int source) {
  return shuffled(value, source);
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int distance) {
  return shuffled(value, emulator::lane() ^ distance);
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int distance) {
  const int lane = emulator::lane();
  return shuffled(value, lane >= distance ? lane - distance : lane);
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const uint64_t word = vote;
  emulator::exchange(&word, 1);
  uint32_t votes = 0;
  for (int i = 0; i < 32; i++) votes |= static_cast<uint32_t>(emulator::warp().result[0][i]) << i;
  return votes;
}
inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) == ~0u; }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const uint64_t word = value;
  emulator::exchange(&word, 1);
  return static_cast<uint32_t>(*std::max_element(emulator::warp().result[0], emulator::warp().result[0] + 32));
}
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value) { return ~__reduce_max_sync(mask, ~value); }
template <class T>
T __reduce_add_sync(uint32_t, T value) {
  const uint64_t word = static_cast<uint32_t>(value);
  emulator::exchange(&word, 1);
  uint32_t sum = 0;
  for (int i = 0; i < 32; i++) sum += static_cast<uint32_t>(emulator::warp().result[0][i]);
  return static_cast<T>(sum);
}

inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __ffsll(int64_t x) { return __builtin_ffsll(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}
inline void __stcg(uint64_t* p, uint64_t value) { *p = value; }
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(uint32_t x) { return static_cast<float>(x); }
inline float __fadd_ru(float a, float b) {
  volatile float x = a, y = b;
  return emulator::rounded_up([&] { return x + y; });
}
inline float __fmul_ru(float a, float b) {
  volatile float x = a, y = b;
  return emulator::rounded_up([&] { return x * y; });
}
inline float __fmaf_ru(float a, float b, float c) {
  volatile float x = a, y = b, z = c;
  return emulator::rounded_up([&] { return std::fma(x, y, z); });
}
template <class Halves>
uint32_t by_halves(uint32_t a, uint32_t b, Halves&& of) {
  return of(a & 0xFFFFu, b & 0xFFFFu) | of(a >> 16, b >> 16) << 16;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return by_halves(a, b, [](uint32_t x, uint32_t y) { return std::max(x, y); });
}
inline uint32_t __vcmpgeu2(uint32_t a, uint32_t b) {
  return by_halves(a, b, [](uint32_t x, uint32_t y) { return x >= y ? 0xFFFFu : 0u; });
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= static_cast<uint32_t>(both >> (8 * (select >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return result;
}
template <class T>
T atomicMax(T* p, T value) {
  const T old = *p;
  *p = std::max(old, value);
  return old;
}
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = old + value;
  return old;
}
inline uint32_t atomicCAS(uint32_t* p, uint32_t expected, uint32_t value) {
  const uint32_t old = *p;
  if (old == expected) *p = value;
  return old;
}
inline int64_t clock64() { return 0; }
[[noreturn]] inline void __trap() { std::abort(); }
