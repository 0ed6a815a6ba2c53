// How many thread blocks a cluster may have, asked of the device instead of assumed.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace fi_arch {

// The largest cluster (in blocks, at least 1) in which the current device can launch `kernel` with any block
// size that the kernel allows. Asked once for each kernel and device; 1 where the device has no clusters.
// `static`: each object file keeps its own memory, and none of it is visible outside the library.
static inline int device_cluster_limit(void const* kernel) {
  static std::mutex mutex;
  // Never freed: a launch may come from another library's exit handler.
  static auto* const known = new std::map<std::pair<void const*, int>, int>;

  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 1;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto const found = known->find({kernel, device});
  if (found != known->end()) {
    return found->second;
  }

  int limit = 0;
  cudaFuncAttributes attributes = {};
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = 8;
    // The largest block is the hardest to place, so its answer holds for the smaller ones too.
    config.blockDim = attributes.maxThreadsPerBlock;
    status = cudaOccupancyMaxPotentialClusterSize(&limit, kernel, &config);
  }
  if (status != cudaSuccess) {
    // The question failed, not the caller's work: the next check of the last error must not see it.
    (void)cudaGetLastError();
  }
  limit = std::max(limit, 1);
  known->emplace(std::make_pair(kernel, device), limit);
  return limit;
}

// `wanted` blocks, or as many as the device can launch: between 1 and `wanted`.
static inline int cluster_size(int wanted, void const* kernel) {
  return std::min(wanted, device_cluster_limit(kernel));
}

// The largest power of two up to `cluster_size(wanted, kernel)`. For launchers that halve their cluster while
// they double their blocks: from an odd size the halves would no longer cover the token.
static inline int cluster_size_pow2(int wanted, void const* kernel) {
  int const limit = cluster_size(wanted, kernel);
  int size = 1;
  while (size * 2 <= limit) {
    size *= 2;
  }
  return size;
}

// Whether blocks of `block` threads cover `threads` exactly, in one cluster of a power of two up to `limit` blocks.
static inline bool covers(int threads, int block, int limit) {
  int const blocks = threads / block;
  return threads % block == 0 && blocks > 0 && blocks <= limit && (blocks & (blocks - 1)) == 0;
}

}  // namespace fi_arch
