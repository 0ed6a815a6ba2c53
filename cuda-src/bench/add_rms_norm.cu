// What stands behind NCCL's all-reduce in the paths that `bench` holds the fused kernel against. In line with NCCL: one kernel that
// adds the residual, writes the sum, and writes its RMS norm. Apart from it: one kernel that adds, and one that norms. A norm takes
// one block a token and one pass: a row stays in registers. Accesses are of 16 bytes, arithmetic is in float32, and what is normed
// is the sum as it was written.
//
// Compiled by NVRTC for the GPU at hand. Needs no header.

namespace {

// 16 bytes: eight elements of 16 bits.
struct alignas(16) Vector {
  unsigned words[4];
};

struct Bf16 {
  static __device__ __forceinline__ float low(unsigned word) { return __uint_as_float(word << 16); }
  static __device__ __forceinline__ float high(unsigned word) { return __uint_as_float(word & 0xffff0000u); }
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

struct Fp16 {
  static __device__ __forceinline__ float low(unsigned word) { return of(static_cast<unsigned short>(word)); }
  static __device__ __forceinline__ float high(unsigned word) { return of(static_cast<unsigned short>(word >> 16)); }
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }

 private:
  static __device__ __forceinline__ float of(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

// The elements of both, added.
template <typename Type>
__device__ __forceinline__ Vector sum_of(Vector const& one, Vector const& other) {
  Vector sum;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    sum.words[word] = Type::pack(Type::low(one.words[word]) + Type::low(other.words[word]),
                                 Type::high(one.words[word]) + Type::high(other.words[word]));
  }
  return sum;
}

template <typename Type>
__device__ __forceinline__ float squares_of(Vector const& vector) {
  float squares = 0.0f;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    float const low = Type::low(vector.words[word]);
    float const high = Type::high(vector.words[word]);
    squares += low * low + high * high;
  }
  return squares;
}

template <typename Type>
__device__ __forceinline__ Vector normed(Vector const& vector, float scale, Vector const& weights) {
  Vector normed;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    normed.words[word] = Type::pack(Type::low(vector.words[word]) * scale * Type::low(weights.words[word]),
                                    Type::high(vector.words[word]) * scale * Type::high(weights.words[word]));
  }
  return normed;
}

// Every thread gets the sum over the block, whose warps are whole.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  unsigned const lane = threadIdx.x % 32;
  if (lane == 0) {
    partial[threadIdx.x / 32] = value;
  }
  __syncthreads();
  value = lane < blockDim.x / 32 ? partial[lane] : 0.0f;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Writes the norm of a row, of which each thread holds its vectors and the sum of their squares.
template <typename Type, int N>
__device__ __forceinline__ void write_norm(Vector const (&rows)[N], Vector const (&weights)[N], Vector* norm_out, unsigned vectors,
                                           float squares, float eps) {
  float const scale = rsqrtf(block_sum(squares) / static_cast<float>(vectors * 8) + eps);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    unsigned const at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      norm_out[at] = normed<Type>(rows[i], scale, weights[i]);
    }
  }
}

// `vectors` of a row, at most `N` for each thread.
template <typename Type, int N>
__device__ __forceinline__ void add_rms_norm(Vector const* in, Vector const* residual, Vector const* gamma, Vector* residual_out,
                                             Vector* norm_out, unsigned vectors, float eps) {
  unsigned long long const row = static_cast<unsigned long long>(blockIdx.x) * vectors;
  Vector weights[N];
  Vector rows[N];
  // Neither comes from the kernel ahead: both may be on their way before it has ended.
#pragma unroll
  for (int i = 0; i < N; ++i) {
    unsigned const at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      weights[i] = gamma[at];
      rows[i] = residual[row + at];
    }
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    unsigned const at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      rows[i] = sum_of<Type>(in[row + at], rows[i]);
      squares += squares_of<Type>(rows[i]);
      residual_out[row + at] = rows[i];
    }
  }
  write_norm<Type>(rows, weights, norm_out + row, vectors, squares, eps);
}

// One vector for each thread of the grid.
template <typename Type>
__device__ __forceinline__ void residual_add(Vector const* in, Vector const* residual, Vector* residual_out, unsigned vectors) {
  unsigned const at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < vectors) {
    residual_out[at] = sum_of<Type>(in[at], residual[at]);
  }
}

// `vectors` of a row, at most `N` for each thread.
template <typename Type, int N>
__device__ __forceinline__ void rms_norm(Vector const* in, Vector const* gamma, Vector* norm_out, unsigned vectors, float eps) {
  unsigned long long const row = static_cast<unsigned long long>(blockIdx.x) * vectors;
  Vector weights[N];
  Vector rows[N];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    unsigned const at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      weights[i] = gamma[at];
      rows[i] = in[row + at];
      squares += squares_of<Type>(rows[i]);
    }
  }
  write_norm<Type>(rows, weights, norm_out + row, vectors, squares, eps);
}

}  // namespace

#define ADD_RMS_NORM(name, Type, N)                                                                                          \
  extern "C" __global__ void __launch_bounds__(1024) name(Vector const* in, Vector const* residual, Vector const* gamma,     \
                                                          Vector* residual_out, Vector* norm_out, unsigned vectors,          \
                                                          float eps) {                                                       \
    add_rms_norm<Type, N>(in, residual, gamma, residual_out, norm_out, vectors, eps);                                        \
  }

ADD_RMS_NORM(add_rms_norm_bf16_1, Bf16, 1)
ADD_RMS_NORM(add_rms_norm_bf16_2, Bf16, 2)
ADD_RMS_NORM(add_rms_norm_bf16_4, Bf16, 4)
ADD_RMS_NORM(add_rms_norm_fp16_1, Fp16, 1)
ADD_RMS_NORM(add_rms_norm_fp16_2, Fp16, 2)
ADD_RMS_NORM(add_rms_norm_fp16_4, Fp16, 4)

#define RESIDUAL_ADD(name, Type)                                                                                             \
  extern "C" __global__ void __launch_bounds__(256) name(Vector const* in, Vector const* residual, Vector* residual_out,     \
                                                         unsigned vectors) {                                                 \
    residual_add<Type>(in, residual, residual_out, vectors);                                                                 \
  }

RESIDUAL_ADD(residual_add_bf16, Bf16)
RESIDUAL_ADD(residual_add_fp16, Fp16)

#define LONE_RMS_NORM(name, Type, N)                                                                                         \
  extern "C" __global__ void __launch_bounds__(1024) name(Vector const* in, Vector const* gamma, Vector* norm_out,           \
                                                          unsigned vectors, float eps) {                                     \
    rms_norm<Type, N>(in, gamma, norm_out, vectors, eps);                                                                    \
  }

LONE_RMS_NORM(lone_rms_norm_bf16_1, Bf16, 1)
LONE_RMS_NORM(lone_rms_norm_bf16_2, Bf16, 2)
LONE_RMS_NORM(lone_rms_norm_bf16_4, Bf16, 4)
LONE_RMS_NORM(lone_rms_norm_fp16_1, Fp16, 1)
LONE_RMS_NORM(lone_rms_norm_fp16_2, Fp16, 2)
LONE_RMS_NORM(lone_rms_norm_fp16_4, Fp16, 4)
