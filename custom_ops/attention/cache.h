// Rows of the cache: one token of one head as codes, a float16 step and a float16 base. value = base + step * code.
//   4 bits: byte i = code[i] | code[i + D/2] << 4;   8 bits: byte i = code[i];   then step, base (little endian).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/element.h"
#include "common/isa.h"

namespace graphrot {

struct CacheFormat {
  std::size_t head_size;  // D, even
  int bits;               // 4 or 8
};

inline constexpr std::size_t kRowScaleBytes = 4;

constexpr std::size_t code_bytes(const CacheFormat& format) {
  return format.bits == 4 ? format.head_size / 2 : format.head_size;
}
constexpr std::size_t row_bytes(const CacheFormat& format) { return code_bytes(format) + kRowScaleBytes; }

struct CacheKernels {
  // Elements to floats and back.
  void (*load[kElementCount])(const void* from, float* to, std::size_t count);
  void (*save[kElementCount])(const float* from, void* to, std::size_t count);
  // One row out of head_size floats. The least float becomes the base and the step spans the rest, both rounded to
  // float16 within +-65504; where a float is NaN or infinite, base is NaN and all else zero.
  void (*store)(const CacheFormat& format, const float* z, std::uint8_t* row);
};

const CacheKernels& cache_scalar();
#if GRAPHROT_X86
const CacheKernels& cache_avx2();
#endif
const CacheKernels& cache_kernels(Isa isa);

}  // namespace graphrot
