// CUDA's C++ for kernels that are compiled as plain C++ and run on the CPU: what kernels here use of it, with CUDA's own
// names. common/cuda/device.cuh includes it where GRAPHROT_CUDA_ON_CPU is defined.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cuda/runtime.h"
#include "cuda_on_cpu/block.h"
#include "cuda_on_cpu/guarded.h"
#include "cuda_on_cpu/shared.h"

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx graphrot::shim::thread_index
#define blockIdx graphrot::shim::block_index
#define blockDim graphrot::shim::block_size
#define gridDim graphrot::shim::grid_size

namespace graphrot::shim {

// For tests: what current_device() says.
void set_device(const CudaDevice& device);

// Every lane's value and the lane whose value it asks for.
struct Shuffled {
  std::uint32_t value;
  unsigned source;
};
void shuffle(const char* what, unsigned mask, Shuffled& own);
unsigned vote(const char* what, unsigned mask, bool yes);  // the lanes that said yes

template <class T>
T shuffle(const char* what, unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) == 4 && std::is_trivially_copyable_v<T>, "values of 32 bits");
  Shuffled own{0, source};
  std::memcpy(&own.value, &value, sizeof value);
  shuffle(what, mask, own);
  std::memcpy(&value, &own.value, sizeof value);
  return value;
}

inline unsigned lane() { return thread_number() % 32; }

// As the instructions of common/cuda/ptx.cuh.
int dot4(unsigned u, int s, int acc);
uint4 load16(const void* from);
void store16(void* to, uint4 v);
void copy_async(std::size_t shared_byte, const void* from, bool valid);
void commit_copies();
void wait_copies(std::size_t but);
void multiply_bytes(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool b_signed);
void multiply_halves(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool bfloat);
void load_matrices(unsigned (&words)[4], std::size_t shared_byte, bool transposed);

}  // namespace graphrot::shim

inline void __syncthreads(int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  graphrot::shim::barrier(line, file);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { graphrot::shim::warp_barrier(mask); }
inline void __threadfence() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = graphrot::shim::lane(), w = static_cast<unsigned>(width);
  return graphrot::shim::shuffle("__shfl_sync", mask, value, lane / w * w + static_cast<unsigned>(source) % w);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return graphrot::shim::shuffle("__shfl_xor_sync", mask, value, graphrot::shim::lane() ^ static_cast<unsigned>(lanes));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes) {
  const unsigned lane = graphrot::shim::lane();
  return graphrot::shim::shuffle("__shfl_down_sync", mask, value, lane + lanes > 31 ? lane : lane + lanes);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes) {
  const unsigned lane = graphrot::shim::lane();
  return graphrot::shim::shuffle("__shfl_up_sync", mask, value, lane < lanes ? lane : lane - lanes);
}
inline unsigned __ballot_sync(unsigned mask, bool yes) { return graphrot::shim::vote("__ballot_sync", mask, yes); }
inline bool __any_sync(unsigned mask, bool yes) { return graphrot::shim::vote("__any_sync", mask, yes) != 0; }
inline bool __all_sync(unsigned mask, bool yes) { return graphrot::shim::vote("__all_sync", mask, yes) == mask; }

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }

// Rounded half to even; beyond the largest integer stays there, NaN becomes 0.
inline int __float2int_rn(float value) {
  if (value != value) return 0;
  if (value >= 2147483648.0f) return 2147483647;
  if (value < -2147483648.0f) return -2147483647 - 1;
  return static_cast<int>(std::nearbyint(value));
}
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __expf(float a) { return std::exp(a); }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
// Byte i of the result is byte (selector >> 4 i) % 8 of y:x.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned chosen = 0;
  for (unsigned i = 0; i < 4; ++i) {
    chosen |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7u) & 0xffu) << 8 * i;
  }
  return chosen;
}

template <class T>
inline T __ldg(const T* from) {
  return *from;
}
template <class T>
inline T atomicAdd(T* to, T value) {
  const T before = *to;
  *to = before + value;
  return before;
}
