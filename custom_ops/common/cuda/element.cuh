// Element types in kernels. The names differ from those of common/element.h, whose functions are the host's.
#pragma once

#include "common/cuda/device.cuh"
#include "common/element.h"

namespace graphrot::cuda {

// Elements in 16 bytes.
template <class T>
inline constexpr unsigned kPack = 16 / sizeof(T);

template <class T>
GRAPHROT_DEVICE T narrow(float value);  // rounded half to even; NaN stays NaN

#if defined(GRAPHROT_CUDA_ON_CPU)

template <class T>
inline float widen(T value) {
  return graphrot::to_float(value);
}

template <class T>
inline T narrow(float value) {
  T element{};
  graphrot::from_float(value, &element);
  return element;
}

// Two elements of 16 bits, the first in the low half.
inline float widen_low(unsigned pair, Half) { return widen(Half{static_cast<std::uint16_t>(pair)}); }
inline float widen_high(unsigned pair, Half) { return widen(Half{static_cast<std::uint16_t>(pair >> 16)}); }
inline unsigned narrow_pair(float low, float high, Half) {
  return narrow<Half>(low).bits | static_cast<unsigned>(narrow<Half>(high).bits) << 16;
}
inline unsigned narrow_pair(float low, float high, BFloat16) {
  return narrow<BFloat16>(low).bits | static_cast<unsigned>(narrow<BFloat16>(high).bits) << 16;
}

#else

GRAPHROT_DEVICE float widen(float value) { return value; }
GRAPHROT_DEVICE float widen(BFloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
GRAPHROT_DEVICE float widen(Half value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

template <>
GRAPHROT_DEVICE float narrow<float>(float value) {
  return value;
}
template <>
GRAPHROT_DEVICE Half narrow<Half>(float value) {
  Half element;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
  return element;
}
template <>
GRAPHROT_DEVICE BFloat16 narrow<BFloat16>(float value) {
  BFloat16 element;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
  return element;
}

// Two elements of 16 bits, the first in the low half.
GRAPHROT_DEVICE float widen_low(unsigned pair, Half) { return widen(Half{static_cast<std::uint16_t>(pair)}); }
GRAPHROT_DEVICE float widen_high(unsigned pair, Half) { return widen(Half{static_cast<std::uint16_t>(pair >> 16)}); }
GRAPHROT_DEVICE unsigned narrow_pair(float low, float high, Half) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
GRAPHROT_DEVICE unsigned narrow_pair(float low, float high, BFloat16) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

#endif

GRAPHROT_DEVICE float widen_low(unsigned pair, BFloat16) { return __uint_as_float(pair << 16); }
GRAPHROT_DEVICE float widen_high(unsigned pair, BFloat16) { return __uint_as_float(pair & 0xffff0000u); }

// 16 bytes to kPack<T> floats and back.
template <class T>
GRAPHROT_DEVICE void unpack(uint4 v, float (&x)[8]) {
  static_assert(sizeof(T) == 2, "of 16 bits");
  x[0] = widen_low(v.x, T{}), x[1] = widen_high(v.x, T{}), x[2] = widen_low(v.y, T{}), x[3] = widen_high(v.y, T{});
  x[4] = widen_low(v.z, T{}), x[5] = widen_high(v.z, T{}), x[6] = widen_low(v.w, T{}), x[7] = widen_high(v.w, T{});
}

template <class T>
GRAPHROT_DEVICE void unpack(uint4 v, float (&x)[4]) {
  static_assert(sizeof(T) == 4, "of 32 bits");
  x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}

template <class T>
GRAPHROT_DEVICE uint4 pack(const float (&x)[8]) {
  static_assert(sizeof(T) == 2, "of 16 bits");
  return make_uint4(narrow_pair(x[0], x[1], T{}), narrow_pair(x[2], x[3], T{}), narrow_pair(x[4], x[5], T{}),
                    narrow_pair(x[6], x[7], T{}));
}

template <class T>
GRAPHROT_DEVICE uint4 pack(const float (&x)[4]) {
  static_assert(sizeof(T) == 4, "of 32 bits");
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

}  // namespace graphrot::cuda
