// Stands in for kernels/cuda/common/ptx.cuh where a kernel runs on the CPU: what each instruction does, without the instruction.
#pragma once
#include <cuda/std/cstdint>

#include "emulator.h"

namespace cuda::ptx {
bool mbarrier_try_wait_parity(uint64_t*, int);  // named by common/spin.cuh; kernels that call it cannot run here
}

namespace wts {
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

inline int fresh_thread() { return threadIdx.x; }

inline float bf16_half(uint32_t word, int upper) { return __uint_as_float(upper ? word & 0xFFFF0000u : word << 16); }

// Lane (g, t) gives rows g, g + 8 of A and column g of B, at k = 2 t, 2 t + 1 and 8 more; it gets rows g, g + 8 at columns 2 t, 2 t + 1.
inline void mma_bf16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  const uint64_t words[6] = {a.x, a.y, a.z, a.w, b0, b1};
  emulator::exchange(words, 6);
  const auto& all = emulator::warp().result;
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int row = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const uint32_t of_a = static_cast<uint32_t>(all[row + 2 * (k / 8)][g * 4 + k % 8 / 2]);
      const uint32_t of_b = static_cast<uint32_t>(all[4 + k / 8][column * 4 + k % 8 / 2]);
      d[i] = std::fma(bf16_half(of_a, k % 2), bf16_half(of_b, k % 2), d[i]);
    }
  }
}

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}
inline void prefetch_l2(const void*) {}
inline void copy_async_16(void* shared, const void* global) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16) std::abort();  // as the hardware would
  std::memcpy(shared, global, 16);
}
inline void copy_async_4(void* shared, const void* global) { std::memcpy(shared, global, 4); }
inline void copy_async_wait() {}
inline uint4 load_once(const uint4* global) { return *global; }

inline uint64_t load_acquire(const uint64_t* global) {
  emulator::yield();  // whoever polls lets others get on
  return *global;
}
inline uint64_t load_relaxed(const uint64_t* global) { return *global; }
inline void store_relaxed(uint64_t* global, uint64_t value) { *global = value; }
inline void store_release(uint64_t* global, uint64_t value) { *global = value; }
inline void red_max_relaxed(uint64_t* global, uint64_t value) { *global = std::max(*global, value); }
inline void red_add_relaxed(uint64_t* global, uint64_t value) { *global += value; }
inline void red_add_release(uint64_t* global, uint64_t value) { *global += value; }

}  // namespace wts
