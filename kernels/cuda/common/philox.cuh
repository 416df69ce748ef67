// Philox4x32-10: 128 random bits for every (counter, key), without state. kernels/philox.py gives the same words.
// Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the constants of the Random123 library.
#pragma once
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>

namespace wts {
using cuda::std::int64_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;

struct Words {
  uint32_t w[4];
};

struct PhiloxKey {
  uint32_t lo, hi;
};

// The seed of a request, in two's complement.
__host__ __device__ constexpr PhiloxKey philox_key(int64_t seed) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

// One instruction a product: left to itself the compiler adds a zero to every upper half.
__host__ __device__ constexpr uint64_t product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  if (!cuda::std::is_constant_evaluated()) {
    uint64_t wide;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(wide) : "r"(a), "r"(b));
    return wide;
  }
#endif
  return static_cast<uint64_t>(a) * b;
}

__host__ __device__ constexpr Words philox(Words counter, PhiloxKey key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57, kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  Words c = counter;
#pragma unroll
  for (int round = 0; round < kRounds; round++) {
    const uint64_t product0 = product(kMultiplier0, c.w[0]);
    const uint64_t product1 = product(kMultiplier1, c.w[2]);
    c = {{static_cast<uint32_t>(product1 >> 32) ^ c.w[1] ^ (key.lo + round * kWeyl0), static_cast<uint32_t>(product1),
          static_cast<uint32_t>(product0 >> 32) ^ c.w[3] ^ (key.hi + round * kWeyl1), static_cast<uint32_t>(product0)}};
  }
  return c;
}

}  // namespace wts
