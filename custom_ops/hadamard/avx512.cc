// AVX-512 (F, BW, DQ, VL). This file alone is compiled for it; the rules of avx2.cc hold here too.
#include "hadamard/panel.h"

#if GRAPHROT_X86

#include <immintrin.h>

namespace graphrot {
namespace {

struct Avx512 {
  static constexpr int kLevels = 4;
  static constexpr int kChunk = 4;

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

  // Partner by a shuffle, then partner + v in the lower half of each pair and partner - v in the upper.
  template <std::size_t Stride>
  Avx512 butterfly() const {
    if constexpr (Stride == 1) {
      return combined(_mm512_permute_ps(v, 0xb1), 0xaaaa);
    } else if constexpr (Stride == 2) {
      return combined(_mm512_permute_ps(v, 0x4e), 0xcccc);
    } else if constexpr (Stride == 4) {
      return combined(_mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
    } else {
      return combined(_mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
    }
  }

  Avx512 combined(__m512 partner, __mmask16 upper) const {
    return {_mm512_mask_sub_ps(_mm512_add_ps(partner, v), upper, partner, v)};
  }

  friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Avx512 operator-(Avx512 a, Avx512 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.v, b.v)}; }
};

// Rows of less than two vectors: the path of half the width is faster. It has twice the tiles that can be summed
// side by side, and where blocks are copied together first, the pieces are too small for reads of 64 bytes.
template <class T, Element E>
void run(const HadamardProblem& problem, const void* in, void* out, std::size_t blocks, float* scratch) {
  if (problem.group > 1 || (problem.order > 1 && problem.levels <= Avx512::kLevels)) {
    return hadamard_avx2().run[static_cast<int>(E)](problem, in, out, blocks, scratch);
  }
  panel::run_long<Avx512>(problem, static_cast<const T*>(in), static_cast<T*>(out), blocks, scratch);
}

constexpr HadamardKernels kKernels = {
    {&run<float, Element::kFloat>, &run<Half, Element::kHalf>, &run<BFloat16, Element::kBFloat16>}};

}  // namespace

const HadamardKernels& hadamard_avx512() { return kKernels; }

}  // namespace graphrot

#endif
