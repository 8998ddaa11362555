// Instructions that CUDA's C++ has no name for: 16-byte loads of global memory, asynchronous copies to shared memory,
// matrix products of a warp. Lanes hold fragments as the PTX manual lays them out:
//   A of 8 bits [16, 32]: word i of lane l holds row l / 4 + 8 * (i % 2), columns 4 * (l % 4) + 16 * (i / 2) and the
//   three after; of 16 bits [16, 16]: columns 2 * (l % 4) + 8 * (i / 2) and the one after.
//   B [32, 8] or [16, 8]: word i holds column l / 4, rows 4 * (l % 4) + 16 * i and the three after, or
//   2 * (l % 4) + 8 * i and the one after.
//   D [16, 8]: number i holds row l / 4 + 8 * (i / 2), column 2 * (l % 4) + i % 2.
#pragma once

#include "common/cuda/device.cuh"
#include "common/cuda/shared.cuh"
#include "common/element.h"

namespace graphrot::cuda {

// 16 bytes of global memory that nothing writes while the kernel runs, past the first-level cache.
GRAPHROT_DEVICE uint4 load16(const void* from) {
#if defined(GRAPHROT_CUDA_ON_CPU)
  return shim::load16(from);
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
#endif
}

// The same number, of which the compiler does not know that it had it before.
GRAPHROT_DEVICE unsigned anew(unsigned value) {
#if !defined(GRAPHROT_CUDA_ON_CPU)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

GRAPHROT_DEVICE uint2 load8(const void* from) {
#if defined(GRAPHROT_CUDA_ON_CPU)
  shim::check_global(from, 8, 8, "load8");
#endif
  return *static_cast<const uint2*>(from);
}

// 16 bytes of global memory that this kernel writes too: never from a cache for constants.
GRAPHROT_DEVICE uint4 load16_in_place(const void* from) {
#if defined(GRAPHROT_CUDA_ON_CPU)
  return shim::load16(from);
#else
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
#endif
}

GRAPHROT_DEVICE void store16(void* to, uint4 v) {
#if defined(GRAPHROT_CUDA_ON_CPU)
  shim::store16(to, v);
#else
  *static_cast<uint4*>(to) = v;
#endif
}

#if defined(GRAPHROT_CUDA_ON_CPU)

template <class T>
inline void cp_async16(shim::SharedAddress<T> to, const void* from, bool valid) {
  shim::copy_async(to.offset(16), from, valid);
}
inline void cp_async_commit() { shim::commit_copies(); }
template <int N>
inline void cp_async_wait() {
  shim::wait_copies(N);
}

inline void mma_m16n8k32(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  shim::multiply_bytes(d, a, b, false);
}
inline void mma_m16n8k32_signed(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  shim::multiply_bytes(d, a, b, true);
}
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Half) {
  shim::multiply_halves(d, a, b, false);
}
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], BFloat16) {
  shim::multiply_halves(d, a, b, true);
}

template <class T>
inline void load_matrices(unsigned (&words)[4], shim::SharedAddress<T> row) {
  shim::load_matrices(words, row.offset(16), false);
}
template <class T>
inline void load_matrices_transposed(unsigned (&words)[4], shim::SharedAddress<T> row) {
  shim::load_matrices(words, row.offset(16), true);
}

#else

// Copies 16 bytes to shared memory some time before cp_async_wait comes back; zeros where not valid, and `from` is not
// read then.
template <class T>
GRAPHROT_DEVICE void cp_async16(T* to, const void* from, bool valid) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// Closes the group of copies that this thread began since the last call.
GRAPHROT_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups but the N latest. Other threads see the bytes after a barrier that follows.
template <int N>
GRAPHROT_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// d += a * b: signed bytes by unsigned bytes.
GRAPHROT_DEVICE void mma_m16n8k32(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a * b: signed bytes by signed bytes.
GRAPHROT_DEVICE void mma_m16n8k32_signed(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a * b in float; how the sum is rounded is the device's own.
GRAPHROT_DEVICE void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

GRAPHROT_DEVICE void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], BFloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 rows of 16 bytes: lane l gives the address of row l % 8 of matrix l / 8; word i of lane l is bytes
// 4 * (l % 4) to 4 * (l % 4) + 3 of row l / 4 of matrix i.
template <class T>
GRAPHROT_DEVICE void load_matrices(unsigned (&words)[4], T* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// As matrices of 8 by 8 numbers of 16 bits, each transposed.
template <class T>
GRAPHROT_DEVICE void load_matrices_transposed(unsigned (&words)[4], T* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

#endif

}  // namespace graphrot::cuda
