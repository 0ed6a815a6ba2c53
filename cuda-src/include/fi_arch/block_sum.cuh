// Sums over a thread block whose last warp may be partial.
#pragma once

namespace fi_arch {

// Lane 0 gets the sum over the first `lanes` lanes of its warp; what other lanes get is of no use.
// All of these `lanes` lanes, and no others, must call it. The order of additions is the same for a whole warp and a partial one.
template <typename T>
__device__ __forceinline__ T warp_sum(T value, unsigned lanes) {
  if (lanes >= 32) {
    // The common case, and each instruction of it is in the latency of a call: no lane has to be asked about.
#pragma unroll
    for (unsigned offset = 16; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
  }
  unsigned const mask = (1u << lanes) - 1u;
  unsigned const lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned offset = 16; offset > 0; offset /= 2) {
    T const other = __shfl_down_sync(mask, value, offset);
    // A lane past the end was never launched: its register holds nothing.
    if (lane + offset < lanes) {
      value += other;
    }
  }
  return value;
}

// Thread 0 gets in `values[i]` the sum of all threads' `values[i]`; the other threads' values are undefined after it.
// For one-dimensional blocks of 1 to 1024 threads, whole warps or not. Every thread of the block must call it,
// and the block must synchronize before it calls it again.
template <typename T, int NUM>
__device__ __forceinline__ void block_sum(T* values) {
  __shared__ T partial[NUM][32];
  unsigned const lane = threadIdx.x % 32;
  unsigned const warp = threadIdx.x / 32;
  unsigned const warps = (blockDim.x + 31) / 32;
  unsigned const lanes = min(blockDim.x - warp * 32, 32u);

#pragma unroll
  for (int i = 0; i < NUM; ++i) {
    values[i] = warp_sum(values[i], lanes);
    if (lane == 0) {
      partial[i][warp] = values[i];
    }
  }
  __syncthreads();
  if (warp == 0) {
    // More than one warp means that warp 0 is whole, so it has a lane for each of at most 32 warps.
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
      values[i] = warp_sum(lane < warps ? partial[i][lane] : T(0), lanes);
    }
  }
}

}  // namespace fi_arch
