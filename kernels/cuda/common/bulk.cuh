// Copies by the bulk engine (TMA) into shared memory, all counted by one barrier. One thread issues them, no register waits for them.
#pragma once
#include <cuda/ptx>

#include "common/ptx.cuh"

namespace wts {

struct BulkCopies {
  uint64_t* barrier;  // in shared memory

  // The issuing thread, before its copies: how many bytes they move in all.
  __device__ void open(uint32_t bytes) const {
    cuda::ptx::mbarrier_init(barrier, 1);
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
    cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, barrier, bytes);
  }

  // Addresses and size are multiples of 16 bytes.
  __device__ void copy(void* shared, const void* global, uint32_t bytes) const {
    cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, shared, global, bytes, barrier);
  }

  // Any thread that has seen `open` through a barrier of the CTA.
  __device__ void wait() const {
    while (!cuda::ptx::mbarrier_try_wait_parity(barrier, 0)) {
    }
  }
};

}  // namespace wts
