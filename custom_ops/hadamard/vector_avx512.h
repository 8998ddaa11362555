// AVX-512 vectors, as panel.h wants them. Only for files that are compiled for these instructions alone; the rules of
// avx2.cc hold here too, and the unnamed namespace keeps each object's copy its own.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/element.h"

namespace graphrot {
namespace {

struct Avx512 {
  static constexpr int kLevels = 4;
  static constexpr int kChunk = 4;
  static constexpr bool kSingles = false;  // single values are left to AVX2

  __m512 v;

  static Avx512 load(const float* from) { return {_mm512_loadu_ps(from)}; }

  static Avx512 load(const Half* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }

  static Avx512 load(const BFloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }

  void store(float* to) const { _mm512_storeu_ps(to, v); }

  void store(Half* to) const {
    const __m256i bits = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  }

  // By integers: the instruction of AVX512_BF16 would flush subnormal numbers.
  void store(BFloat16* to) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), high);
  }

  static Avx512 broadcast(float value) { return {_mm512_set1_ps(value)}; }

  static Avx512 multiply_add(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

  // Partner by a shuffle, plus v in the lower half of each pair and minus v in the upper.
  template <std::size_t Stride>
  Avx512 butterfly() const {
    if constexpr (Stride == 1) {
      const __m512 sign = _mm512_setr_ps(1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1);
      return {_mm512_fmadd_ps(v, sign, _mm512_permute_ps(v, 0xb1))};
    } else if constexpr (Stride == 2) {
      const __m512 sign = _mm512_setr_ps(1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1);
      return {_mm512_fmadd_ps(v, sign, _mm512_permute_ps(v, 0x4e))};
    } else if constexpr (Stride == 4) {
      const __m512 sign = _mm512_setr_ps(1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1);
      return {_mm512_fmadd_ps(v, sign, _mm512_shuffle_f32x4(v, v, 0xb1))};
    } else {
      const __m512 sign = _mm512_setr_ps(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1);
      return {_mm512_fmadd_ps(v, sign, _mm512_shuffle_f32x4(v, v, 0x4e))};
    }
  }

  friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Avx512 operator-(Avx512 a, Avx512 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.v, b.v)}; }

  // The largest magnitude by its bits: as whole numbers, infinity is above all others and NaN above infinity.
  struct Peak {
    __m512i bits = _mm512_setzero_si512();

    void add(Avx512 x) {
      const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
      bits = _mm512_max_epu32(bits, magnitude);
    }

    std::uint32_t largest() const { return _mm512_reduce_max_epu32(bits); }
  };
};

}  // namespace
}  // namespace graphrot
