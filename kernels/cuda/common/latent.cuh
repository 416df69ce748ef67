// The latent u = W1[token] of one step: its record in global memory and its place in shared memory.
//
// A latent's place is a slot, named by its byte offset: the current one and candidates for the next share the request's slots.
//
// int8: a record is 528 bytes, plane hi (256), plane lo (256), the fp32 scale of lo, padding. In shared memory the planes lie 320 bytes
// apart: the four lanes t = 0..3 of an mma.sync fragment read 16-byte chunks t, t + 4, t + 8, t + 12 of two planes, eight different groups
// of banks.
#pragma once
#include "common/ptx.cuh"

namespace wts {

constexpr int kRank = 256;

// How many slots a request has.
__host__ __device__ constexpr int latent_slots(int requests) { return requests <= 4 ? 4 : 3; }

template <int kSlotCount>
struct LatentInt8 {
  static constexpr int kRecordBytes = 2 * kRank + 16, kSlots = kSlotCount;
  static constexpr int kPlaneStride = kRank + 64;
  static constexpr int kSlotBytes = 2 * kPlaneStride + 16;  // the scale last
  static constexpr int kSmemBytes = kSlots * kSlotBytes;

  uint8_t* smem;

  // One warp: start copying a record. 32 lanes, 32 chunks of 16 bytes.
  __device__ void fetch(int slot, const uint8_t* record) const {
    const int lane = threadIdx.x % 32;
    uint8_t* target = smem + slot;
    copy_async_16(target + lane / 16 * kPlaneStride + lane % 16 * 16, record + lane * 16);
    if (lane == 0) copy_async_4(target + 2 * kPlaneStride, record + 2 * kRank);
  }

  __device__ float scale(int slot) const { return *reinterpret_cast<const float*>(smem + slot + 2 * kPlaneStride); }

  // The B operand of mma.sync, in the order kernels/packing.py packs A: lane (g, t) holds plane g % 2 of its column's request and reads
  // chunks t + 4 i, at 4 i here; each serves two k-steps.
  __device__ const uint4* chunks(int slot) const {
    const int lane = threadIdx.x % 32;
    return reinterpret_cast<const uint4*>(smem + slot + lane / 4 % 2 * kPlaneStride + lane % 4 * 16);
  }

  __device__ static void prefetch(const uint8_t* record) {
    const int lane = threadIdx.x % 32;
    if (lane * 32 < kRecordBytes) prefetch_l2(record + lane * 32);
  }
};

// bf16: a record is the row of W1 itself, copied as it is. Lane (g, t) of an mma.sync fragment reads 16-byte chunks t, t + 4, ...: no two
// lanes share a bank unless they share the chunk.
template <int kSlotCount>
struct LatentBf16 {
  static constexpr int kRecordBytes = 2 * kRank, kSlots = kSlotCount;
  static constexpr int kSlotBytes = kRecordBytes, kSmemBytes = kSlots * kSlotBytes;

  uint8_t* smem;

  __device__ void fetch(int slot, const uint8_t* record) const {
    copy_async_16(smem + slot + threadIdx.x % 32 * 16, record + threadIdx.x % 32 * 16);
  }

  // The B operand of mma.sync: lane (g, t) reads chunks t + 4 i of its column's latent, at 4 i here; each serves two k-steps.
  __device__ const uint4* chunks(int slot) const { return reinterpret_cast<const uint4*>(smem + slot) + threadIdx.x % 4; }

  __device__ static void prefetch(const uint8_t* record) {
    const int lane = threadIdx.x % 32;
    if (lane * 32 < kRecordBytes) prefetch_l2(record + lane * 32);
  }
};

}  // namespace wts
