// Element types of tensors: float, and the two 16-bit formats as raw bits with conversions in plain C++.
#pragma once

#include <cstdint>
#include <cstring>

namespace graphrot {

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

enum class Element { kFloat = 0, kHalf = 1, kBFloat16 = 2 };
inline constexpr int kElementCount = 3;

// The name of the type in ONNX.
inline const char* element_name(Element element) {
  constexpr const char* kNames[kElementCount] = {"float", "float16", "bfloat16"};
  return kNames[static_cast<int>(element)];
}

namespace detail {

inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace detail

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) { return detail::bits_float(static_cast<std::uint32_t>(value.bits) << 16); }

inline float to_float(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0x1fu) {  // infinity, or NaN made quiet
    return detail::bits_float(sign | 0x7f800000u | (fraction << 13) | (fraction != 0 ? 0x400000u : 0u));
  }
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact in float
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return detail::bits_float(detail::float_bits(magnitude) | sign);
  }
  return detail::bits_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

inline void from_float(float value, float* out) { *out = value; }

// Round to nearest, ties to even; NaN stays NaN.
inline void from_float(float value, BFloat16* out) {
  const std::uint32_t bits = detail::float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    return;
  }
  out->bits = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Round to nearest, ties to even; too large becomes infinity, NaN stays NaN.
inline void from_float(float value, Half* out) {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: let the addition round to a multiple of 2^-24
    result = detail::float_bits(detail::bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<std::uint16_t>(sign | result);
}

}  // namespace graphrot
