// AVX2 vectors, as panel.h wants them. Only for files that are compiled for these instructions alone; the rules of
// avx2.cc hold here too, and the unnamed namespace keeps each object's copy its own.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/element.h"

namespace graphrot {
namespace {

struct Avx2 {
  static constexpr int kLevels = 3;
  static constexpr int kChunk = 3;
  static constexpr bool kSingles = true;  // one() and put() exist

  __m256 v;

  static Avx2 load(const float* from) { return {_mm256_loadu_ps(from)}; }

  static Avx2 load(const Half* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }

  static Avx2 load(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }

  void store(float* to) const { _mm256_storeu_ps(to, v); }

  void store(Half* to) const {
    const __m128i bits = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
  }

  void store(BFloat16* to) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }

  static Avx2 broadcast(float value) { return {_mm256_set1_ps(value)}; }

  static Avx2 multiply_add(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

  static float one(float value) { return value; }

  static float one(Half value) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(value.bits))); }

  static float one(BFloat16 value) {
    const auto bits = static_cast<int>(static_cast<unsigned>(value.bits) << 16);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
  }

  static void put(float value, float* to) { *to = value; }

  static void put(float value, Half* to) {
    const __m128i bits = _mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    to->bits = static_cast<std::uint16_t>(_mm_cvtsi128_si32(bits));
  }

  static void put(float value, BFloat16* to) {
    BFloat16 eight[8];
    broadcast(value).store(eight);
    *to = eight[0];
  }

  // Partner by a shuffle, then partner + v in the lower half of each pair and partner - v in the upper.
  template <std::size_t Stride>
  Avx2 butterfly() const {
    if constexpr (Stride == 1) {
      const __m256 sign = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
      return {_mm256_fmadd_ps(v, sign, _mm256_permute_ps(v, 0xb1))};
    } else if constexpr (Stride == 2) {
      const __m256 sign = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
      return {_mm256_fmadd_ps(v, sign, _mm256_permute_ps(v, 0x4e))};
    } else {
      const __m256 sign = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
      return {_mm256_fmadd_ps(v, sign, _mm256_permute2f128_ps(v, v, 0x01))};
    }
  }

  friend Avx2 operator+(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Avx2 operator-(Avx2 a, Avx2 b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Avx2 operator*(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.v, b.v)}; }

  // The largest magnitude by its bits: as whole numbers, infinity is above all others and NaN above infinity.
  struct Peak {
    __m256i bits = _mm256_setzero_si256();

    void add(Avx2 x) {
      const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff));
      bits = _mm256_max_epu32(bits, magnitude);
    }

    std::uint32_t largest() const {
      __m128i four = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
      four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
      four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
      return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
    }
  };
};

}  // namespace
}  // namespace graphrot
