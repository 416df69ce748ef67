// Loops whose index is a constant in every pass. `#pragma unroll` gives up on large bodies, and then arrays of registers become memory.
#pragma once
#include <cuda/std/utility>

namespace wts {

// body(0), body(1), ..., body(kCount - 1); the argument converts to a constant expression.
template <int kCount, class Body>
__device__ __forceinline__ void unrolled(Body&& body) {
  [&]<int... kIndices>(cuda::std::integer_sequence<int, kIndices...>) {
    (body(cuda::std::integral_constant<int, kIndices>{}), ...);
  }(cuda::std::make_integer_sequence<int, kCount>{});
}

}  // namespace wts
