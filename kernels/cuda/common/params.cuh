// What every walk kernel is given. Mirrored by kernels/params.py; the size is checked on both sides.
#pragma once
#include "common/ptx.cuh"

namespace wts {

struct Params {
  const uint4* weights;           // W2, packed for this kernel (kernels/packing.py), CTA after CTA
  const float* row_scale;         // [rows of all CTAs] fp32, int8 weights only
  const uint8_t* latents;         // [at least latent_vocab] records of W1 (common/latent.cuh)
  const uint16_t* base;           // [batch, steps, vocab] bf16 base logits
  const int64_t* anchor;          // [batch] the token before step 0
  const float* temperature;       // [batch]; <= 0 or NaN is greedy
  const int64_t* seed;            // [batch] noise keys
  uint16_t* logits;               // [batch, steps, vocab] bf16 corrected logits of rows with temperature > 0, or null
  int64_t* tokens;                // [batch, steps]
  uint64_t* mail;                 // the exchange's words (common/exchange.cuh)
  uint32_t* round;                // launches since the state was made; survives graph replays
  int64_t* clocks;                // [steps + 1, 2] SM cycles and nanoseconds of CTA 0, or null
  int64_t base_request_stride;    // elements between two requests of `base`
  int64_t base_step_stride;       // elements between two steps of `base`
  int64_t logits_request_stride;  // the same of `logits`
  int64_t logits_step_stride;
  int64_t tokens_request_stride;
  int32_t vocab;         // rows of W2
  int32_t latent_vocab;  // token ids are clamped below this; rows of W1 that count
  int32_t steps;
  int32_t batch;
  int32_t base_slots;  // steps of base logits that shared memory holds at once (walk_resident.cuh)
  int32_t padding;
};
static_assert(sizeof(Params) == 160, "kernels/params.py mirrors this struct");

}  // namespace wts
