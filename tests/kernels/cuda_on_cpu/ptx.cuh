// Stands in for kernels/cuda/common/ptx.cuh where a kernel runs on the CPU: what each instruction does, without the instruction.
#pragma once
#include <cuda/std/cstdint>

#include "emulator.h"

namespace emulator {

// A barrier of shared memory: a phase ends when all arrivals have come and all bytes that were expected.
struct Barrier {
  int32_t bytes;
  uint16_t missing;
  uint8_t arrivals, phase;

  static Barrier& at(uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }
  void arrive(int32_t expected) { bytes += expected, missing--, settle(); }
  void land(int32_t landed) { bytes -= landed, settle(); }
  void settle() {
    if (missing == 0 && bytes == 0) phase ^= 1, missing = arrivals;
  }
};
static_assert(sizeof(Barrier) == 8);

}  // namespace emulator

namespace cuda::ptx {

inline void mbarrier_init(uint64_t* barrier, int count) {
  emulator::Barrier::at(barrier) = {0, static_cast<uint16_t>(count), static_cast<uint8_t>(count), 0};
}
template <class... Tags>
void fence_mbarrier_init(Tags...) {}
template <class Sem, class Scope, class Space>
void mbarrier_arrive_expect_tx(Sem, Scope, Space, uint64_t* barrier, uint32_t bytes) {
  emulator::Barrier::at(barrier).arrive(static_cast<int32_t>(bytes));
}
inline void mbarrier_arrive(uint64_t* barrier) { emulator::Barrier::at(barrier).arrive(0); }
inline bool mbarrier_try_wait_parity(uint64_t* barrier, int parity) {
  if (emulator::Barrier::at(barrier).phase != parity) return true;
  emulator::yield();
  return emulator::Barrier::at(barrier).phase != parity;
}
template <class To, class From>
void cp_async_bulk(To, From, void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  ::std::memcpy(shared, global, bytes);
  emulator::Barrier::at(barrier).land(static_cast<int32_t>(bytes));
}

}  // namespace cuda::ptx

namespace wts {
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

inline int fresh_thread() { return threadIdx.x; }

inline float bf16_half(uint32_t word, int upper) { return __uint_as_float(upper ? word & 0xFFFF0000u : word << 16); }

// Lane (g, t) gives rows g, g + 8 of A and column g of B: word t of k's lower half, then of the upper one; it gets rows g, g + 8 at columns
// 2 t, 2 t + 1. add(sum, word of A, word of B, element) adds one product.
template <int kOfWord, class Sum, class Add>
void mma(Sum (&d)[4], const uint4& a, uint32_t b0, uint32_t b1, Add&& add) {
  constexpr int kHalf = 4 * kOfWord;
  const uint64_t words[6] = {a.x, a.y, a.z, a.w, b0, b1};
  emulator::exchange(words, 6);
  const auto& all = emulator::warp().result;
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int row = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 2 * kHalf; k++) {
      const int word = k % kHalf / kOfWord;
      const auto of_a = static_cast<uint32_t>(all[row + 2 * (k / kHalf)][g * 4 + word]);
      const auto of_b = static_cast<uint32_t>(all[4 + k / kHalf][column * 4 + word]);
      d[i] = add(d[i], of_a, of_b, k % kOfWord);
    }
  }
}

inline void mma_bf16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  mma<2>(d, a, b0, b1,
         [](float sum, uint32_t x, uint32_t y, int upper) { return std::fma(bf16_half(x, upper), bf16_half(y, upper), sum); });
}

inline void mma_s8(int32_t (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  mma<4>(d, a, b0, b1, [](int32_t sum, uint32_t x, uint32_t y, int byte) {
    return sum + static_cast<int8_t>(x >> (8 * byte)) * static_cast<int8_t>(y >> (8 * byte));
  });
}

inline float log2_approx(float x) { return std::log2(x); }
inline void prefetch_l2(const void*) {}
inline void barrier_sync(int number, int threads) { emulator::meet(emulator::current->cta->numbered[number], threads, [] {}); }
inline void copy_async_16(void* shared, const void* global) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16) std::abort();  // as the hardware would
  std::memcpy(shared, global, 16);
}
inline void copy_async_4(void* shared, const void* global) { std::memcpy(shared, global, 4); }
inline void copy_async_wait() {}
inline void copy_async_commit() {}
template <int kNewest>
inline void copy_async_wait_older() {}
inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint64_t) {
  cuda::ptx::cp_async_bulk(0, 0, shared, global, bytes, barrier);
}
inline uint4 load_once(const uint4* global) { return *global; }
inline uint64_t l2_policy(float) { return 0; }
inline uint64_t globaltimer_ns() { return 0; }

inline uint64_t load_acquire(const uint64_t* global) {
  emulator::yield();  // whoever polls lets others get on
  return *global;
}
// All lanes load at one moment, as the instruction does: `KeyCountPair` polls one word with a whole warp and has it act as one. (So a warp
// of which only some lanes load, as with `Mailboxes`, cannot run here.)
inline void load_relaxed_x2(const uint64_t* global, uint64_t& a, uint64_t& b) {
  emulator::yield();  // whoever polls lets others get on
  emulator::Warp& own = emulator::warp();
  const int lane = emulator::lane();
  own.slot[0][lane] = reinterpret_cast<uint64_t>(global);
  emulator::meet(own, 32, [&] {
    for (int i = 0; i < 32; i++) std::memcpy(&own.result[0][i], reinterpret_cast<const void*>(own.slot[0][i]), 8);
    for (int i = 0; i < 32; i++) std::memcpy(&own.result[1][i], reinterpret_cast<const uint64_t*>(own.slot[0][i]) + 1, 8);
  });
  a = own.result[0][lane], b = own.result[1][lane];
}
inline uint64_t load_relaxed(const uint64_t* global) {
  emulator::yield();  // as above
  return *global;
}
inline void store_relaxed(uint64_t* global, uint64_t value) { *global = value; }
inline void store_release(uint64_t* global, uint64_t value) { *global = value; }
inline void red_max_relaxed(uint64_t* global, uint64_t value) { *global = std::max(*global, value); }
inline void red_add_relaxed(uint64_t* global, uint64_t value) { *global += value; }
inline void red_add_release(uint64_t* global, uint64_t value) { *global += value; }

}  // namespace wts
