// The CUDA language, for kernels that are compiled in two ways: by nvcc, and as plain C++ where GRAPHROT_CUDA_ON_CPU is
// defined (cuda_on_cpu/shim.h). Kernels use what CUDA itself offers in C++ (threadIdx, __syncthreads, __shfl_xor_sync,
// fmaf, __float2int_rn, ...; the shim says which), shared memory by shared.cuh, instructions by ptx.cuh, and launch.h.
//
//   GRAPHROT_KERNEL(256) name(...) { ... }        a kernel of at most 256 threads; a second number is the least count
//                                                 of blocks on a multiprocessor
//   GRAPHROT_DEVICE float name(...) { ... }       a function for kernels
//   GRAPHROT_HOST_DEVICE constexpr ...             a function for kernels and for what starts them
//   GRAPHROT_UNROLL                               before a loop; GRAPHROT_NO_UNROLL where registers are dear
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(GRAPHROT_CUDA_ON_CPU)

#include "cuda_on_cpu/shim.h"

#define GRAPHROT_KERNEL(...) void
#define GRAPHROT_DEVICE inline
#define GRAPHROT_HOST_DEVICE inline
#define GRAPHROT_UNROLL
#define GRAPHROT_NO_UNROLL

#else

#include <cuda_runtime.h>

#define GRAPHROT_KERNEL(...) __global__ void __launch_bounds__(__VA_ARGS__)
#define GRAPHROT_DEVICE __device__ __forceinline__
#define GRAPHROT_HOST_DEVICE __host__ __device__ inline
#define GRAPHROT_UNROLL _Pragma("unroll")
#define GRAPHROT_NO_UNROLL _Pragma("unroll 1")

#endif

namespace graphrot::cuda {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// acc + the sum of four products: unsigned bytes of `u` by signed bytes of `s`.
GRAPHROT_DEVICE int dot4_u8s8(unsigned u, int s, int acc) {
#if defined(GRAPHROT_CUDA_ON_CPU)
  return shim::dot4(u, s, acc);
#else
  int sum;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(u), "r"(s), "r"(acc));
  return sum;
#endif
}

}  // namespace graphrot::cuda
